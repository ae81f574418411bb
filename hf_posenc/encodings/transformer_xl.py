"""Transformer-XL's relative positions: content and place of a key, each met by the query and by a learned bias.

Dai et al. 2019, "Transformer-XL", section 3.3: the score is (q_i + u) . k_j + (q_i + v) . W_r R[i - j], divided by
sqrt(head_dim), with sinusoidal rows R. Checked against transformers' `XLNetRelativeAttention`, whose shift of a matrix
by rows is here a look-up by distance, which holds for positions in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError
from hf_posenc.positions import Geometry, Positions


class TransformerXLEncoding(Encoding):
    """Bias of u . k and (q + v) . W_r R; u and W_r are zero at the start, so that it changes nothing.

    Parameters: `content_bias` u and `position_bias` v, (heads, head_dim); `projection` W_r, (heads, head_dim, hidden).
    """

    def __init__(self, config: TransformerXL, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        self.one_sided = geometry.causal
        heads, dim, width = geometry.num_attention_heads, geometry.head_dim, geometry.hidden_size
        self.scaling: float = dim**-0.5
        self.inv_freq = [10000.0 ** (-2 * k / width) for k in range(width // 2)]
        self.content_bias = nn.Parameter(torch.zeros(heads, dim))
        self.position_bias = nn.Parameter(0.02 * torch.randn(heads, dim))
        self.projection = nn.Parameter(torch.zeros(heads, dim, width))

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (b, h, q, k), float32 (float64 for float64 queries); keys ahead of a causal query count as distance 0.

        The query comes scaled by the model; u and v are scaled by 1/sqrt(head_dim).
        """
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        u, v, w = (p.to(dtype) for p in (self.content_bias, self.position_bias, self.projection))
        distance = positions.distance()
        distance = distance.clamp(min=0) if self.one_sided else distance
        if self.config.clamp_length is not None:
            distance = distance.clamp(-self.config.clamp_length, self.config.clamp_length)
        met, index = _distinct(distance)
        phases = met.double()[:, None] * torch.tensor(self.inv_freq, dtype=torch.float64, device=query.device)
        waves = torch.cat((phases.sin(), phases.cos()), dim=-1).to(dtype)  # (r, hidden_size)
        asked = query.to(dtype) + self.scaling * v[:, None]
        few = query.shape[0] * query.shape[2] < v.shape[1]
        rows = asked @ w @ waves.T if few else asked @ (w @ waves.T)  # (b, h, q, r), by whichever way is shorter
        places = rows.gather(-1, index[:, None].expand(*rows.shape[:2], -1, -1))
        heads = key.to(dtype).repeat_interleave(len(u) // key.shape[1], dim=1)  # (b, h, k, d)
        return places + self.scaling * torch.einsum("hd,bhkd->bhk", u, heads)[:, :, None]

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"heads={len(self.content_bias)}, clamp_length={self.config.clamp_length}"


def _distinct(distance: Tensor) -> tuple[Tensor, Tensor]:
    """Return distances (r,), each at least once, and where in them each entry of (b, q, k) stands."""
    lowest, highest = (int(end) for end in distance.aminmax())
    if highest - lowest < 4 * sum(distance.shape[1:]):
        return torch.arange(lowest, highest + 1, device=distance.device), distance - lowest
    met, index = distance.unique(return_inverse=True)  # positions with gaps; sorting costs more than a few rows
    return met, index


@register_encoding
@dataclass(frozen=True, kw_only=True)
class TransformerXL(EncodingConfig):
    """Relative positions of Transformer-XL; for decoders, and for encoders, where keys ahead have negative distances.

    Attributes:
        clamp_length: distances beyond this many tokens count as this one; None (neutral) tells all of them apart.
        per_layer: u, v and W_r of its own for every layer, or one set for all; published with W_r by layer and the
            rest for all.
    """

    clamp_length: int | None = None
    per_layer: bool = True

    name: ClassVar[str] = "transformer_xl"
    label: ClassVar[str] = "TransformerXL"
    module: ClassVar[type[Encoding]] = TransformerXLEncoding

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        clamp = self.clamp_length
        if clamp is not None and (isinstance(clamp, bool) or not isinstance(clamp, int) or clamp < 1):
            raise ConfigError(f"TransformerXL.clamp_length must be a positive integer or None, was: {clamp!r}")

    def check(self, geometry: Geometry) -> None:
        """Raise ConfigError where sines and cosines do not share the width evenly."""
        if geometry.hidden_size % 2:
            raise ConfigError(f"TransformerXL needs an even hidden_size, the model's is {geometry.hidden_size}")
