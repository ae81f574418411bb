"""Shaw's relative keys: every query also meets a learned vector that stands for the distance of the key.

Shaw et al. 2018, "Self-Attention with Relative Position Representations", equations 3-5:
q_i . (k_j + w[clip(j - i)]) / sqrt(head_dim). Checked against transformers' `Wav2Vec2BertSelfAttention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from hf_posenc.positions import Geometry, Positions


class ShawEncoding(Encoding):
    """Bias of the query's product with the row of its distance; zero at the start, so that it changes nothing."""

    def __init__(self, config: Shaw, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.left + config.right + 1, geometry.head_dim))

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (b, h, q, k), float32 (float64 for float64 queries). The query comes scaled, and so the bias is."""
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        left, right = self.config.left, self.config.right
        rows = query.to(dtype) @ self.weight.to(dtype).T  # (b, h, q, rows)
        index = (-positions.distance()).clamp(-left, right) + left  # (1|b, q, k)
        return rows.gather(-1, index[:, None].expand(*rows.shape[:2], -1, -1))

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"left={self.config.left}, right={self.config.right}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Shaw(EncodingConfig):
    """Relative keys by clipped distance; heads share the table.

    The table's row `left + j - i` is the one of query i and key j, as in wav2vec2_bert's `distance_embedding`.

    Attributes:
        left: tokens behind the query that are told apart, >= 0; farther keys share a row.
        right: tokens ahead, >= 0; a causal model never meets them.
        values: let distances speak in the output as well, which is not supported: attention functions add to scores,
            not to values. Neutral value: False.
        per_layer: a table for every layer, as published, instead of one for all. Neutral value: False.
    """

    left: int = 16
    right: int = 16
    values: bool = False
    per_layer: bool = False

    name: ClassVar[str] = "shaw"
    label: ClassVar[str] = "Shaw"
    module: ClassVar[type[Encoding]] = ShawEncoding

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError, or UnsupportedEncodingError where relative values are asked for."""
        for field in ("left", "right"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"Shaw.{field} must be an integer >= 0, was: {value!r}")
        for field in ("values", "per_layer"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"Shaw.{field} must be True or False, was: {getattr(self, field)!r}")
        if self.values:
            raise UnsupportedEncodingError(
                "Shaw(values=True) asks for relative values, which no stock attention function can add to its output; "
                "relative keys alone are what Shaw(values=False) gives."
            )
