"""The first window of every document that fills it: scored once, shared among processes, kept while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_posenc.errors import LengthError
from hf_posenc.evaluation.measure import NOT_FINITE
from hf_posenc.evaluation.partial import Cut, PartialScores
from hf_posenc.evaluation.sharing import gathered, own_share, progress

if TYPE_CHECKING:
    from accelerate import PartialState
    from tqdm.auto import tqdm


@dataclass(frozen=True, kw_only=True)
class FirstWindows:
    """Windows of one length, one a document, and what is wanted of each.

    Attributes:
        windows: (length + 1,) token ids each.
        keys: what identifies each document, in partial scores and for order.
        cut: the numbers by which windows were made, such as their length.
        score: windows (b, length + 1) -> the sums that each contributes, (b, values) float64.
        batch_size: windows in one call of `score`.
        called: what is measured, for the progress bar.
    """

    windows: Sequence[torch.Tensor]
    keys: Sequence[str]
    cut: Cut
    score: Callable[[torch.Tensor], np.ndarray]
    batch_size: int
    called: str

    @property
    def length(self) -> int:
        """Number of inputs in a window."""
        return len(self.windows[0]) - 1

    def sums(self, kept: PartialScores, processes: PartialState | None) -> np.ndarray:
        """Return the sums of all windows, from all processes: (documents, values) float64.

        They stand in the order of their keys, so that resampling draws the same documents whatever their order.

        Raises:
            LengthError: on every process, where a window could not be scored on one.
        """
        found: list[tuple[str, list[float]] | str]
        own = own_share([self.length] * len(self.windows), self.keys, processes)
        try:
            with progress(len(own) * self.length, self.called, "tok", processes) as bar:
                found = [*self._own(own, kept, bar)]
        except LengthError as error:  # the others wait for this process
            found = [str(error)]
        found = gathered(found, processes)
        if reasons := [item for item in found if isinstance(item, str)]:
            raise LengthError(f"length={self.length}: {reasons[0]}.")
        return np.array([sums for _, sums in sorted(item for item in found if not isinstance(item, str))])

    def _own(self, own: Sequence[int], kept: PartialScores, bar: tqdm[Any]) -> Iterator[tuple[str, list[float]]]:
        """Yield the key and the sums of each window that this process is to score."""
        missing = []
        for index in own:
            score = kept.known(self.cut, self.keys[index])
            if score is None:
                missing.append(index)
            else:
                yield self.keys[index], score["sums"]
                bar.update(self.length)
        for first in range(0, len(missing), self.batch_size):
            indices = missing[first : first + self.batch_size]
            sums = self.score(torch.stack([self.windows[index] for index in indices])).tolist()
            found = list(zip([self.keys[index] for index in indices], sums, strict=True))
            kept.keep(self.cut, [(key, {"sums": values}) for key, values in found])
            yield from found
            bar.update(len(found) * self.length)


def finite(nats: torch.Tensor) -> np.ndarray:
    """Return losses as an array, or raise `LengthError` where one of them is no number."""
    if not nats.isfinite().all():
        raise LengthError(NOT_FINITE)
    values: np.ndarray = nats.numpy()
    return values
