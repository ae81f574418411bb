"""Runs that are stopped go on where they were, and processes share documents without losing or doubling any."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_posenc.errors import OutputError
from hf_posenc.evaluation import perplexity_by_length
from hf_posenc.evaluation.partial import discard
from hf_posenc.evaluation.sharing import own_share
from tests.evaluation.models import llama, random_documents


class _Killed(Exception):
    pass


def _killed_after(model: nn.Module, forwards: int) -> Any:
    """Let the model die after so many forward passes; returns the hook's handle."""
    left = [forwards]

    def hook(*_: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise _Killed

    return model.register_forward_pre_hook(hook)


def _forwards(model: nn.Module, run: Any) -> tuple[Any, int]:
    count = [0]
    handle = model.register_forward_pre_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    try:
        return run(), count[0]
    finally:
        handle.remove()


def test_a_stopped_run_goes_on_and_ends_with_the_same_numbers(tmp_path: Path) -> None:
    model, documents = llama(), random_documents(90, 41, 66, 30)
    run: dict[str, Any] = {"lengths": [8, 16], "protocol": "sliding", "stride": 4}
    expected, whole = _forwards(model, lambda: perplexity_by_length(model, documents, **run))
    handle = _killed_after(model, whole // 2)
    with pytest.raises(_Killed):
        perplexity_by_length(model, documents, **run, partial=tmp_path)
    handle.remove()
    file = tmp_path / "scores-0.jsonl"
    kept = len([line for line in file.read_text().splitlines() if line])
    assert 2 <= kept < 8
    with file.open("a") as end:
        end.write('{"run": "torn')
    resumed, rest = _forwards(model, lambda: perplexity_by_length(model, documents, **run, partial=tmp_path))
    assert resumed == expected
    assert rest < 0.8 * whole
    again, few = _forwards(model, lambda: perplexity_by_length(model, documents[::-1], **run, partial=tmp_path))
    assert (again, few < 8) == (expected, True)  # only the probes of the model itself


def test_scores_of_other_models_texts_and_protocols_are_not_taken(tmp_path: Path) -> None:
    model, documents = llama(), random_documents(40, 30)
    perplexity_by_length(model, documents, [8], partial=tmp_path)
    other = llama()
    other.lm_head.weight.data[3] += 1.0  # type: ignore[union-attr, operator, index]
    for subject, texts, options in (
        (other, documents, {}),
        (model, random_documents(41, 31), {}),
        (model, documents, {"protocol": "sliding", "stride": 8}),
        (model, documents, {"bos_policy": "prepend"}),
    ):
        fresh = perplexity_by_length(subject, texts, [8], **options)
        assert perplexity_by_length(subject, texts, [8], **options, partial=tmp_path) == fresh


def test_infinite_scores_are_not_kept_and_finished_documents_are(tmp_path: Path) -> None:
    model, documents = llama(), random_documents(60, 40)
    documents = [[min(token, 95) for token in documents[0]], [96] * 5]  # longest first
    model.model.embed_tokens.weight.data[96] = float("nan")  # type: ignore[union-attr, operator, index]
    curve = perplexity_by_length(model, documents, [8], partial=tmp_path)
    assert "not finite" in curve.refused[8]
    kept = [json.loads(line) for line in (tmp_path / "scores-0.jsonl").read_text().splitlines() if line]
    assert [row["score"]["n_tokens"] for row in kept] == [59]
    discard(tmp_path)
    assert not tmp_path.exists()


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written to"):
        perplexity_by_length(llama(), random_documents(40), [8], partial=tmp_path / "file")


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(1, 9))
def test_every_document_belongs_to_one_process_and_loads_are_even(sizes: list[int], n: int) -> None:
    keys = [f"document {index}" for index in range(len(sizes))]
    processes: list[Any] = [SimpleNamespace(process_index=index, num_processes=n) for index in range(n)]
    shares = [own_share(sizes, keys, process) for process in processes]
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes)
