"""What a retrieval task returns: every trial, all numbers derived from them, and all that makes them comparable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from hf_posenc.evaluation.intervals import wilson
from hf_posenc.evaluation.result import Result, json_ready

PASSED = 0.2
"""Share of right answers from which on a length counts as reached (Chen et al. 2023, section 3.3)."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One prompt and what the model made of it.

    Attributes:
        length: tokens of prompt and answer together.
        depth: where in the text the answer was to stand, 0 (start) to 1 (end); None for tasks without one place.
        place: token of the prompt at which the sentence with the answer begins.
        expected: the parts of the right answer.
        answer: what the model wrote, always the most probable token next.
        found: share of the parts in it, 0 to 1; of an answer of one part, whether it is exactly that.
        nll: nats of the right answer, over all its tokens.
        margin: nats by which the right answer is more probable than the most probable wrong one, negative where it is
            less; None for tasks that have no wrong answers to compare with.
    """

    length: int
    depth: float | None
    place: int
    expected: tuple[str, ...]
    answer: str
    found: float
    nll: float
    margin: float | None


@dataclass(frozen=True, kw_only=True)
class RetrievalGrid(Result):
    """How often one model finds what a text holds, by length and depth.

    Attributes:
        task: the name of the task (`retrieval_tasks.TASKS`).
        lengths: every length asked for, ascending.
        depths: the depths tried, ascending; empty for tasks without one.
        trials: what was tried, by length, depth and number; lengths in `refused` have none.
        refused: why a length has no trials.
        n_others: wrong answers held against each right one.
        digits: digits of each number.
        seed: of keys, words and filler.
        text_hash: SHA-256 over the texts that hide the answers, None for the task's own filler.
    """

    task: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    trials: tuple[Trial, ...]
    refused: Mapping[int, str]
    n_others: int
    digits: int
    seed: int
    text_hash: str | None

    @property
    def n_trials(self) -> dict[int, int]:
        """Number of trials at each length, over all depths."""
        return self._by_length(len)

    @property
    def score(self) -> dict[int, float]:
        """Mean share of the right answer that was found at each length, over all depths."""
        return self._by_length(lambda trials: fmean(trial.found for trial in trials))

    @property
    def interval(self) -> dict[int, tuple[float, float]]:
        """The 95 % interval of `score` (`intervals.wilson`)."""
        return self._by_length(lambda trials: wilson(sum(trial.found for trial in trials), len(trials)))

    @property
    def cells(self) -> dict[tuple[int, float | None], float]:
        """(length, depth) -> mean share of the right answer that was found."""
        found: dict[tuple[int, float | None], list[float]] = {}
        for trial in self.trials:
            found.setdefault((trial.length, trial.depth), []).append(trial.found)
        return {cell: fmean(values) for cell, values in found.items()}

    @property
    def margin(self) -> dict[int, float]:
        """Mean margin in nats at each length; empty for tasks without wrong answers."""
        return self._by_length(lambda trials: fmean(_margins(trials))) if self._compared else {}

    @property
    def preferred(self) -> dict[int, float]:
        """Share of trials in which the right answer is the most probable: 1 / (1 + `n_others`) by chance.

        Empty for tasks without wrong answers.
        """
        return self._by_length(lambda trials: fmean(m > 0 for m in _margins(trials))) if self._compared else {}

    def effective_length(self, least: float = PASSED) -> int | None:
        """Return the largest length up to which every one has at least this `score`; None where the first has less."""
        found = None
        for length, score in self.score.items():
            if score < least:
                break
            found = length
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data: the fields, and the derived numbers for whoever reads the file without this class."""
        data = asdict(self) | {
            name: getattr(self, name) for name in ("n_trials", "score", "interval", "margin", "preferred")
        }
        data["cells"] = [{"length": at[0], "depth": at[1], "score": score} for at, score in self.cells.items()]
        data["effective_length"] = self.effective_length()
        ready: dict[str, Any] = json_ready(data)
        return ready

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RetrievalGrid:
        """Rebuild a grid from `to_dict` or its JSON; derived numbers are computed again, not read.

        Raises:
            DataError: a field is missing.
        """
        values = cls._fields_of(data, called="retrieval grid")
        values |= {name: tuple(values[name]) for name in ("lengths", "depths")}
        values["trials"] = tuple(Trial(**(row | {"expected": tuple(row["expected"])})) for row in data["trials"])
        values["refused"] = {int(length): why for length, why in data["refused"].items()}
        return cls(**values)

    @property
    def _compared(self) -> bool:
        return any(trial.margin is not None for trial in self.trials)

    def _by_length(self, measure: Callable[[list[Trial]], Any]) -> dict[int, Any]:
        found: dict[int, list[Trial]] = {}
        for trial in self.trials:
            found.setdefault(trial.length, []).append(trial)
        return {length: measure(found[length]) for length in sorted(found)}


def _margins(trials: list[Trial]) -> list[float]:
    return [trial.margin for trial in trials if trial.margin is not None]
