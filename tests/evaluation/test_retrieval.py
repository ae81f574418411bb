"""What retrieval measures, on models of which the answer is known, and on real ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from hf_posenc.errors import ConfigError, DataError, OutputError, UnknownNameError, UnsupportedFamilyError
from hf_posenc.evaluation import RetrievalGrid, retrieval_by_length
from hf_posenc.evaluation.intervals import wilson
from hf_posenc.evaluation.reading import Reading
from hf_posenc.evaluation.retrieval_papers import Exam
from hf_posenc.evaluation.retrieval_tasks import TASKS
from hf_posenc.evaluation.retrieval_text import NOISE, Hay, Pieces
from tests import checkpoints
from tests.evaluation.models import SMALL, VOCABULARY, gpt2, llama, opt
from tests.evaluation.retrievers import Copier, Forgetful, Knowing, characters

CHARACTERS = characters()
FEW: dict[str, Any] = {"depths": [0.0, 0.5, 1.0], "trials": 2}


@pytest.mark.parametrize("task", ["passkey", "single_needle", "multi_key"])
def test_a_model_that_copies_is_right_at_every_length_and_depth(task: str) -> None:
    grid = retrieval_by_length(Copier(len(CHARACTERS)), CHARACTERS, [400, 500], task=task, **FEW)
    assert grid.cells == {(length, depth): 1.0 for length in (400, 500) for depth in (0.0, 0.5, 1.0)}
    assert grid.preferred == {400: 1.0, 500: 1.0}
    assert grid.n_trials == {400: 6, 500: 6}
    assert all((trial.answer.split(), trial.found) == ([*trial.expected], 1.0) for trial in grid.trials)
    assert grid.effective_length() == 500


def test_a_model_that_cannot_look_back_is_right_by_chance() -> None:
    grid = retrieval_by_length(Forgetful(len(CHARACTERS)), CHARACTERS, [300], trials=40, batch_size=16)
    assert grid.score == {300: 0.0}
    low, high = wilson(grid.preferred[300] * 200, 200)
    assert low < 1 / (1 + grid.n_others) < high
    assert grid.effective_length() is None


@pytest.mark.parametrize("task", TASKS)
def test_all_tasks_count_the_parts_of_the_answer(task: str) -> None:
    pieces = Pieces(CHARACTERS)
    depths = [0.5] if TASKS[task].placed else [None]
    exam = Exam(TASKS[task], pieces, Hay(pieces, NOISE, most=1200), depths, 3, 5, 0)
    answers = {tuple(paper.prompt): paper.reply for paper in exam.papers(1200)}
    told = retrieval_by_length(
        Knowing(len(CHARACTERS), answers), CHARACTERS, [1200], task=task, depths=[0.5], trials=3, batch_size=2
    )
    assert told.score == {1200: 1.0}
    less = {prompt: answer[: len(answer) // 2] for prompt, answer in answers.items()}
    half = retrieval_by_length(Knowing(len(CHARACTERS), less), CHARACTERS, [1200], task=task, depths=[0.5], trials=3)
    several = len(told.trials[0].expected) > 1
    assert half.score[1200] == (pytest.approx(0.45, abs=0.1) if several else 0.0)
    assert bool(told.margin) != several


@pytest.mark.parametrize("build", [gpt2, llama, opt])
def test_going_on_from_the_cache_is_reading_it_all_again(build: Any) -> None:
    model = build().eval()
    ids = torch.randint(2, VOCABULARY, (3, 24), generator=torch.manual_seed(0))
    with torch.no_grad():
        reading = Reading(model, ids[:, :20])
        again = Reading(without_cache(model), ids[:, :20])
        losses = torch.log_softmax(model(input_ids=ids).logits[:, 19:-1].double(), -1)
        expected = -losses.gather(-1, ids[:, 20:, None]).sum((1, 2))
        written = ids[:, :20]
        for _ in range(5):
            written = torch.cat([written, model(input_ids=written).logits[:, -1:].argmax(-1)], dim=1)
        for one in (reading, again):
            assert torch.allclose(one.nll(ids[:, 20:]), expected, atol=1e-5)
            assert torch.equal(one.greedy(5), written[:, 20:])
            assert torch.allclose(one.nll(ids[:, 20:]), expected, atol=1e-5)  # what was read is left as it was


def without_cache(model: nn.Module) -> nn.Module:
    """The same model, which keeps its cache to itself."""

    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
            return SimpleNamespace(logits=self.inner(input_ids=input_ids).logits)

    return Closed()


def close(one: RetrievalGrid, other: RetrievalGrid) -> bool:
    """Whether two grids agree, numbers up to rounding."""
    pairs = zip(one.trials, other.trials, strict=True)
    return replace(one, trials=()) == replace(other, trials=()) and all(
        math.isclose(a.nll, b.nll, rel_tol=1e-5)
        and math.isclose(a.margin or 0.0, b.margin or 0.0, abs_tol=1e-4)
        and replace(a, nll=0.0, margin=None) == replace(b, nll=0.0, margin=None)
        for a, b in pairs
    )


def test_batches_processes_and_interruptions_change_nothing(tmp_path: Path) -> None:
    model, two = llama(), FEW | {"trials": 1, "depths": [0.2, 0.8]}
    expected = retrieval_by_length(model, CHARACTERS, [280, 250], **two)
    assert expected.lengths == (250, 280)
    assert close(retrieval_by_length(model, CHARACTERS, [250, 280], **two, batch_size=4), expected)
    for index in range(2):
        process: Any = SimpleNamespace(process_index=index, num_processes=2, is_main_process=not index)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hf_posenc.evaluation.sharing.gather_object", lambda items: items)
            part = retrieval_by_length(model, CHARACTERS, [250, 280], **two, processes=process, partial=tmp_path)
        assert len(part.trials) == 2
    model.register_forward_pre_hook(refuse_long, with_kwargs=True)
    assert close(retrieval_by_length(model, CHARACTERS, [250, 280], **two, partial=tmp_path), expected)
    with pytest.raises(AssertionError, match="read again"):
        retrieval_by_length(model, CHARACTERS, [250, 280], **two, seed=1, partial=tmp_path)


def refuse_long(_: nn.Module, args: Any, kwargs: Any) -> None:
    """A hook that fails where a prompt is read."""
    assert kwargs["input_ids"].shape[1] < 100, "read again"


def test_lengths_past_a_table_are_refused_and_the_others_measured() -> None:
    grid = retrieval_by_length(gpt2(300), CHARACTERS, [301, 300], **FEW)
    assert grid.refused == {301: "no position 301: its table has 300 rows for positions"}
    assert [*grid.score] == [300]
    broken = llama()
    broken.lm_head.weight.data.fill_(float("nan"))  # type: ignore[union-attr, operator]
    assert "not finite" in retrieval_by_length(broken, CHARACTERS, [300], **FEW).refused[300]


def test_answers_can_be_hidden_in_any_texts() -> None:
    texts = ["Rain fell on the town. Nobody was out. The lamps had gone out one by one.", "A dog barked."]
    grid = retrieval_by_length(Copier(len(CHARACTERS)), CHARACTERS, [350], haystack=texts, **FEW)
    assert grid.score == {350: 1.0}
    assert grid.text_hash


def test_json_keeps_everything_and_numbers_follow_from_the_trials() -> None:
    grid = retrieval_by_length(llama(), CHARACTERS, [250], **FEW)
    data = json.loads(json.dumps(grid.to_dict(), allow_nan=False))
    assert RetrievalGrid.from_dict(data) == grid
    assert len(data["cells"]) == 3
    with pytest.raises(DataError, match="no retrieval grid: trials missing"):
        RetrievalGrid.from_dict({key: value for key, value in data.items() if key != "trials"})
    one = grid.trials[0]
    made = replace(
        grid,
        trials=tuple(
            replace(one, length=length, found=found, margin=margin)
            for length, found, margin in [(1, 1.0, 2.0), (1, 0.5, -1.0), (2, 0.2, 1.0), (3, 0.1, 1.0), (4, 1.0, 1.0)]
        ),
    )
    assert made.score == {1: 0.75, 2: 0.2, 3: 0.1, 4: 1.0}
    assert (made.margin[1], made.preferred[1]) == (0.5, 0.5)
    assert (made.effective_length(), made.effective_length(0.7), made.effective_length(0.8)) == (2, 1, None)
    assert (made.interval[1], made.interval[4]) == (wilson(1.5, 2), wilson(1, 1))


def test_wilson_is_the_published_interval() -> None:
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lengths": []}, ConfigError, "positive integers"),
        ({"lengths": [50]}, ConfigError, "length=50 is too short for task='passkey'"),
        ({"task": "paskey"}, UnknownNameError, "did you mean 'passkey'"),
        ({"depths": [0.5, 1.5]}, ConfigError, "from 0"),
        ({"depths": []}, ConfigError, "from 0"),
        ({"trials": 0}, ConfigError, "trials must be an integer of at least 1"),
        ({"digits": 0}, ConfigError, "digits must"),
        ({"seed": -1}, ConfigError, "seed must"),
        ({"batch_size": 0}, ConfigError, "batch_size"),
        ({"haystack": "a text"}, DataError, "list of texts"),
        ({"haystack": []}, DataError, "no sentence"),
        ({"tokenizer": characters("abcdefghijklmnopqrstuvwxyz.")}, ConfigError, "has no tokens for"),
    ],
)
def test_bad_input_is_refused_before_any_forward(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = llama()
    model.register_forward_pre_hook(refuse_any)
    values: dict[str, Any] = {"tokenizer": CHARACTERS, "lengths": [300]} | options
    with pytest.raises(error, match=message):
        retrieval_by_length(model, **values)


def refuse_any(*_: object) -> None:
    """A hook that fails."""
    raise RuntimeError("a forward pass was started")


def test_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    bert = BertForMaskedLM(BertConfig(**(SMALL | {"max_position_embeddings": 512})))
    with pytest.raises(UnsupportedFamilyError, match="see later ones"):
        retrieval_by_length(bert, CHARACTERS, [300], **FEW)
    with pytest.raises(DataError, match="model knows 97"):
        retrieval_by_length(llama(), checkpoints.gpt2_tokenizer(), [300], **FEW)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written to"):
        retrieval_by_length(llama(), CHARACTERS, [300], **FEW, partial=tmp_path / "file")


def test_a_small_story_teller_finds_nothing() -> None:
    model, tokenizer = checkpoints.stories260k()
    grid = retrieval_by_length(model, tokenizer, [384], trials=2, batch_size=2)
    assert grid.trained_length == 512
    assert grid.score == {384: 0.0}


@pytest.mark.slow
def test_smollm2_finds_keys_within_its_length() -> None:
    """Measured: it writes five of six pass keys and all six numbers of a word; of several keys, four of six."""
    model, tokenizer = checkpoints.smollm2()
    six: dict[str, Any] = {"depths": [0.0, 0.5, 1.0], "trials": 2}
    passkey = retrieval_by_length(model, tokenizer, [512], **six)
    assert passkey.score[512] >= 2 / 3
    assert passkey.preferred[512] == 1.0
    needle = retrieval_by_length(model, tokenizer, [512], task="single_needle", **six)
    assert needle.score[512] == needle.preferred[512] == 1.0
