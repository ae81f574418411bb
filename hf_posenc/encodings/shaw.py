"""Shaw's relative keys, and values: learned vectors stand for the distance of a key, in the score and in the output.

Shaw et al. 2018, "Self-Attention with Relative Position Representations", equations 3-5: the scores are
q_i . (k_j + w[clip(j - i)]) / sqrt(head_dim), the output is the sum over j of weight_ij (v_j + u[clip(j - i)]). The
keys are checked against transformers' `Wav2Vec2BertSelfAttention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Choices, Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError
from hf_posenc.positions import Geometry, Positions

RELATIVE = ("keys", "keys_and_values")


class ShawEncoding(Encoding):
    """Rows by distance, met by queries and, if asked for, added to values; zero at the start, which changes nothing.

    Parameters: `weight`, and with relative values `values`, (left + right + 1, head_dim) each.
    """

    def __init__(self, config: Shaw, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        self.bias_settles_at = config.left
        rows = config.left + config.right + 1
        self.weight = nn.Parameter(torch.zeros(rows, geometry.head_dim))
        if config.relative == "keys_and_values":
            self.values = nn.Parameter(torch.zeros(rows, geometry.head_dim))

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (b, h, q, k), float32 (float64 for float64 queries). The query comes scaled, and so the bias is."""
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        rows = query.to(dtype) @ self.weight.to(dtype).T  # (b, h, q, rows)
        return rows.gather(-1, self._rows(positions).expand(*rows.shape[:2], -1, -1))

    def output_bias(self, weights: Tensor, positions: Positions) -> Tensor | None:
        """Return the rows of `values` in the proportion that the weights give their distances: (b, h, q, d), or None.

        Computed in float32 (float64 for float64 weights): first how much weight each row has, then the product.
        """
        if self.config.relative == "keys":
            return None
        dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
        table, weights = self.values.to(dtype), weights.to(dtype)
        shares = weights.new_zeros(*weights.shape[:3], len(table))
        return shares.scatter_add(-1, self._rows(positions).expand_as(weights), weights) @ table

    def overrides(self, hook: str) -> bool:
        """Tell whether this encoding gives `hook` a meaning of its own; `output_bias` only with relative values."""
        return super().overrides(hook) and (hook != "output_bias" or self.config.relative == "keys_and_values")

    def _rows(self, positions: Positions) -> Tensor:
        """Return the row of every query and key, (1|b, 1, q, k)."""
        left, right = self.config.left, self.config.right
        return ((-positions.distance()).clamp(-left, right) + left)[:, None]

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"left={self.config.left}, right={self.config.right}, relative={self.config.relative}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Shaw(EncodingConfig):
    """Relative keys, or keys and values, by clipped distance; heads share the tables.

    A table's row `left + j - i` is the one of query i and key j, as in wav2vec2_bert's `distance_embedding`.

    Attributes:
        left: tokens behind the query that are told apart, >= 0; farther keys share a row.
        right: tokens ahead, >= 0; a causal model never meets them.
        relative: what distances speak in: `keys` (the scores alone, as in BERT and wav2vec2_bert), or
            `keys_and_values`, as published: the output as well. The latter computes its attention weights itself,
            which costs the speed and the memory of eager attention. The paper found no loss without values.
        per_layer: a table for every layer, as published, or one for all.
    """

    left: int = 16
    right: int = 16
    relative: str = "keys"
    per_layer: bool = True

    name: ClassVar[str] = "shaw"
    label: ClassVar[str] = "Shaw"
    module: ClassVar[type[Encoding]] = ShawEncoding
    choices: ClassVar[Choices] = {"relative": RELATIVE}

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        for field in ("left", "right"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"Shaw.{field} must be an integer >= 0, was: {value!r}")
