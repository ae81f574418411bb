"""`evaluate.load(posenc.METRIC)` on live logits gives the numbers of `perplexity_by_length`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.errors import DataError
from tests.evaluation.models import VOCABULARY, llama, random_documents

evaluate = pytest.importorskip("evaluate", reason="evaluate is not installed")


@pytest.fixture
def metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The metric, with its files in a folder of its own."""
    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
    return evaluate.load(posenc.METRIC, cache_dir=str(tmp_path))


def windows(model: torch.nn.Module, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels of five random rows of `length` + 1 tokens."""
    labels = torch.tensor(random_documents(*[length + 1] * 5))
    with torch.no_grad():
        return model(input_ids=labels).logits, labels


def test_live_predictions_give_the_numbers_of_the_evaluator(metric: Any) -> None:
    model = llama()
    logits, labels = windows(model, 32)
    curve = posenc.perplexity_by_length(model, labels.tolist(), [32])
    metric.add_batch(predictions=logits[:3], references=labels[:3])
    metric.add_batch(predictions=logits[3:].numpy(), references=labels[3:].tolist())
    found = metric.compute(n_bytes=1000)
    assert found["perplexity"] == pytest.approx(curve.ppl[32], rel=1e-6)
    assert found["nll_sum"] == pytest.approx(curve.nll_sum[32], rel=1e-6)
    assert found["n_tokens"] == curve.n_tokens[32] == 5 * 32
    assert found["bits_per_byte"] == pytest.approx(curve.nll_sum[32] / math.log(2) / 1000, rel=1e-6)


def test_ignored_labels_do_not_count_and_one_call_is_enough(metric: Any) -> None:
    logits, labels = windows(llama(), 16)
    masked = labels.clone()
    masked[:, 9:] = -100
    found = metric.compute(predictions=logits, references=masked)
    metric.add(prediction=logits[0, :9], reference=labels[0, :9])
    for row in range(1, 5):
        metric.add(prediction=logits[row, :9], reference=labels[row, :9])
    assert found == pytest.approx(metric.compute())
    assert found["n_tokens"] == 5 * 8


def test_a_uniform_model_scores_the_size_of_its_vocabulary(metric: Any) -> None:
    found = metric.compute(predictions=torch.zeros(2, 7, 50), references=torch.arange(14).view(2, 7))
    assert found["perplexity"] == pytest.approx(50, rel=1e-12)


@pytest.mark.parametrize(
    ("logits", "labels", "said"),
    [
        (torch.zeros(2, 7), torch.zeros(2, 7), "windows, tokens, vocabulary"),
        (torch.zeros(2, 7, 5), torch.zeros(2, 6), "windows, tokens, vocabulary"),
        (torch.zeros(1, 2, 5), torch.tensor([[0, 5]]), "label 5 is outside the vocabulary of 5"),
        (torch.zeros(1, 1, VOCABULARY), torch.zeros(1, 1), "two tokens"),
    ],
)
def test_what_is_no_prediction_is_refused(metric: Any, logits: torch.Tensor, labels: torch.Tensor, said: str) -> None:
    with pytest.raises(DataError, match=said):
        metric.compute(predictions=logits, references=labels)
