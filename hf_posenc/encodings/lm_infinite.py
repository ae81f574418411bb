"""LM-Infinite: a window, a few first tokens, and no distance beyond the window.

Han et al. 2024, "LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language Models", section 4; checked
against the rules of the authors' repository. No training. Keeps a model fluent at any length; of what has left the
window it can recall the first tokens only.
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
from hf_posenc.rotation import UNSEEN, RotaryConfig, products


class LMInfiniteEncoding(Encoding):
    """Scores within a window, and on the first tokens at a distance of at most the window."""

    def __init__(self, config: LMInfinite, geometry: Geometry) -> None:
        super().__init__()
        self.first = config.first
        self.window = config.window or geometry.max_position_embeddings
        self.visible = self.first, self.window
        self.rotation = config.rotation(geometry)

    def score(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (b, h, q, k), float32 (float64 for float64 queries), very low outside the mask."""
        near = products(self.rotation.rotate(query, positions.query), self.rotation.rotate(key, positions.key))
        at_the_end = torch.full_like(positions.query, self.window)
        far = products(self.rotation.rotate(query, at_the_end), key)  # keys at position 0: no rotation
        near_enough = (positions.distance() < self.window)[:, None]  # (b, 1, q, k)
        first = (positions.key < self.first)[:, None, None]  # (b, 1, 1, k)
        return torch.where(near_enough, near, far.masked_fill(~first, UNSEEN))

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"first={self.first}, window={self.window}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class LMInfinite(RotaryConfig):
    """LM-Infinite over the model's own rotation; causal models only.

    A dynamic cache, which is what `generate` makes, is cut to the first tokens and the window after every call: memory
    does not grow with the text. It cannot be cut back to an earlier text then, as assisted decoding would.

    Attributes:
        first: first tokens of the text that every query sees, >= 0; the authors have 10 to 100.
        window: distances seen, and the largest distance, in tokens, >= 1; None takes the trained length.
    """

    first: int = 10
    window: int | None = None

    name: ClassVar[str] = "lm_infinite"
    label: ClassVar[str] = "LMInfinite"
    module: ClassVar[type[Encoding]] = LMInfiniteEncoding

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        for field, least in (("first", 0), ("window", 1)):
            value = getattr(self, field)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not whole and not (field == "window" and value is None):
                raise ConfigError(
                    f"LMInfinite.{field} must be a whole number of at least {least} tokens, was: {value!r}"
                )

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> LMInfinite:
        """Fill in the rotation, and the window, from the model."""
        filled = super().for_model(geometry, rope_parameters)
        return dataclasses.replace(filled, window=self.window or geometry.max_position_embeddings)

    def check(self, geometry: Geometry) -> None:
        """Raise UnsupportedEncodingError for an encoder, ConfigError where the rotation does not fit."""
        super().check(geometry)
        self.causal_only(geometry, "the first tokens are sinks only to queries that come after them")
