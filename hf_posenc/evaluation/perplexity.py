"""Perplexity by window length of a causal language model, by any protocol and whatever the batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_posenc.errors import DataError
from hf_posenc.evaluation.curve import LengthCurve
from hf_posenc.evaluation.documents import BOS_EVERY_WINDOW, Corpus, Documents
from hf_posenc.evaluation.measure import Measurement
from hf_posenc.evaluation.partial import DocumentScore
from hf_posenc.evaluation.protocols import NONOVERLAPPING, Protocol, protocol_named
from hf_posenc.evaluation.scoring import Scorer
from hf_posenc.evaluation.subject import check_batch_size, check_lengths, prepare_for
from hf_posenc.evaluation.windows import Window

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import PreTrainedTokenizerBase


def perplexity_by_length(
    model: nn.Module,
    documents: Documents,
    lengths: Sequence[int],
    *,
    protocol: str = NONOVERLAPPING,
    stride: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 1,
    bos_policy: str | None = None,
    name: str | None = None,
    processes: PartialState | None = None,
    partial: Path | str | None = None,
) -> LengthCurve:
    """Measure the perplexity of a causal language model, patched or not, with windows of each of these lengths.

    Every length scores the same targets (except where a protocol's origin does not). Windows of equal length are
    batched and never padded: batch size, order of documents and number of processes change the result by rounding only.
    The curve's `refused` holds each length that the model has no positions for, with the reason.

    Args:
        documents: a list or stream of texts (then give `tokenizer`), ids, or rows with a column `text` or `input_ids`.
        lengths: window lengths in tokens; sorted, duplicates dropped.
        protocol: a name in `evaluation.protocols.PROTOCOLS`, such as "nonoverlapping", "sliding", "fixed_target".
        stride: tokens that windows advance by, from 1 to the shortest length; the protocol's own by default.
        batch_size: windows in one forward pass.
        bos_policy: "none", "prepend" to score the first token of each document too, or "every_window" to put BOS in
            place of the first token of every window; by default what the protocol prescribes, else "none".
        name: what to call the model in tables; its checkpoint's name by default.
        processes: an accelerate `PartialState` shares the documents among its processes; each returns the same curve.
        partial: folder for the scores of finished documents; the same call goes on from what it holds.

    Raises:
        UnknownNameError, ConfigError, DataError: arguments that cannot be used, before any computation.
        UnsupportedFamilyError: the model is not a causal language model.
        OutputError: `partial` cannot be written to.
    """
    ordered = check_lengths(lengths)
    chosen = protocol_named(protocol)
    strides = chosen.strides(ordered, stride)
    bos = chosen.bos(bos_policy)
    check_batch_size(batch_size)
    corpus = prepare_for(model, documents, tokenizer=tokenizer, bos_policy=bos, joined=chosen.joined)
    corpus = corpus.filling(ordered[-1]) if chosen.fills else corpus
    _check_windows(chosen, corpus, strides)
    return Measurement(
        model=model,
        tokenizer=tokenizer,
        name=name,
        protocol=protocol,
        bos_policy=bos,
        corpus=corpus,
        keys=corpus.id_digests,
        used={length: min(chosen.inputs(length), corpus.longest) for length in ordered},
        strides=strides,
        scoring=lambda: _Windows(Scorer(model, corpus.probe), corpus, chosen, strides, batch_size).score,
        group=batch_size,
        processes=processes,
        partial=partial,
    ).curve()


def _check_windows(protocol: Protocol, corpus: Corpus, strides: dict[int, int]) -> None:
    """Refuse a length for which the texts give no window at all, which only some origins' cuts allow."""
    for length, stride in strides.items():
        if all(next(protocol.cut(size, length, stride), None) is None for size in corpus.sizes):
            raise DataError(
                f"protocol={protocol.name!r} cuts no window of {length} tokens out of {corpus.longest + 1}. "
                "Give more text or a smaller length."
            )


@dataclass(frozen=True)
class _Windows:
    """Scores documents by the windows of a protocol."""

    scorer: Scorer
    corpus: Corpus
    protocol: Protocol
    strides: dict[int, int]
    batch_size: int

    def score(self, indices: Sequence[int], length: int) -> list[DocumentScore]:
        """Return the scores of these documents with windows of this length."""
        sums = {index: [0.0, 0.0, 0.0, 0.0] for index in indices}
        for batch in self._batches(indices, length):
            rows = torch.stack([self._row(index, window) for index, window in batch])
            for (index, window), nats in zip(
                batch, self.scorer.nll(rows, batch[0][1].scored).sum(dim=1).tolist(), strict=True
            ):
                total = sums[index]
                total[0] += nats
                total[1] += window.scored
                total[2] += nats / window.scored * window.weight
                total[3] += window.weight
        return [
            DocumentScore(index=index, nll=nll, n_tokens=int(count), weighted=weighted, weight=weight)
            for index, (nll, count, weighted, weight) in sums.items()
        ]

    def _row(self, index: int, window: Window) -> torch.Tensor:
        row = self.corpus.documents[index][window.begin : window.end + 1]
        if self.corpus.bos_policy == BOS_EVERY_WINDOW and self.corpus.bos is not None:
            row = torch.cat([torch.tensor([self.corpus.bos]), row[1:]])
        return row

    def _batches(self, indices: Sequence[int], length: int) -> Iterator[list[tuple[int, Window]]]:
        """Yield (document, window) pairs in batches whose windows agree in length and in scored targets."""
        waiting: dict[tuple[int, int], list[tuple[int, Window]]] = {}
        for index in indices:
            for window in self.protocol.cut(self.corpus.sizes[index], length, self.strides[length]):
                shape = (window.end - window.begin, window.scored)
                batch = waiting.setdefault(shape, [])
                batch.append((index, window))
                if len(batch) == self.batch_size:
                    yield waiting.pop(shape)
        yield from waiting.values()
