"""Perplexity for Hugging Face's `evaluate`, of predictions that are at hand: `evaluate.load(posenc.METRIC)`.

`evaluate` copies this file and imports the copy; it needs no network, and hf_posenc installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import torch

from hf_posenc.errors import DataError
from hf_posenc.evaluation.result import perplexity
from hf_posenc.evaluation.scoring import token_nll

_IGNORED = -100
_DESCRIPTION = "Perplexity in which every token weighs the same, from the logits of a causal language model."
_INPUTS = """
Args:
    predictions: logits (windows, tokens, vocabulary), as the model returned them.
    references: labels (windows, tokens), the input ids; -100 is not scored. Token i is predicted by logits i - 1.
    n_bytes: UTF-8 bytes of the texts, for bits per byte; left out by default.
Returns:
    perplexity, nll (nats per token), nll_sum (nats), n_tokens, and bits_per_byte where n_bytes is given.
"""


class Perplexity(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Perplexity of logits and labels: of each batch only the sums are kept, so that any number of them fits."""

    def _info(self) -> evaluate.MetricInfo:
        sums = {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=datasets.Features(sums)
        )

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Add logits (windows, tokens, vocabulary) and labels (windows, tokens), tensors, arrays or lists.

        Raises:
            DataError: their shapes do not belong together, or a label is outside the vocabulary.
        """
        logits, labels = torch.as_tensor(predictions), torch.as_tensor(references)
        if logits.dim() != 3 or logits.shape[:2] != labels.shape:
            raise DataError(
                f"Logits (windows, tokens, vocabulary) and labels (windows, tokens) are needed; got "
                f"{tuple(logits.shape)} and {tuple(labels.shape)}."
            )
        targets = labels[:, 1:].to(logits.device)
        known = targets != _IGNORED
        wrong = known & ((targets < 0) | (targets >= logits.shape[-1]))
        if bool(wrong.any()):
            raise DataError(f"The label {int(targets[wrong][0])} is outside the vocabulary of {logits.shape[-1]}.")
        rows = zip(logits[:, :-1], targets, known, strict=True)  # what a token says of the next one
        sums = [float(token_nll(row[use], to[use]).sum()) for row, to, use in rows]
        super().add_batch(predictions=sums, references=known.sum(dim=1).tolist(), **kwargs)

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Add the logits (tokens, vocabulary) and labels (tokens) of one window."""
        self.add_batch(predictions=torch.as_tensor(prediction)[None], references=torch.as_tensor(reference)[None])

    def _compute(
        self, predictions: Sequence[float], references: Sequence[int], n_bytes: int | None = None
    ) -> dict[str, float]:
        total, count = math.fsum(predictions), sum(references)
        if count == 0:
            raise DataError("No label is scored: a window needs two tokens, one to predict the other.")
        found = {"perplexity": perplexity(total / count), "nll": total / count, "nll_sum": total, "n_tokens": count}
        return found if n_bytes is None else found | {"bits_per_byte": total / math.log(2) / n_bytes}
