"""Batches whose positions skip, so that a model trained at a short length meets the positions of a long one.

Randomised positions: Ruoss et al. 2023, "Randomized Positional Encodings Boost Length Generalization of Transformers",
section 3. PoSE: Zhu et al. 2023, "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise Training",
equation 5, in the form of its later code, where the first chunk starts at 0. Each collator goes to the Trainer as
`data_collator`.

An attention mask of ones goes along with the positions: without one, transformers takes positions that skip for several
texts packed into one row, and hides them from each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import ConfigError, DataError

IGNORED = -100
"""The label that transformers' losses skip."""


class _Skipping(ABC):
    """A collator that draws the positions of every row anew.

    Args:
        max_length: the length in tokens whose positions are drawn, >= 2.
        seed: of the draws. The same seed gives the same draws in the same order of calls.
    """

    def __init__(self, *, max_length: int, seed: int = 0) -> None:
        if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
            raise ConfigError(f"{type(self).__name__} needs a max_length of at least 2 tokens, was: {max_length!r}")
        self.max_length = max_length
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate packed rows of equal length, each with `input_ids`.

        Returns:
            `input_ids`, `labels`, `position_ids` and `attention_mask`, each (b, n) int64. The first label of a row is
            not a target, since nothing stands before it. Labels that the rows carry are kept otherwise.

        Raises:
            DataError: no rows, rows of several lengths, or longer ones than `max_length`.
        """
        lengths = {len(row["input_ids"]) for row in rows}
        if len(lengths) != 1:
            raise DataError(f"rows of one length are needed, as `pack` makes them, got lengths: {sorted(lengths)}")
        length = lengths.pop()
        if not 1 <= length <= self.max_length:
            raise DataError(f"{type(self).__name__} draws from {self.max_length} positions; rows have {length} tokens")
        input_ids = torch.tensor([list(row["input_ids"]) for row in rows], dtype=torch.long)  # (b, n)
        labels = torch.tensor([list(row.get("labels", row["input_ids"])) for row in rows], dtype=torch.long)
        labels[:, 0] = IGNORED
        position_ids = torch.stack([self.positions(length) for _ in rows])
        mask = torch.ones_like(input_ids)
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "attention_mask": mask}

    @abstractmethod
    def positions(self, length: int) -> Tensor:
        """Draw the positions of one row, (length,) int64, strictly ascending and below `max_length`."""

    def _below(self, end: int) -> int:
        return int(torch.randint(end, (1,), generator=self.generator))


class RandomPositions(_Skipping):
    """Positions of a row are a sorted sample without replacement from `0 ... max_length - 1`."""

    def positions(self, length: int) -> Tensor:
        """Draw the positions of one row, (length,) int64, strictly ascending and below `max_length`."""
        return torch.randperm(self.max_length, generator=self.generator)[:length].sort().values


class PoSE(_Skipping):
    """A row is two chunks of consecutive positions: the first starts at 0, the second skips ahead.

    Where the row breaks, and how far the second chunk skips, is drawn uniformly.
    """

    def positions(self, length: int) -> Tensor:
        """Draw the positions of one row, (length,) int64, strictly ascending and below `max_length`."""
        first = 1 + self._below(max(length - 1, 1))  # tokens in the first chunk
        skip = self._below(self.max_length - length + 1)
        steps = torch.arange(length)
        return steps + skip * (steps >= first)
