"""Dual chunk attention: every distance within, between and across chunks is one that the model was trained on.

An et al. 2024, "Training-Free Long-Context Scaling of Large Language Models", section 3; checked against the distances
of the authors' ChunkLlama. No training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.config import Choices, Encoding, register_encoding
from hf_posenc.errors import ConfigError
from hf_posenc.positions import Geometry, Positions
from hf_posenc.rotation import RotaryConfig, products

CLAMPS = ("chunk", "chunk-1")


class DualChunkEncoding(Encoding):
    """Keys stand at their place in their chunk; a query's place depends on how many chunks lie between."""

    def __init__(self, config: DualChunk, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        self.chunk, self.local = config.lengths(geometry)
        self.rotation = config.rotation(geometry)

    def score(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (b, h, q, k), float32 (float64 for float64 queries). Chunks are counted from position 0."""
        length = self.chunk - self.local
        furthest = self.chunk if self.config.clamp == "chunk" else self.chunk - 1
        keys = self.rotation.rotate(key, positions.key % length)
        within = positions.query % length
        places = (within, (within + length).clamp(max=furthest), torch.full_like(within, furthest))
        same, next_to, beyond = (products(self.rotation.rotate(query, place), keys) for place in places)
        apart = (positions.query[:, :, None] // length - positions.key[:, None, :] // length)[:, None]  # (b, 1, q, k)
        return torch.where(apart <= 0, same, torch.where(apart == 1, next_to, beyond))

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"chunk={self.chunk}, local={self.local}, clamp={self.config.clamp}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class DualChunk(RotaryConfig):
    """Dual chunk attention over the model's own rotation; causal models only.

    Attributes:
        chunk: largest distance in tokens, >= 2; None takes three quarters of the trained length.
        local: distances kept exact across the border of two chunks, in tokens, below `chunk`; None takes an eighth of
            the trained length. A chunk holds `chunk - local` tokens.
        clamp: where far queries stand: at `chunk` (the authors' code) or at `chunk-1` (their paper).
    """

    chunk: int | None = None
    local: int | None = None
    clamp: str = "chunk"

    name: ClassVar[str] = "dual_chunk"
    label: ClassVar[str] = "DualChunk"
    module: ClassVar[type[Encoding]] = DualChunkEncoding
    choices: ClassVar[Choices] = {"clamp": CLAMPS}

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        for field in ("chunk", "local"):
            value = getattr(self, field)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"DualChunk.{field} must be a whole number of tokens or None, was: {value!r}")

    def lengths(self, geometry: Geometry) -> tuple[int, int]:
        """Return the largest distance and the local window, in tokens."""
        trained = geometry.max_position_embeddings
        return self.chunk or trained * 3 // 4, self.local or trained // 8

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> DualChunk:
        """Fill in the rotation, and both lengths, from the model."""
        chunk, local = self.lengths(geometry)
        return dataclasses.replace(super().for_model(geometry, rope_parameters), chunk=chunk, local=local)

    def check(self, geometry: Geometry) -> None:
        """Raise for an encoder, for chunks without room, and where the rotation does not fit."""
        super().check(geometry)
        self.causal_only(geometry, "its chunks say nothing of keys ahead of a query")
        chunk, local = self.lengths(geometry)
        if not 1 <= local < chunk:
            raise ConfigError(f"dual chunk attention needs 1 <= local < chunk, was: local {local}, chunk {chunk}")
