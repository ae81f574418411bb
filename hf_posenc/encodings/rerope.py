"""ReRoPE and leaky ReRoPE: beyond a window, distances stop growing, or grow slower.

Su 2023, "Transformer upgrade path 12: ReRoPE with infinite extrapolation" (kexue.fm 9708) and its leaky form (9731);
checked against the distances of the author's repository. No training. The author multiplies the scores by log-n as
well: `ReRoPE(temperature={"kind": "log_n"})`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.config import Encoding, register_encoding
from hf_posenc.errors import ConfigError
from hf_posenc.positions import Geometry, Positions
from hf_posenc.rotation import RotaryConfig, products
from hf_posenc.scaling import is_number


class ReRoPEEncoding(Encoding):
    """Scores at true distances d below the window w, at w + (d - w) / leak from there on."""

    def __init__(self, config: ReRoPE, geometry: Geometry) -> None:
        super().__init__()
        self.config, self.causal = config, geometry.causal
        self.rotation = config.rotation(geometry)

    def score(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (b, h, q, k), float32 (float64 for float64 queries); a key ahead stands at the mirrored distance."""
        window, leak = self.config.window, self.config.leak
        speed = 1 / leak if leak is not None else 0.0
        near = products(self.rotation.rotate(query, positions.query), self.rotation.rotate(key, positions.key))
        slow, keys = positions.query.double() * speed, self.rotation.rotate(key, positions.key.double() * speed)
        shift = window * (1 - speed)
        distance = positions.distance()[:, None]  # (b, 1, q, k)
        scores = torch.where(distance < window, near, products(self.rotation.rotate(query, slow + shift), keys))
        if self.causal:
            return scores
        return torch.where(distance > -window, scores, products(self.rotation.rotate(query, slow - shift), keys))

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"window={self.config.window}, leak={self.config.leak}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class ReRoPE(RotaryConfig):
    """ReRoPE over the model's own rotation.

    Attributes:
        window: distances below this many tokens stay as they are, >= 1. The author has an eighth of the trained length.
        leak: how many times slower distances grow from the window on, >= 1; None stops them there; neutral value 1.
    """

    window: int = 512
    leak: float | None = None

    name: ClassVar[str] = "rerope"
    label: ClassVar[str] = "ReRoPE"
    module: ClassVar[type[Encoding]] = ReRoPEEncoding

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ConfigError(f"ReRoPE.window must be a whole number of tokens, at least 1, was: {self.window!r}")
        if self.leak is not None and not (is_number(self.leak) and self.leak >= 1):
            raise ConfigError(f"ReRoPE.leak must be a number of at least 1, or None, was: {self.leak!r}")
