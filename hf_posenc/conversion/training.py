"""What every training run here shares: batches whose loss is exact, the Trainer around them, and a plain measure."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hf_posenc.evaluation.scoring import evaluation_mode

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

IGNORED = -100  # the label that transformers' losses skip
EVALUATION_BATCH = 16
"""Rows in one forward pass where a loss is measured."""


def causal_batch(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate packed rows into `input_ids` and `labels`, both int64 (b, n).

    The first token of a row has nothing before it and is never a target. Losses drop it by shifting, but the Trainer
    divides by a count of labels that, for some model classes, still holds it (a loss too small by 1/n). Saying so in
    the labels makes every count right, so that the reported loss is the mean over predicted tokens.
    """
    input_ids = torch.tensor([row["input_ids"] for row in rows], dtype=torch.long)  # (b, n)
    labels = input_ids.clone()
    labels[:, 0] = IGNORED
    return {"input_ids": input_ids, "labels": labels}


def asked(logits: torch.Tensor, labels: torch.Tensor, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits that are asked for, (targets, vocabulary), and the words that were there, (targets,).

    In a causal model, a label belongs to the logits of the token before it.
    """
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    wanted = labels != IGNORED
    return logits[wanted], labels[wanted]


def mean_loss(
    model: PreTrainedModel, rows: Dataset, collate: Callable[[Any], dict[str, torch.Tensor]], *, causal: bool
) -> float:
    """Return the mean loss over all targets of rows, in nats, with the model in eval mode."""
    total, targets = 0.0, 0
    with evaluation_mode(model):
        for start in range(0, len(rows), EVALUATION_BATCH):
            some = range(start, min(start + EVALUATION_BATCH, len(rows)))
            batch = {name: value.to(model.device) for name, value in collate([rows[index] for index in some]).items()}
            labels = batch.pop("labels")
            found, wanted = asked(model(**batch, use_cache=False).logits, labels, causal=causal)
            total += float(torch.nn.functional.cross_entropy(found.float(), wanted, reduction="sum"))
            targets += len(wanted)
    return total / targets


@torch.no_grad()
def packed_perplexity(model: PreTrainedModel, dataset: Dataset, *, batch_size: int = 32) -> float:
    """Return exp(mean NLL) over all targets of packed rows: each row alone, n - 1 targets in a row of n tokens.

    A check on a training run, at one length. Curves over lengths are `hf_posenc.perplexity_by_length`'s job.
    """
    was_training = model.training
    model.train(False)
    nll_sum, targets = 0.0, 0
    for start in range(0, len(dataset), batch_size):
        input_ids = torch.tensor(dataset[start : start + batch_size]["input_ids"], device=model.device)  # (b, n)
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1].float()  # (b, n - 1, vocabulary)
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten(), reduction="sum")
        nll_sum += nll.double().item()
        targets += input_ids[:, 1:].numel()
    model.train(was_training)
    return math.exp(nll_sum / targets)


def original_of(model: PreTrainedModel, *, shared: bool) -> PreTrainedModel:
    """Return the model as it is, for keeps; it shares the weights that are not trained, or all of them."""
    memo: dict[int, Any] = {id(weight): weight for weight in model.parameters() if shared or not weight.requires_grad}
    return copy.deepcopy(model, memo)
