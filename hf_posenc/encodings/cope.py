"""CoPE: positions counted by the content, so that a query can look at the i-th sentence as well as at the i-th token.

Golovneva et al. 2024, "Contextual Position Encoding", equations 3-5 and appendix B. Every key k up to query i counts
sigmoid(score_ik); the position of key j is the sum of the counts from j to i, and adds q_i . e[position], interpolated
between the rows of e. Checked against the code of appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Choices, Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from hf_posenc.positions import Geometry, Positions

GATES = ("scaled", "unscaled")


class CoPEEncoding(Encoding):
    """Bias of the query's products with rows at counted positions; zero at the start, so that it changes nothing."""

    def __init__(self, config: CoPE, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        self.unscaled: float = geometry.head_dim**0.5
        self.weight = nn.Parameter(torch.zeros(config.max_positions_counted, geometry.head_dim))

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (b, h, q, k), float32 (float64 for float64 queries); keys ahead stand at position 0."""
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        query, key = query.to(dtype), key.to(dtype)
        shared = query.shape[1] // key.shape[1]
        scores = (query.unflatten(1, (-1, shared)) @ key.mT[:, :, None]).flatten(1, 2)  # (b, h, q, k)
        if self.config.gates == "unscaled":
            scores = scores * self.unscaled
        slots = positions.own_slots()[None, None, :, None]
        behind = torch.arange(key.shape[2], device=key.device) <= slots
        counts = scores.sigmoid() * behind
        place = counts.flip(-1).cumsum(-1).flip(-1).clamp(max=self.weight.shape[0] - 1)
        rows = self.unscaled * query @ self.weight.to(dtype).T  # (b, h, q, rows)
        steps = rows.diff(dim=-1, append=rows[..., -1:])
        below = place.long()
        return torch.addcmul(rows.gather(-1, below), place - below, steps.gather(-1, below))

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"rows={self.weight.shape[0]}, gates={self.config.gates}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class CoPE(EncodingConfig):
    """Contextual positions; for causal models only. Heads share the table.

    Attributes:
        max_positions_counted: rows of the table, >= 2; whatever counts farther shares the last row.
        gates: what a key counts. `scaled`, as in the code of the paper: sigmoid of the score after the division by
            sqrt(head_dim), or `unscaled`, as in its equations: before it.
        per_layer: a table for every layer, as published, or one for all.
    """

    max_positions_counted: int = 64
    gates: str = "scaled"
    per_layer: bool = True

    name: ClassVar[str] = "cope"
    label: ClassVar[str] = "CoPE"
    module: ClassVar[type[Encoding]] = CoPEEncoding
    choices: ClassVar[Choices] = {"gates": GATES}

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        rows = self.max_positions_counted
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 2:
            raise ConfigError(f"CoPE.max_positions_counted must be an integer >= 2, was: {rows!r}")

    def check(self, geometry: Geometry) -> None:
        """Raise UnsupportedEncodingError for a model that is not causal: positions are counted back from the query."""
        if not geometry.causal:
            raise UnsupportedEncodingError(
                "CoPE was asked for on a bidirectional model, but counts from a query back to its keys only. Choose "
                "shaw or bert_relative, which let content meet distance on both sides."
            )
