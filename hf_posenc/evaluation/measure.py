"""The loop under every measurement by length: share documents among processes, score, keep, gather, add up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hf_posenc.errors import LengthError
from hf_posenc.evaluation.curve import LengthCurve
from hf_posenc.evaluation.documents import Corpus
from hf_posenc.evaluation.intervals import bootstrap, standard_error
from hf_posenc.evaluation.partial import DocumentScore, PartialScores
from hf_posenc.evaluation.scoring import evaluation_mode
from hf_posenc.evaluation.sharing import gathered, own_share, progress
from hf_posenc.evaluation.subject import facts_of, model_name, position_refusal

if TYPE_CHECKING:
    from accelerate import PartialState
    from torch import nn
    from tqdm.auto import tqdm
    from transformers import PreTrainedTokenizerBase

NOT_FINITE = "the model's logits are not finite (an overflow in its dtype?)"


Score: TypeAlias = Callable[[Sequence[int], int], list[DocumentScore]]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What is measured on what, and by whom.

    Attributes:
        model: the model.
        tokenizer: what made the corpus out of texts, None where it came as ids.
        name: what it is called; its checkpoint's name where None.
        protocol, bos_policy: as in `LengthCurve`.
        corpus: the documents.
        keys: what identifies each document for this measurement, in partial scores and for order.
        used: for each length in question, the positions that the longest window really uses.
        strides: for each length, the stride.
        group: documents scored in one call, after which their scores are kept.
        scoring: makes the function (indices of documents, length) -> scores; called in evaluation mode, and only where
            some length can be measured. What it makes raises LengthError for a length the model cannot take after all.
        processes: among which the documents are shared, None for this one alone.
        partial: folder where scores are kept, None for nowhere.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    name: str | None
    protocol: str
    bos_policy: str
    corpus: Corpus
    keys: Sequence[str]
    used: Mapping[int, int]
    strides: Mapping[int, int]
    scoring: Callable[[], Score]
    group: int = 1
    processes: PartialState | None = None
    partial: Path | str | None = None

    def curve(self) -> LengthCurve:
        """Measure all lengths; the model's modes are restored."""
        refused = {length: why for length, used in self.used.items() if (why := position_refusal(self.model, used))}
        possible = [length for length in sorted(self.used) if length not in refused]
        facts = facts_of(self.model, self.tokenizer)
        scores: dict[int, list[DocumentScore]] = {}
        if possible:
            of = facts["model_hash"] or model_name(self.model)
            run = {"model": of, "protocol": self.protocol, "bos_policy": self.bos_policy}
            kept = PartialScores(self.partial, run, processes=self.processes)
            with evaluation_mode(self.model):
                work = _Work(self, self.scoring(), kept)
                for length, outcome in work.outcomes(possible):
                    if isinstance(outcome, str):
                        refused[length] = outcome
                    else:
                        scores[length] = outcome
        return LengthCurve(
            name=self.name or model_name(self.model),
            lengths=tuple(sorted(self.used)),
            **_sums(scores),
            window={length: self.used[length] for length in scores},
            stride={length: self.strides[length] for length in scores},
            refused=dict(sorted(refused.items())),
            protocol=self.protocol,
            bos_policy=self.bos_policy,
            n_documents=self.corpus.n_sources,
            n_left_out=self.corpus.n_left_out,
            n_bytes=self.corpus.n_bytes,
            text_hash=self.corpus.digest,
            **facts,
        )


@dataclass(frozen=True)
class _Work:
    """The loop over lengths and documents of one measurement."""

    task: Measurement
    score: Score
    kept: PartialScores

    def outcomes(self, lengths: Sequence[int]) -> Iterator[tuple[int, list[DocumentScore] | str]]:
        """Yield for each length the scores of all documents, from all processes, or why there are none."""
        keys, processes = self.task.keys, self.task.processes
        own = own_share(self.task.corpus.sizes, keys, processes)
        total = sum(self.task.corpus.sizes[index] for index in own) * len(lengths)
        with progress(total, "perplexity", "tok", processes) as bar:
            for length in lengths:
                bar.set_postfix_str(f"length {length}", refresh=False)
                found = self._gathered(own, length, bar)
                if not isinstance(found, str):
                    # by content, so that neither the order of documents nor their sharing shows in the numbers
                    found = sorted(found, key=lambda score: (keys[score.index], score.index))
                yield length, found

    def _gathered(self, own: list[int], length: int, bar: tqdm[Any]) -> list[DocumentScore] | str:
        outcome: list[DocumentScore | str]
        try:
            outcome = [*self._own(own, length, bar)]
        except LengthError as error:
            outcome = [str(error)]
        outcome = gathered(outcome, self.task.processes)  # also from a process that was refused
        reasons = [item for item in outcome if isinstance(item, str)]
        return reasons[0] if reasons else [item for item in outcome if isinstance(item, DocumentScore)]

    def _own(self, own: list[int], length: int, bar: tqdm[Any]) -> Iterator[DocumentScore | str]:
        keys, sizes, stride = self.task.keys, self.task.corpus.sizes, self.task.strides[length]
        missing = []
        for index in own:
            known = self.kept.known((length, stride), keys[index])
            if known is None:
                missing.append(index)
            else:
                yield DocumentScore(**(known | {"index": index}))
                bar.update(sizes[index])
        for first in range(0, len(missing), self.task.group):
            indices = missing[first : first + self.task.group]
            found = self.score(indices, length)
            if not all(math.isfinite(score.nll) for score in found):
                yield NOT_FINITE
                return
            self.kept.keep((length, stride), [(keys[score.index], asdict(score)) for score in found])
            bar.update(sum(sizes[index] for index in indices))
            yield from found


def _sums(scores: Mapping[int, list[DocumentScore]]) -> dict[str, Any]:
    """Add up scores into the fields of `LengthCurve` that come from them."""
    table = {
        length: np.array([(score.nll, score.n_tokens, score.weighted, score.weight) for score in found]).T
        for length, found in scores.items()
    }
    intervals = {length: bootstrap(columns[0], columns[1]) for length, columns in table.items()}
    return {
        "nll_sum": {length: math.fsum(columns[0]) for length, columns in table.items()},
        "n_tokens": {length: int(columns[1].sum()) for length, columns in table.items()},
        "n_correct": {
            length: sum(score.n_correct or 0 for score in found)
            for length, found in scores.items()
            if all(score.n_correct is not None for score in found)
        },
        "origin_nll": {length: math.fsum(columns[2]) / math.fsum(columns[3]) for length, columns in table.items()},
        "stderr": {length: standard_error(columns[0], columns[1]) for length, columns in table.items()},
        "interval": {
            length: None if ends is None else (float(ends[0]), float(ends[1])) for length, ends in intervals.items()
        },
    }
