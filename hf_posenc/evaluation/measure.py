"""The loop under every measurement by length: share documents among processes, score, keep, gather, add up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate.utils import gather_object
from tqdm.auto import tqdm

from hf_posenc.errors import LengthError
from hf_posenc.evaluation.curve import LengthCurve
from hf_posenc.evaluation.intervals import bootstrap, standard_error
from hf_posenc.evaluation.partial import DocumentScore, PartialScores
from hf_posenc.evaluation.subject import dtype_name, trained_length
from hf_posenc.provenance import versions

if TYPE_CHECKING:
    from accelerate import PartialState
    from torch import nn

_PROGRESS_DELAY = 2.0  # seconds before a progress bar appears
_NOT_FINITE = "the model's logits are not finite (an overflow in its dtype?)"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be scored, and by what.

    Attributes:
        sizes: targets of each document.
        digests: SHA-256 of each document.
        score: (indices of documents, length) -> their scores; raises LengthError for a length the model cannot take.
        group: documents scored in one call, after which their scores are kept.
        processes: among which the documents are shared, None for this one alone.
        partial: where scores are kept.
    """

    sizes: Sequence[int]
    digests: Sequence[str]
    score: Callable[[Sequence[int], int], list[DocumentScore]]
    group: int = 1
    processes: PartialState | None = None
    partial: PartialScores = field(default_factory=lambda: PartialScores(None, {}))

    def own(self) -> list[int]:
        """Return the documents that this process scores, longest first.

        Each belongs to exactly one process: the longest that is left goes to the process that has least to do.
        """
        order = sorted(range(len(self.sizes)), key=lambda index: (-self.sizes[index], self.digests[index], index))
        if self.processes is None:
            return order
        loads = [0] * self.processes.num_processes
        own = []
        for index in order:
            process = loads.index(min(loads))
            loads[process] += self.sizes[index]
            if process == self.processes.process_index:
                own.append(index)
        return own

    def groups(self, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the indices in groups that are scored together."""
        for first in range(0, len(indices), self.group):
            yield indices[first : first + self.group]


def measure(work: Work, lengths: Sequence[int]) -> tuple[dict[int, list[DocumentScore]], dict[int, str]]:
    """Return all documents' scores for each length, from all processes, and the reason for each length without any."""
    scores: dict[int, list[DocumentScore]] = {}
    refused: dict[int, str] = {}
    own = work.own()
    hidden = work.processes is not None and not work.processes.is_main_process
    total = sum(work.sizes[index] for index in own) * len(lengths)
    with tqdm(
        total=total, desc="perplexity", unit="tok", unit_scale=True, delay=_PROGRESS_DELAY, disable=hidden
    ) as bar:
        for length in lengths:
            bar.set_postfix_str(f"length {length}", refresh=False)
            outcome = _all_scores(work, own, length, bar)
            if isinstance(outcome, str):
                refused[length] = outcome
            else:
                # by content, so that neither the order of documents nor their sharing shows in the numbers
                scores[length] = sorted(outcome, key=lambda score: (work.digests[score.index], score.index))
    return scores, refused


def _all_scores(work: Work, own: list[int], length: int, bar: tqdm[Any]) -> list[DocumentScore] | str:
    outcome: list[DocumentScore | str]
    try:
        outcome = [*_own_scores(work, own, length, bar)]
    except LengthError as error:
        outcome = [str(error)]
    if work.processes is not None and work.processes.num_processes > 1:
        # Every process comes here, also one that was refused: a process that skipped it would hang the others.
        outcome = gather_object(outcome)
    reasons = [item for item in outcome if isinstance(item, str)]
    return reasons[0] if reasons else [item for item in outcome if isinstance(item, DocumentScore)]


def _own_scores(work: Work, own: list[int], length: int, bar: tqdm[Any]) -> Iterator[DocumentScore | str]:
    missing = []
    for index in own:
        known = work.partial.known(length, work.digests[index], index)
        if known is None:
            missing.append(index)
        else:
            yield known
            bar.update(work.sizes[index])
    for indices in work.groups(missing):
        found = work.score(indices, length)
        if not all(math.isfinite(score.nll) for score in found):
            yield _NOT_FINITE
            return
        work.partial.keep(length, [(work.digests[score.index], score) for score in found])
        bar.update(sum(work.sizes[index] for index in indices))
        yield from found


def curve_of_scores(
    model: nn.Module, scores: dict[int, list[DocumentScore]], refused: dict[int, str], **facts: Any
) -> LengthCurve:
    """Add up scores into a curve; `facts` are the fields of `LengthCurve` that neither scores nor model tell."""
    table = {
        length: np.array([(score.nll, score.n_tokens, score.weighted, score.weight) for score in found]).T
        for length, found in scores.items()
    }
    intervals = {length: bootstrap(columns[0], columns[1]) for length, columns in table.items()}
    return LengthCurve(
        nll_sum={length: math.fsum(columns[0]) for length, columns in table.items()},
        n_tokens={length: int(columns[1].sum()) for length, columns in table.items()},
        n_correct={
            length: sum(score.n_correct or 0 for score in found)
            for length, found in scores.items()
            if all(score.n_correct is not None for score in found)
        },
        origin_nll={length: math.fsum(columns[2]) / math.fsum(columns[3]) for length, columns in table.items()},
        stderr={length: standard_error(columns[0], columns[1]) for length, columns in table.items()},
        interval={
            length: None if ends is None else (float(ends[0]), float(ends[1])) for length, ends in intervals.items()
        },
        refused=dict(sorted(refused.items())),
        trained_length=trained_length(model),
        dtype=dtype_name(model),
        versions=versions(),
        **facts,
    )
