"""Loss by position inside one long window: where in the context, not just at what length, a model loses quality."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from hf_posenc.errors import ConfigError, DataError, LengthError
from hf_posenc.evaluation.documents import BOS_NONE, Documents
from hf_posenc.evaluation.intervals import bootstrap
from hf_posenc.evaluation.measure import NOT_FINITE
from hf_posenc.evaluation.partial import PartialScores
from hf_posenc.evaluation.scoring import Scorer, evaluation_mode
from hf_posenc.evaluation.sharing import gathered, own_share
from hf_posenc.evaluation.subject import (
    check_batch_size,
    check_lengths,
    dtype_name,
    model_hash,
    model_name,
    position_refusal,
    prepare_for,
    trained_length,
)
from hf_posenc.provenance import versions

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import PreTrainedTokenizerBase

_TOLERANCE = 0.01  # of the loss at the trained length
_PROGRESS_DELAY = 2.0  # seconds before a progress bar appears


@dataclass(frozen=True, kw_only=True)
class PositionCurve:
    """Mean loss of one model at each stretch of positions of its window.

    Attributes:
        name: the model's name.
        length: inputs in the window; positions are 0 .. length-1.
        edges: bin b holds the positions `edges[b] .. edges[b + 1] - 1`; log-spaced, the first ones of one position.
        nll: mean nats per target of each bin, over all documents.
        low, high: 95 % interval of `nll`, by resampling documents with a fixed seed; None for a single document.
        n_documents: documents long enough to fill the window; shorter ones are left out.
        trained_length, bos_policy, text_hash, model_hash, dtype, versions: as in `LengthCurve`.
    """

    name: str
    length: int
    edges: tuple[int, ...]
    nll: tuple[float, ...]
    low: tuple[float, ...] | None
    high: tuple[float, ...] | None
    n_documents: int
    trained_length: int | None
    bos_policy: str
    text_hash: str
    model_hash: str | None
    dtype: str
    versions: Mapping[str, str]

    @property
    def ppl(self) -> tuple[float, ...]:
        """Perplexity of each bin."""
        return tuple(float(value) for value in np.exp(self.nll))

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
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PositionCurve:
        """Rebuild a curve from `to_dict` or its JSON.

        Raises:
            DataError: a field is missing.
        """
        missing = sorted(field.name for field in fields(cls) if field.name not in data)
        if missing:
            raise DataError(f"This is no position curve: {', '.join(missing)} missing. Evaluate the model again.")
        values: dict[str, Any] = {}
        for field in fields(cls):
            value = data[field.name]
            values[field.name] = tuple(value) if isinstance(value, list) else value
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
    weights = model_hash(model)
    run = {"model": weights or model_name(model), "protocol": "by_position", "bos_policy": bos_policy}
    process = 0 if processes is None else processes.process_index
    kept = PartialScores(partial, run, process=process)
    rows = _Rows([ids[: length + 1] for ids in corpus.documents], corpus.id_digests, edges, batch_size)
    sums = rows.sums(model, kept, processes)  # (documents, bins)
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
        trained_length=trained_length(model),
        bos_policy=bos_policy,
        text_hash=corpus.digest,
        model_hash=weights,
        dtype=dtype_name(model),
        versions=versions(),
    )


@dataclass(frozen=True)
class _Rows:
    """The first windows of documents, all of one length, and the bins of their positions."""

    windows: Sequence[torch.Tensor]
    keys: Sequence[str]
    edges: tuple[int, ...]
    batch_size: int

    def sums(self, model: nn.Module, kept: PartialScores, processes: PartialState | None) -> np.ndarray:
        """Return the nats of each window summed over each bin: (documents, bins), float64.

        They stand in the order of their contents, so that resampling draws the same documents whatever their order.
        """
        with evaluation_mode(model):
            scorer = Scorer(model, self.windows[0])
            own = own_share([self.edges[-1]] * len(self.windows), self.keys, processes)
            bar = tqdm(total=len(own) * self.edges[-1], desc="by position", unit="tok", delay=_PROGRESS_DELAY)
            with bar:
                found = gathered([*self._own(scorer, own, kept, bar)], processes)
        if None in [values for _, values in found]:
            raise LengthError(f"length={self.edges[-1]}: {NOT_FINITE}.")
        return np.array([values for _, values in sorted(found, key=lambda item: item[0])])

    def _own(
        self, scorer: Scorer, own: Sequence[int], kept: PartialScores, bar: tqdm[Any]
    ) -> Iterator[tuple[str, list[float] | None]]:
        """Yield the key of each window that this process scores with its sums, or None for sums that are not finite."""
        cut = self.edges[-1:]
        missing = []
        for index in own:
            score = kept.known(cut, self.keys[index])
            if score is None:
                missing.append(index)
            else:
                yield self.keys[index], score["sums"]
                bar.update(self.edges[-1])
        for first in range(0, len(missing), self.batch_size):
            indices = missing[first : first + self.batch_size]
            nats = scorer.nll(torch.stack([self.windows[index] for index in indices]), self.edges[-1]).numpy()
            sums = np.add.reduceat(nats, self.edges[:-1], axis=1)  # (b, bins)
            for index, row in zip(indices, sums, strict=True):
                if not np.isfinite(row).all():
                    yield self.keys[index], None
                    return
                kept.keep(cut, [(self.keys[index], {"sums": row.tolist()})])
                yield self.keys[index], row.tolist()
            bar.update(nats.size)
