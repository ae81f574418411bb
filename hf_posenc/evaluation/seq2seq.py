"""Perplexity of the target by length of the source, for encoder-decoders: what more of the source brings, or costs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from hf_posenc.errors import DataError, UnsupportedFamilyError
from hf_posenc.evaluation.curve import LengthCurve
from hf_posenc.evaluation.documents import BOS_NONE, Corpus, token_ids
from hf_posenc.evaluation.forward import device_of, forward
from hf_posenc.evaluation.measure import Measurement
from hf_posenc.evaluation.partial import DocumentScore
from hf_posenc.evaluation.protocols import BY_SOURCE
from hf_posenc.evaluation.scoring import token_nll
from hf_posenc.evaluation.subject import check_lengths, position_refusal, text_config

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import PreTrainedTokenizerBase

Pairs: TypeAlias = Iterable[tuple[str, str]] | Iterable[tuple[Sequence[int], Sequence[int]]]


def seq2seq_perplexity_by_length(
    model: nn.Module,
    pairs: Pairs,
    lengths: Sequence[int],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str | None = None,
    processes: PartialState | None = None,
    partial: Path | str | None = None,
) -> LengthCurve:
    """Measure the perplexity of targets given the first tokens of their sources, for each of these source lengths.

    Every length scores the same targets, each in one forward pass with the decoder fed the target itself. A source
    shorter than the length is taken whole. A text's special tokens are those its tokenizer adds, within the length.

    Args:
        model: an encoder-decoder whose forward takes `input_ids` and `labels`.
        pairs: (source, target) as texts (then give `tokenizer`) or as token ids.
        lengths, name, processes, partial: as in `perplexity_by_length`.

    Returns:
        A curve with protocol "by_source", whose stride says nothing.

    Raises:
        ConfigError, DataError: arguments that cannot be used, before any computation.
        UnsupportedFamilyError: the model does not return logits for each token of the target.
        OutputError: `partial` cannot be written to.
    """
    ordered = check_lengths(lengths)
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    for index, (source, target) in enumerate(pairs):
        sources.append(token_ids(source, index, tokenizer, specials=True))
        targets.append(token_ids(target, index, tokenizer, specials=True, target=True))
        if not len(sources[-1]) or not len(targets[-1]):
            raise DataError(f"Pair {index} has an empty source or target.")
    if not targets:
        raise DataError("There are no pairs to evaluate on. Give at least one.")
    keys = [hashlib.sha256(_bytes(*pair)).hexdigest() for pair in zip(sources, targets, strict=True)]
    corpus = Corpus(targets, keys, None, len(targets), 0, BOS_NONE, None)
    longest = max(map(len, sources))
    most = max(map(len, targets))
    if reason := position_refusal(model, most):
        raise DataError(f"A target has {most} tokens: {reason}. Give shorter targets.")
    scorer = _Pairs(model, sources, targets, _specials(model, tokenizer))
    return Measurement(
        model=model,
        tokenizer=tokenizer,
        name=name,
        protocol=BY_SOURCE,
        bos_policy=BOS_NONE,
        corpus=corpus,
        keys=keys,
        used={length: min(length, longest) for length in ordered},
        strides={length: length for length in ordered},
        scoring=lambda: scorer.score,
        processes=processes,
        partial=partial,
    ).curve()


def _specials(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the ids that may stand behind a source without being of it."""
    if tokenizer is not None:
        return frozenset(tokenizer.all_special_ids)
    ends = getattr(text_config(model), "eos_token_id", None)
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


def _shortened(source: torch.Tensor, length: int, specials: frozenset[int]) -> torch.Tensor:
    """Return the first `length` ids of a source; the special ones that end it (EOS) end the shortened one too."""
    if len(source) <= length:
        return source
    ends = 0
    while ends < length and int(source[-1 - ends]) in specials:
        ends += 1
    return torch.cat([source[: length - ends], source[len(source) - ends :]])


def _bytes(source: torch.Tensor, target: torch.Tensor) -> bytes:
    return len(source).to_bytes(8, "big") + source.numpy().tobytes() + target.numpy().tobytes()


@dataclass(frozen=True)
class _Pairs:
    """Scores targets under sources cut to a length."""

    model: nn.Module
    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]
    specials: frozenset[int]

    def score(self, indices: Sequence[int], length: int) -> list[DocumentScore]:
        """Return the scores of these pairs with sources of at most this length."""
        return [self._pair(index, length) for index in indices]

    def _pair(self, index: int, length: int) -> DocumentScore:
        device = device_of(self.model)
        source, target = self.sources[index], self.targets[index].to(device)
        source = _shortened(source, length, self.specials)
        logits = forward(self.model, input_ids=source[None].to(device), labels=target[None]).logits
        if logits.shape[:2] != (1, len(target)):
            raise UnsupportedFamilyError(
                f"{type(self.model).__name__} does not return logits for each token of the target: load it with "
                "AutoModelForSeq2SeqLM."
            )
        nll = float(token_nll(logits[0], target).sum())
        return DocumentScore(index=index, nll=nll, n_tokens=len(target), weighted=nll, weight=len(target))
