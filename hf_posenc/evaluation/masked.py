"""Pseudo-perplexity by length of a masked language model: each token hidden in turn and filled in from both sides.

Salazar et al. 2020, "Masked Language Model Scoring", equation 1: the sum over tokens of the log-probability of each in
a text where it alone is masked. It is no perplexity (the product is no probability of the text), but falls and rises
with the quality of the model like one, and accuracy beside it is a plain count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posenc.errors import ConfigError, DataError, UnsupportedFamilyError
from hf_posenc.evaluation.curve import LengthCurve
from hf_posenc.evaluation.documents import BOS_EVERY_WINDOW, BOS_NONE, Corpus, Documents
from hf_posenc.evaluation.forward import device_of, forward
from hf_posenc.evaluation.measure import Measurement
from hf_posenc.evaluation.partial import DocumentScore
from hf_posenc.evaluation.protocols import PSEUDO
from hf_posenc.evaluation.scoring import token_nll
from hf_posenc.evaluation.subject import check_batch_size, check_lengths, prepare_for

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import PreTrainedTokenizerBase


def masked_perplexity_by_length(
    model: nn.Module,
    documents: Documents,
    lengths: Sequence[int],
    *,
    tokenizer: PreTrainedTokenizerBase,
    every: int = 1,
    batch_size: int = 8,
    name: str | None = None,
    processes: PartialState | None = None,
    partial: Path | str | None = None,
) -> LengthCurve:
    """Measure how well a masked language model fills in tokens, with windows of each of these lengths.

    Documents are cut into windows that do not overlap; the tokenizer's two end tokens (CLS or BOS, SEP or EOS) frame
    each, and count in its length. Every length scores the same tokens, one forward pass each.

    Args:
        model: a masked language model, patched or not.
        documents, lengths, name, processes, partial: as in `perplexity_by_length`.
        tokenizer: for the mask and the end tokens, and for texts.
        every: score one token in so many; the cost falls likewise. The same tokens for every length.
        batch_size: masked copies of a window in one forward pass.

    Returns:
        A curve with `accuracy`, with protocol "pseudo" and `every` as its stride.

    Raises:
        ConfigError, DataError: arguments that cannot be used, before any computation.
        UnsupportedFamilyError: the model does not return logits for each token.
        OutputError: `partial` cannot be written to.
    """
    ordered = check_lengths(lengths)
    check_batch_size(batch_size)
    frame = _frame(tokenizer)
    if ordered[0] <= len(frame.ends) or isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(
            f"lengths must exceed the {len(frame.ends)} end tokens of a window, and every= be a positive integer; got "
            f"lengths={ordered}, every={every!r}."
        )
    corpus = prepare_for(model, documents, tokenizer=tokenizer, bos_policy=BOS_NONE)
    if any([int(ids[0])] == frame.first or [int(ids[-1])] == frame.last for ids in corpus.documents):
        raise DataError("A document has end tokens already, and every window is given them: leave them out.")
    filler = _Filler(model, corpus, frame, every, batch_size)
    return Measurement(
        model=model,
        tokenizer=tokenizer,
        name=name,
        protocol=PSEUDO,
        bos_policy=BOS_EVERY_WINDOW if frame.ends else BOS_NONE,
        corpus=corpus,
        keys=corpus.id_digests,
        used={length: min(length, corpus.longest + 1 + len(frame.ends)) for length in ordered},
        strides=dict.fromkeys(ordered, every),
        scoring=lambda: filler.score,
        processes=processes,
        partial=partial,
    ).curve()


@dataclass(frozen=True)
class _Frame:
    first: list[int]
    last: list[int]
    mask: int

    @property
    def ends(self) -> list[int]:
        return self.first + self.last


def _frame(tokenizer: PreTrainedTokenizerBase) -> _Frame:
    if tokenizer is None or getattr(tokenizer, "mask_token_id", None) is None:
        raise ConfigError("Masking needs tokenizer= with a mask token, and there is none. Is this a masked model?")
    names = (("cls_token_id", "bos_token_id"), ("sep_token_id", "eos_token_id"))
    found: list[list[int]] = []
    for pair in names:
        ids: list[Any] = [getattr(tokenizer, name, None) for name in pair]
        found.append([value for value in ids if value is not None][:1])
    return _Frame(found[0], found[1], int(tokenizer.mask_token_id))


@dataclass(frozen=True)
class _Filler:
    """Masks one token at a time and scores what the model puts there."""

    model: nn.Module
    corpus: Corpus
    frame: _Frame
    every: int
    batch_size: int

    def score(self, indices: Sequence[int], length: int) -> list[DocumentScore]:
        """Return the scores of these documents in windows of this length."""
        return [self._document(index, length) for index in indices]

    def _document(self, index: int, length: int) -> DocumentScore:
        ids = self.corpus.documents[index]
        inner = length - len(self.frame.ends)
        nll, correct, count = 0.0, 0, 0
        for begin in range(0, len(ids), inner):
            window = ids[begin : begin + inner]
            targets = [at for at in range(len(window)) if (begin + at) % self.every == 0]
            for first in range(0, len(targets), self.batch_size):
                nats, right = self._fill(window, torch.tensor(targets[first : first + self.batch_size]))
                nll, correct, count = nll + nats, correct + right, count + len(targets[first : first + self.batch_size])
        return DocumentScore(index=index, nll=nll, n_tokens=count, weighted=nll, weight=count, n_correct=correct)

    def _fill(self, window: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
        """Return nats and right answers at the `targets` (b,) of a window (n,), each masked in a copy of its own."""
        framed = torch.cat([torch.tensor(self.frame.first), window, torch.tensor(self.frame.last)]).long()
        at = targets + len(self.frame.first)
        rows = torch.arange(len(targets))
        inputs = framed.repeat(len(targets), 1)  # (b, n)
        inputs[rows, at] = self.frame.mask
        logits = forward(self.model, input_ids=inputs.to(device_of(self.model))).logits
        if logits.shape[:2] != inputs.shape:
            raise UnsupportedFamilyError(f"{type(self.model).__name__} does not return logits for each token.")
        picked = logits[rows.to(logits.device), at.to(logits.device)]  # (b, vocabulary)
        wanted = window[targets].to(logits.device)
        return float(token_nll(picked, wanted).sum()), int((picked.argmax(-1) == wanted).sum())
