"""T5's relative bias: one learned number per head for every bucket of distances.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning", section 2.1. Checked against transformers'
`T5Attention._relative_position_bucket`. Near distances have a bucket each, farther ones share buckets whose width grows
with the distance, and all beyond the last boundary tie. The boundaries are found in whole numbers: the logarithm of the
reference picks other buckets in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Choices, Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError
from hf_posenc.positions import Geometry

MULTIPLIERS = ("one", "sqrt_head_dim")


def first_distances(num_buckets: int, max_distance: int) -> list[int]:
    """Return the smallest distance, in tokens, of each of `num_buckets` buckets on one side.

    Half of them, E, hold one distance each. With L = num_buckets - E more up to M = max_distance, bucket E + k starts
    at the smallest d with E * (M/E)^(k/L) <= d, that is M^k * E^(L-k) <= d^L.
    """
    exact = num_buckets // 2
    spread = num_buckets - exact
    firsts = list(range(exact))
    for k in range(spread):
        bound = max_distance**k * exact ** (spread - k)
        distance = int(exact * (max_distance / exact) ** (k / spread))
        while distance**spread >= bound:
            distance -= 1
        while distance**spread < bound:
            distance += 1
        firsts.append(distance)
    return firsts


class T5Encoding(Encoding):
    """Bias looked up by bucket and head; zero at the start, so that it changes nothing until it is trained."""

    def __init__(self, config: T5, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        self.two_sided = not geometry.causal
        side = config.num_buckets // 2 if self.two_sided else config.num_buckets
        self.boundaries = first_distances(side, config.max_distance)[1:]
        self.multiplier: float = geometry.head_dim**0.5 if config.multiplier == "sqrt_head_dim" else 1.0
        self.weight = nn.Parameter(torch.zeros(config.num_buckets, geometry.num_attention_heads))

    def buckets(self, distance: Tensor) -> Tensor:
        """Return the bucket of every query-minus-key distance, int64, same shape.

        In an encoder the first half of the buckets is for keys at or behind the query, the second for keys ahead.
        """
        boundaries = torch.tensor(self.boundaries, device=distance.device)
        if not self.two_sided:
            return torch.bucketize(distance, boundaries, right=True)
        return torch.bucketize(distance.abs(), boundaries, right=True) + (distance < 0) * (len(self.boundaries) + 1)

    def distance_bias(self, distance: Tensor) -> Tensor:
        """Return the row of the bucket, (n,) -> (h, n)."""
        table = self.weight.to(distance.dtype) * self.multiplier
        return nn.functional.embedding(self.buckets(distance), table).T

    @torch.no_grad()
    def adopt_bias(self, tables: Sequence[Tensor]) -> None:
        """Copy the table being replaced where it is one for all layers that share this bias, of as many buckets."""
        if len(tables) == 1 and tables[0].shape == self.weight.shape and not tables[0].is_meta:
            self.weight.copy_(tables[0] / self.multiplier)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"buckets={self.config.num_buckets}, max_distance={self.config.max_distance}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class T5(EncodingConfig):
    """Learned bias by bucketed distance; causal or two-sided, as the model is.

    Attributes:
        num_buckets: rows of the table, >= 2; in an encoder half of them for each side, so even and >= 4 there.
        max_distance: tokens, above half the buckets of a side; distances near and beyond it share the last bucket
            (with 32 and 128: from 113 on in a decoder, from 91 on in an encoder).
        multiplier: factor on the table. `one` (neutral), as in transformers, or `sqrt_head_dim`, as in x-transformers,
            which undoes the 1/sqrt(head_dim) of the scores: T5's own scores have no such factor.
        per_layer: a table for every layer, as in UMT5, instead of one for all, as in T5. Neutral value: False.
    """

    num_buckets: int = 32
    max_distance: int = 128
    multiplier: str = "one"
    per_layer: bool = False

    name: ClassVar[str] = "t5"
    label: ClassVar[str] = "T5"
    module: ClassVar[type[Encoding]] = T5Encoding
    choices: ClassVar[Choices] = {"multiplier": MULTIPLIERS}

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        for field in ("num_buckets", "max_distance"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 2:
                raise ConfigError(f"T5.{field} must be an integer >= 2, was: {value!r}")
        if self.max_distance <= self.num_buckets // 2:
            raise ConfigError(
                f"T5.max_distance ({self.max_distance}) must exceed half of num_buckets ({self.num_buckets}): below "
                "that every distance has a bucket of its own."
            )

    def check(self, geometry: Geometry) -> None:
        """Raise ConfigError where an encoder cannot share the buckets between its two sides."""
        if not geometry.causal and (self.num_buckets % 2 or self.num_buckets < 4):
            raise ConfigError(
                f"T5(num_buckets={self.num_buckets}) on a bidirectional model: half of the buckets are for each side, "
                "so take an even number from 4 on."
            )
