"""The protocols' origins retold: slow loops over one window at a time, with transformers' own loss, no code of ours.

Each was compared with the published code itself, run on stories260K and the bundled GPT-2 (figures in the tests).
"""

from __future__ import annotations

import math
from typing import Any

import torch


def mean_loss(model: Any, ids: list[int], ignored: int) -> float:
    """Mean loss of a row as transformers computes it, the first `ignored` tokens being no targets."""
    row = torch.tensor([ids])
    labels = row.clone()
    labels[:, :ignored] = -100
    with torch.no_grad():
        loss: float = model(input_ids=row, labels=labels).loss.item()
    return loss


def hf_docs(model: Any, stream: list[int], length: int, stride: int) -> float:
    """transformers' guide on perplexity: weights are one less than the tokens that are new in a window."""
    total = weight = seen = 0.0
    start = 0
    while seen < len(stream):
        stop = min(start + length, len(stream))
        new = int(stop - seen)
        if new > 1:
            total += mean_loss(model, stream[start:stop], stop - start - new) * (new - 1)
            weight += new - 1
        seen, start = stop, start + stride
    return math.exp(total / weight)


def yarn(model: Any, documents: list[list[int]], length: int, stride: int, bos: int) -> float:
    """YaRN: BOS and length - 1 tokens a window, only new ones scored, plain mean of the windows' means."""
    means = []
    for ids in documents:
        seen = start = 0
        while seen < len(ids):
            stop = min(start + length - 1, len(ids))
            means.append(mean_loss(model, [bos, *ids[start:stop]], 1 + seen - start))
            seen, start = stop, start + stride
    return math.exp(sum(means) / len(means))


def longlora(model: Any, stream: list[int], length: int, stride: int) -> float:
    """LongLoRA, one window a batch: every window scores all it can; the last one that fits is dropped."""
    starts = [start for start in range(0, len(stream), stride) if start + length < len(stream)][:-1]
    means = [mean_loss(model, stream[start : start + length], 0) for start in starts]
    return 2.71828 ** (sum(means) / len(means))  # their e


def lm_eval_rolling(model: Any, ids: list[int], length: int, prefix: int) -> float:
    """lm-evaluation-harness: nats of a document whose last window reaches back to have its full length."""
    stream, total = [prefix, *ids], 0.0
    for done in range(0, len(ids), length):
        stop = min(done + length, len(ids))
        start = max(0, stop - length)
        with torch.no_grad():  # the last token is no input, so that a window of the model's full length fits
            logits = model(input_ids=torch.tensor([stream[start:stop]])).logits[0, done - start :]
        total -= logits.log_softmax(-1).gather(-1, torch.tensor(stream[done + 1 : stop + 1])[:, None]).sum().item()
    return total
