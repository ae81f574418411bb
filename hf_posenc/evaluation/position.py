"""Loss by position inside one long window: where in the context, not just at what length, a model loses quality."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from hf_posenc.errors import ConfigError, LengthError
from hf_posenc.evaluation.documents import BOS_NONE, Corpus, Documents
from hf_posenc.evaluation.first_windows import FirstWindows, finite
from hf_posenc.evaluation.intervals import bootstrap
from hf_posenc.evaluation.partial import PartialScores
from hf_posenc.evaluation.protocols import BY_POSITION
from hf_posenc.evaluation.result import Result, json_ready, perplexity
from hf_posenc.evaluation.scoring import Scorer, evaluation_mode
from hf_posenc.evaluation.subject import (
    check_batch_size,
    check_lengths,
    facts_of,
    model_name,
    position_refusal,
    prepare_for,
)

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import PreTrainedTokenizerBase

_TOLERANCE = 0.01  # of the loss at the trained length


@dataclass(frozen=True, kw_only=True)
class PositionCurve(Result):
    """Mean loss of one model at each stretch of positions of its window.

    Attributes:
        length: inputs in the window; positions are 0 .. length-1.
        edges: bin b holds the positions `edges[b] .. edges[b + 1] - 1`; log-spaced, the first ones of one position.
        nll: mean nats per target of each bin, over all documents.
        low, high: 95 % interval of `nll`, by resampling documents with a fixed seed; None for a single document.
        n_documents: documents long enough to fill the window; shorter ones are left out.
        bos_policy, text_hash: as in `LengthCurve`.
    """

    length: int
    edges: tuple[int, ...]
    nll: tuple[float, ...]
    low: tuple[float, ...] | None
    high: tuple[float, ...] | None
    n_documents: int
    bos_policy: str
    text_hash: str

    @property
    def ppl(self) -> tuple[float, ...]:
        """Perplexity of each bin."""
        return tuple(map(perplexity, self.nll))

    @property
    def effective_length(self) -> int | None:
        """The last position before the loss first rises 1 % over its value at the trained length.

        The value at the trained length is that of the last bin within it. Positions of different text are compared
        here; `LengthCurve.effective_length` with protocol "fixed_target" compares the same text and is less noisy.
        None where the config states no trained length or the window does not reach it.
        """
        within = [index for index, edge in enumerate(self.edges[1:]) if edge <= (self.trained_length or 0)]
        if not within or self.length < (self.trained_length or 0):
            return None
        reference = within[-1]
        for index in range(reference + 1, len(self.nll)):
            if self.nll[index] > (1 + _TOLERANCE) * self.nll[reference]:
                return self.edges[index]
        return self.length

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        ready: dict[str, Any] = json_ready(asdict(self))
        return ready

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PositionCurve:
        """Rebuild a curve from `to_dict` or its JSON.

        Raises:
            DataError: a field is missing.
        """
        values = cls._fields_of(data, called="position curve")
        for name in ("edges", "nll", "low", "high"):
            values[name] = None if values[name] is None else tuple(values[name])
        return cls(**values)


def log_bins(length: int, per_octave: int = 4) -> tuple[int, ...]:
    """Return edges 0 < ... < length of bins of positions, `per_octave` to each doubling where positions allow it."""
    steps = math.ceil(per_octave * math.log2(length)) if length > 1 else 0
    starts = {0, length} | {round(2 ** (step / per_octave)) for step in range(steps)}
    return tuple(sorted(start for start in starts if start <= length))


def perplexity_by_position(
    model: nn.Module,
    documents: Documents,
    length: int,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 1,
    bos_policy: str = BOS_NONE,
    name: str | None = None,
    seed: int = 0,
    processes: PartialState | None = None,
    partial: Path | str | None = None,
) -> PositionCurve:
    """Measure the mean loss at each position of the first window of every document that fills it.

    Args:
        model: any Hugging Face causal language model, patched or not.
        documents: token-id lists, 1-D tensors, or texts (then give `tokenizer`).
        length: inputs in the window; a document needs `length + 1` tokens, BOS included.
        tokenizer, batch_size, bos_policy, name, processes, partial: as in `perplexity_by_length`.
        seed: of the resampling of documents for the interval.

    Raises:
        UnknownNameError, ConfigError, DataError: arguments that cannot be used, or no document that is long enough.
        LengthError: the model has no position encoding for `length` positions, or its logits are not finite there.
        UnsupportedFamilyError: the model is not a causal language model.
        OutputError: `partial` cannot be written to.
    """
    check_lengths([length])
    check_batch_size(batch_size)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed must be an integer of at least 0; got {seed!r}.")
    corpus = prepare_for(model, documents, tokenizer=tokenizer, bos_policy=bos_policy).filling(length)
    if reason := position_refusal(model, length):
        raise LengthError(f"length={length}: {reason}.")
    edges = log_bins(length)
    facts = facts_of(model, tokenizer)
    run = {"model": facts["model_hash"] or model_name(model), "protocol": BY_POSITION, "bos_policy": bos_policy}
    kept = PartialScores(partial, run, processes=processes)
    sums = _sums(model, corpus, edges, batch_size, kept, processes)
    widths = np.diff(edges)
    ends = bootstrap(sums / widths, np.ones(len(sums)), seed=seed)
    return PositionCurve(
        name=name or model_name(model),
        length=length,
        edges=edges,
        nll=tuple((sums.mean(axis=0) / widths).tolist()),
        low=None if ends is None else tuple(ends[0].tolist()),
        high=None if ends is None else tuple(ends[1].tolist()),
        n_documents=len(sums),
        bos_policy=bos_policy,
        text_hash=corpus.digest,
        **facts,
    )


def _sums(
    model: nn.Module,
    corpus: Corpus,
    edges: tuple[int, ...],
    batch_size: int,
    kept: PartialScores,
    processes: PartialState | None,
) -> np.ndarray:
    """Return the nats of each document's first window summed over each bin: (documents, bins) float64."""
    length = edges[-1]
    with evaluation_mode(model):
        scorer = Scorer(model, corpus.probe)

        def score(windows: Tensor) -> np.ndarray:
            sums: np.ndarray = np.add.reduceat(finite(scorer.nll(windows, length)), edges[:-1], axis=1)
            return sums

        return FirstWindows(
            windows=[ids[: length + 1] for ids in corpus.documents],
            keys=corpus.id_digests,
            cut=(length,),
            score=score,
            batch_size=batch_size,
            called="by position",
        ).sums(kept, processes)
