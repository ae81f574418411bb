"""Loss by position against the loss of each position taken alone."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_posenc.errors import DataError, LengthError
from hf_posenc.evaluation import PositionCurve, perplexity_by_length, perplexity_by_position
from hf_posenc.evaluation.position import log_bins
from tests.evaluation.models import VOCABULARY, gpt2, llama, naive_nll, random_documents
from tests.launching import TORCHRUN

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from accelerate import PartialState
from hf_posenc.evaluation import perplexity_by_position
from tests.evaluation.models import llama, random_documents
import torch
torch.manual_seed(5)
model, documents = llama(), random_documents(40, 33, 20, 60, 50, 34, 45)
state = PartialState(cpu=True)
curve = perplexity_by_position(model, documents, 32, processes=state, batch_size=2)
if state.is_main_process:
    print("curve", json.dumps(curve.to_dict() | {"processes": state.num_processes}))
if state.num_processes > 1:
    state.destroy_process_group()
"""


@given(st.integers(1, 5000))
def test_bins_cover_every_position_once_and_grow_slowly(length: int) -> None:
    edges = log_bins(length)
    assert edges[0] == 0
    assert edges[-1] == length
    assert all(left < right for left, right in pairwise(edges))
    assert len(edges) <= 4 * math.log2(length) + 3
    assert all(right <= 1.5 * left + 1 for left, right in pairwise(edges))


def test_each_bin_is_the_mean_over_documents_and_positions() -> None:
    model, documents = llama(), random_documents(40, 33, 20, 60)
    curve = perplexity_by_position(model, documents, 32, batch_size=2)
    long = [ids for ids in documents if len(ids) > 32]
    losses = np.array([naive_nll(model, ids, [(0, i) for i in range(32)]) for ids in long])
    assert curve.n_documents == len(long) == 3
    expected = [losses[:, a:b].mean() for a, b in pairwise(curve.edges)]
    assert curve.nll == pytest.approx(expected, rel=1e-5)
    assert curve.low is not None
    assert curve.high is not None
    spread = losses[:, :1].mean(axis=1)
    assert spread.min() - 1e-5 <= curve.low[0] < curve.nll[0] < curve.high[0] <= spread.max() + 1e-5


def test_the_bins_add_up_to_the_length_curve() -> None:
    model, documents = gpt2(), random_documents(50, 50)
    curve = perplexity_by_position(model, documents, 49)
    total = sum(nll * (b - a) for nll, a, b in zip(curve.nll, curve.edges, curve.edges[1:], strict=False))
    assert total / 49 == pytest.approx(perplexity_by_length(model, documents, [49]).nll[49], rel=1e-6)


def test_a_uniform_model_is_flat_with_no_spread() -> None:
    model = gpt2()
    model.lm_head.weight.data.zero_()  # type: ignore[union-attr, operator]
    curve = perplexity_by_position(model, random_documents(40, 40, 40), 32)
    assert curve.ppl == pytest.approx([VOCABULARY] * len(curve.ppl), rel=1e-9)
    assert curve.low == pytest.approx(curve.nll)
    assert curve.high == pytest.approx(curve.nll)


def test_one_document_has_no_interval_and_json_keeps_the_curve() -> None:
    curve = perplexity_by_position(gpt2(), random_documents(40), 32)
    assert (curve.low, curve.high) == (None, None)
    assert PositionCurve.from_dict(json.loads(json.dumps(curve.to_dict()))) == curve


def test_what_cannot_be_measured_is_an_error() -> None:
    with pytest.raises(DataError, match="No document has 65 tokens"):
        perplexity_by_position(gpt2(), random_documents(64), 64)
    with pytest.raises(LengthError, match="no position 65"):
        perplexity_by_position(gpt2(), random_documents(90), 65)


def test_a_process_does_its_share_and_what_it_kept_is_not_done_again(tmp_path: Path) -> None:
    model, documents = llama(), random_documents(40, 33, 20, 60)
    forwards = [0]
    model.register_forward_pre_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    expected = perplexity_by_position(model, documents, 32)
    alone = forwards[0]
    kept = []
    for index in range(2):
        process: Any = SimpleNamespace(process_index=index, num_processes=2, is_main_process=index == 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hf_posenc.evaluation.sharing.gather_object", lambda items: items)
            part = perplexity_by_position(model, documents, 32, processes=process, partial=tmp_path)
        kept.append(part.n_documents)
    assert sorted(kept) == [1, 2]
    forwards[0] = 0
    assert perplexity_by_position(model, documents[::-1], 32, partial=tmp_path) == expected
    assert alone - forwards[0] == 3  # what is left are the probes of the model itself
    torch.nn.init.ones_(model.lm_head.weight)  # type: ignore[union-attr, arg-type]
    assert perplexity_by_position(model, documents, 32, partial=tmp_path) != expected


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = llama()
    model.model.embed_tokens.weight.data[96] = float("nan")  # type: ignore[union-attr, operator, index]
    with pytest.raises(LengthError, match="length=32: the model's logits are not finite"):
        perplexity_by_position(model, [*random_documents(40), [*range(2, 32), 96, 96, 96]], 32)


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    curves = []
    for launcher in ((), TORCHRUN):
        done = subprocess.run(
            [sys.executable, *launcher, str(program)],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("curve")]
        curves.append(json.loads(line.removeprefix("curve")))
    one, two = curves
    assert [one.pop("processes"), two.pop("processes")] == [1, 2]
    assert one["n_documents"] == two["n_documents"] == 6
    for field in ("nll", "low", "high"):
        assert one[field] == pytest.approx(two[field], rel=1e-6)
