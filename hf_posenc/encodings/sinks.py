"""Attention sinks: what a cache of a few first and the most recent tokens sees, with positions counted in that cache.

Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks", section 3.2; equal at every step to a
cache that evicts, as a dynamic one then does. No training. Keeps a model fluent at any length; what was evicted it
cannot recall.
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


class SinksEncoding(Encoding):
    """Scores on the most recent tokens, and on the first ones as if nothing had been between."""

    def __init__(self, config: Sinks, geometry: Geometry) -> None:
        super().__init__()
        self.first = config.first
        self.recent = config.recent_in(geometry)
        self.visible = self.first, self.recent
        self.rotation = config.rotation(geometry)

    def score(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (b, h, q, k), float32 (float64 for float64 queries), very low on evicted keys."""
        keys = self.rotation.rotate(key, positions.key)
        near = products(self.rotation.rotate(query, positions.query), keys)
        in_cache = positions.query.clamp(max=self.first + self.recent - 1)
        far = products(self.rotation.rotate(query, in_cache), keys)
        recent = (positions.distance() < self.recent)[:, None]  # (b, 1, q, k)
        first = (positions.key < self.first)[:, None, None]  # (b, 1, 1, k)
        return torch.where(first, far, near.masked_fill(~recent, UNSEEN))

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"first={self.first}, recent={self.recent}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Sinks(RotaryConfig):
    """Attention sinks over the model's own rotation; causal models only.

    A dynamic cache, which is what `generate` makes, is cut to these tokens after every call: memory does not grow with
    the text. It cannot be cut back to an earlier text then, as assisted decoding would.

    Attributes:
        first: first tokens that stay, the sinks, >= 0; the authors have 4.
        recent: most recent tokens that stay, the query's own among them, >= 1; None fills the trained length.
    """

    first: int = 4
    recent: int | None = None

    name: ClassVar[str] = "sinks"
    label: ClassVar[str] = "Sinks"
    module: ClassVar[type[Encoding]] = SinksEncoding

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        for field, least in (("first", 0), ("recent", 1)):
            value = getattr(self, field)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not whole and not (field == "recent" and value is None):
                raise ConfigError(f"Sinks.{field} must be a whole number of at least {least} tokens, was: {value!r}")

    def recent_in(self, geometry: Geometry) -> int:
        """Return the number of recent tokens that stay."""
        return self.recent or max(geometry.max_position_embeddings - self.first, 1)

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> Sinks:
        """Fill in the rotation, and the number of recent tokens, from the model."""
        return dataclasses.replace(super().for_model(geometry, rope_parameters), recent=self.recent_in(geometry))

    def check(self, geometry: Geometry) -> None:
        """Raise UnsupportedEncodingError for an encoder, ConfigError where the rotation does not fit."""
        super().check(geometry)
        self.causal_only(geometry, "a cache that evicts holds no keys ahead of a query")
