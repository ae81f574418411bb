"""Perplexity by window length: every target scored once, every token weighing the same, whatever the batching."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import nn
from tqdm.auto import tqdm

from hf_posenc.errors import LengthError
from hf_posenc.evaluation.curve import LengthCurve, versions
from hf_posenc.evaluation.documents import BOS_NONE, Corpus, Documents
from hf_posenc.evaluation.scoring import Scorer, evaluation_mode
from hf_posenc.evaluation.subject import (
    check_batch_size,
    check_lengths,
    dtype_name,
    model_name,
    position_refusal,
    prepare_for,
    trained_length,
)
from hf_posenc.evaluation.windows import NONOVERLAPPING, Window, check_protocol, windows

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import PreTrainedTokenizerBase

_PROGRESS_DELAY = 2.0  # seconds before a progress bar appears


@dataclass(frozen=True)
class DocumentScore:
    """What one document contributes: its index in the corpus, its nats and its number of scored targets."""

    index: int
    nll: float
    n_tokens: int


def perplexity_by_length(
    model: nn.Module,
    documents: Documents,
    lengths: Sequence[int],
    *,
    protocol: str = NONOVERLAPPING,
    stride: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 1,
    bos_policy: str = BOS_NONE,
    name: str | None = None,
    processes: PartialState | None = None,
) -> LengthCurve:
    """Measure the perplexity of a causal language model with windows of each of these lengths.

    Every length scores the same targets, so the values differ only in the context the model has. Windows of equal
    length are batched and never padded, and documents are never joined: batch size, padding side and the order of
    documents change the result by rounding only. The model's modes are restored; nothing else of it is touched.

    Args:
        model: any Hugging Face causal language model, patched or not, on any device.
        documents: token-id lists, 1-D tensors, or texts (then give `tokenizer`, and bytes are counted too).
        lengths: window lengths in tokens; sorted, duplicates dropped.
        protocol: "nonoverlapping" or "sliding" (`evaluation.windows`).
        stride: tokens a sliding window advances by, from 1 to the shortest length.
        tokenizer: needed for texts, and for its BOS token if it has one.
        batch_size: windows in one forward pass.
        bos_policy: "none", or "prepend" to score the first token of each document too.
        name: what to call the model in tables; its checkpoint's name by default.
        processes: an accelerate `PartialState` shares the documents among its processes; each returns the same curve.

    Returns:
        The curve. A length that the model has no positions for stands in `curve.refused` with the reason.

    Raises:
        UnknownNameError, ConfigError, DataError: arguments that cannot be used, before any computation.
        UnsupportedFamilyError: the model is not a causal language model.
    """
    ordered = check_lengths(lengths)
    check_protocol(protocol, stride, ordered)
    check_batch_size(batch_size)
    corpus = prepare_for(model, documents, tokenizer=tokenizer, bos_policy=bos_policy)
    plan = _Plan(corpus, protocol, stride, batch_size, processes)
    return _curve(model, name or model_name(model), plan, ordered)


@dataclass(frozen=True)
class _Plan:
    """How one corpus is cut, batched and shared among processes."""

    corpus: Corpus
    protocol: str
    stride: int | None
    batch_size: int
    processes: PartialState | None

    def own_documents(self) -> range:
        """Indices of the documents that this process scores: each belongs to exactly one process."""
        first, step = (0, 1) if self.processes is None else (self.processes.process_index, self.processes.num_processes)
        return range(first, len(self.corpus.documents), step)

    def batches(self, length: int) -> Iterator[list[tuple[int, Window]]]:
        """Yield (document, window) pairs in batches whose windows agree in length and in scored targets."""
        waiting: dict[tuple[int, int], list[tuple[int, Window]]] = {}
        for index in self.own_documents():
            for window in windows(self.protocol, len(self.corpus.documents[index]) - 1, length, self.stride):
                shape = (window.end - window.begin, window.scored)
                batch = waiting.setdefault(shape, [])
                batch.append((index, window))
                if len(batch) == self.batch_size:
                    yield waiting.pop(shape)
        yield from waiting.values()

    def progress_bar(self, n_lengths: int) -> tqdm[Any]:
        """Return a bar over this process's targets, visible on the main process when the work takes a while."""
        own = sum(len(self.corpus.documents[index]) - 1 for index in self.own_documents())
        hidden = self.processes is not None and not self.processes.is_main_process
        return tqdm(
            total=own * n_lengths, desc="perplexity", unit="tok", unit_scale=True, delay=_PROGRESS_DELAY, disable=hidden
        )


def _curve(model: nn.Module, name: str, plan: _Plan, lengths: list[int]) -> LengthCurve:
    scores, refused = _measure(model, plan, lengths)
    corpus = plan.corpus
    return LengthCurve(
        name=name,
        lengths=tuple(lengths),
        nll_sum={length: math.fsum(score.nll for score in found) for length, found in scores.items()},
        n_tokens={length: sum(score.n_tokens for score in found) for length, found in scores.items()},
        stderr={length: _standard_error(found) for length, found in scores.items()},
        window={length: min(length, corpus.longest) for length in scores},
        refused=refused,
        trained_length=trained_length(model),
        protocol=plan.protocol,
        stride=plan.stride,
        bos_policy=corpus.bos_policy,
        n_documents=len(corpus.documents),
        n_bytes=corpus.n_bytes,
        text_hash=corpus.digest,
        dtype=dtype_name(model),
        versions=versions(),
    )


def _measure(
    model: nn.Module, plan: _Plan, lengths: list[int]
) -> tuple[dict[int, list[DocumentScore]], dict[int, str]]:
    """Return the documents' scores for each length that the model can take, and the reason for each it cannot."""
    windows_used = {length: min(length, plan.corpus.longest) for length in lengths}
    refused = {length: reason for length, used in windows_used.items() if (reason := position_refusal(model, used))}
    scores: dict[int, list[DocumentScore]] = {}
    possible = [length for length in lengths if length not in refused]
    if not possible:
        return scores, refused
    with evaluation_mode(model), plan.progress_bar(len(possible)) as bar:
        scorer = Scorer(model, plan.corpus.documents[0][: max(2, possible[-1])])
        for length in possible:
            bar.set_postfix_str(f"length {length}", refresh=False)
            outcome = _score(scorer, plan, length, bar)
            if isinstance(outcome, str):
                refused[length] = outcome
            else:
                scores[length] = outcome
    return scores, dict(sorted(refused.items()))


def _score(scorer: Scorer, plan: _Plan, length: int, bar: tqdm[Any]) -> list[DocumentScore] | str:
    """Return the scores of all documents, from all processes; or why there are none."""
    outcome: list[DocumentScore | str]
    try:
        outcome = [*_own_scores(scorer, plan, length, bar)]
    except LengthError as error:
        outcome = [str(error)]
    if plan.processes is not None and plan.processes.num_processes > 1:
        # Every process comes here, also one that was refused: a process that skipped it would hang the others.
        outcome = gather_object(outcome)
    reasons = [item for item in outcome if isinstance(item, str)]
    scores = [item for item in outcome if isinstance(item, DocumentScore)]
    if not reasons and not all(math.isfinite(score.nll) for score in scores):
        reasons = ["the model's logits are not finite (an overflow in its dtype?)"]
    return reasons[0] if reasons else scores


def _own_scores(scorer: Scorer, plan: _Plan, length: int, bar: tqdm[Any]) -> list[DocumentScore]:
    sums = dict.fromkeys(plan.own_documents(), 0.0)
    counts = dict.fromkeys(plan.own_documents(), 0)
    for batch in plan.batches(length):
        rows = torch.stack([plan.corpus.documents[index][window.begin : window.end + 1] for index, window in batch])
        scored = batch[0][1].scored
        for (index, _), nats in zip(batch, scorer.nll(rows, scored).sum(dim=1).tolist(), strict=True):
            sums[index] += nats
            counts[index] += scored
        bar.update(scored * len(batch))
    return [DocumentScore(index, sums[index], counts[index]) for index in sums]


def _standard_error(scores: list[DocumentScore]) -> float | None:
    """Standard error of sum(nll) / sum(n) with documents as the sampled units (Cochran 1977, section 2.11)."""
    if len(scores) < 2:
        return None
    total = sum(score.n_tokens for score in scores)
    mean = math.fsum(score.nll for score in scores) / total
    squares = math.fsum((score.nll - mean * score.n_tokens) ** 2 for score in scores)
    return math.sqrt(squares * len(scores) / (len(scores) - 1)) / total
