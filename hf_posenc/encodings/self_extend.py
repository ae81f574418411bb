"""SelfExtend: beyond a window, a rotary model sees distances in groups.

Jin et al. 2024, "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning", section 3; checked against the
distances of the authors' LongLM. No training. Reaches (L - w) * g + w tokens, L the trained length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.config import Choices, Encoding, register_encoding
from hf_posenc.errors import ConfigError
from hf_posenc.positions import Geometry, Positions
from hf_posenc.rotation import RotaryConfig, products

SHIFTS = ("floor", "fractional")


class SelfExtendEncoding(Encoding):
    """Scores at true distances below the window, at grouped ones from there on."""

    def __init__(self, config: SelfExtend, geometry: Geometry) -> None:
        super().__init__()
        self.config, self.causal = config, geometry.causal
        self.rotation = config.rotation(geometry)

    def score(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (b, h, q, k), float32 (float64 for float64 queries).

        A key as far ahead as another is behind stands at the mirrored distance. The groups start at position 0, so that
        a grouped distance depends by up to one on where the text begins.
        """
        group, window = self.config.group, self.config.window
        shift = window - (window // group if self.config.shift == "floor" else window / group)
        grouped, keys = (positions.query // group).double(), self.rotation.rotate(key, positions.key // group)
        near = products(self.rotation.rotate(query, positions.query), self.rotation.rotate(key, positions.key))
        distance = positions.distance()[:, None]  # (b, 1, q, k)
        scores = torch.where(distance < window, near, products(self.rotation.rotate(query, grouped + shift), keys))
        if self.causal:
            return scores
        return torch.where(distance > -window, scores, products(self.rotation.rotate(query, grouped - shift), keys))

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"group={self.config.group}, window={self.config.window}, shift={self.config.shift}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class SelfExtend(RotaryConfig):
    """SelfExtend over the model's own rotation.

    Attributes:
        group: positions that share one beyond the window, >= 1; neutral value 1.
        window: distances below this many tokens stay as they are, >= 1.
        shift: by how much groups move so as to join the window: `floor`, window - window // group (paper), or
            `fractional`, window - window / group (the authors' code). The same where `group` divides `window`.
    """

    group: int = 8
    window: int = 1024
    shift: str = "fractional"

    name: ClassVar[str] = "self_extend"
    label: ClassVar[str] = "SelfExtend"
    module: ClassVar[type[Encoding]] = SelfExtendEncoding
    choices: ClassVar[Choices] = {"shift": SHIFTS}

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        for field in ("group", "window"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"SelfExtend.{field} must be a whole number of tokens, at least 1, was: {value!r}")
