"""STRING: the largest trained distances, which training rarely saw, give way to well-trained smaller ones.

An et al. 2025, "Why Does the Effective Context Length of LLMs Fall Short?" (arXiv 2410.18745), equation 4. No training;
for texts within the trained length, of which a model often uses only a part well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.config import Encoding, register_encoding
from hf_posenc.errors import ConfigError
from hf_posenc.positions import Geometry, Positions
from hf_posenc.rotation import RotaryConfig, products


class StringEncoding(Encoding):
    """Scores at true distances d below the shift s, at d - s + local from there on."""

    def __init__(self, config: String, geometry: Geometry) -> None:
        super().__init__()
        self.local, self.causal = config.local, geometry.causal
        self.shift = config.shift_in(geometry)
        self.rotation = config.rotation(geometry)

    def score(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (b, h, q, k), float32 (float64 for float64 queries); a key ahead stands at the mirrored distance."""
        keys, back = self.rotation.rotate(key, positions.key), self.shift - self.local
        near = products(self.rotation.rotate(query, positions.query), keys)
        distance = positions.distance()[:, None]  # (b, 1, q, k)
        far = products(self.rotation.rotate(query, positions.query - back), keys)
        scores = torch.where(distance < self.shift, near, far)
        if self.causal:
            return scores
        ahead = products(self.rotation.rotate(query, positions.query + back), keys)
        return torch.where(distance > -self.shift, scores, ahead)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"shift={self.shift}, local={self.local}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class String(RotaryConfig):
    """STRING over the model's own rotation.

    Attributes:
        shift: distances from here on start over, in tokens, >= 1; None takes a third of the trained length.
        local: where they start over, in tokens, >= 0 and at most the shift; equal to the shift it is neutral.
    """

    shift: int | None = None
    local: int = 128

    name: ClassVar[str] = "string"
    label: ClassVar[str] = "String"
    module: ClassVar[type[Encoding]] = StringEncoding

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        for field, least in (("shift", 1), ("local", 0)):
            value = getattr(self, field)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not whole and not (field == "shift" and value is None):
                raise ConfigError(f"String.{field} must be a whole number of at least {least} tokens, was: {value!r}")

    def shift_in(self, geometry: Geometry) -> int:
        """Return the shift in tokens."""
        return self.shift or geometry.max_position_embeddings // 3

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> String:
        """Fill in the rotation, and the shift, from the model."""
        return dataclasses.replace(super().for_model(geometry, rope_parameters), shift=self.shift_in(geometry))

    def check(self, geometry: Geometry) -> None:
        """Raise ConfigError where distances would grow instead of starting over, or the rotation does not fit."""
        super().check(geometry)
        shift = self.shift_in(geometry)
        if self.local > shift:
            raise ConfigError(
                f"STRING needs local <= shift, was: local {self.local}, shift {shift} tokens, where a third of the "
                f"trained length is {geometry.max_position_embeddings // 3}"
            )
