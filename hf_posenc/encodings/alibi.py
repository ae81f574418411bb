"""ALiBi: a penalty on the scores that grows linearly with distance.

Press et al. 2022, "Train Short, Test Long", section 3. Checked against the authors' slopes and the ones that BLOOM and
MPT use. The relative form -m|i-j| is built, never slope times key index: the latter leans on softmax's shift invariance
and loses it in bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.config import Encoding, EncodingConfig, register_encoding
from hf_posenc.positions import Geometry, Positions


def slopes(num_heads: int) -> list[float]:
    """Return the slope of every head, float64.

    For a power of two, head h of H has 2^(-8(h+1)/H). Otherwise the largest power of two P below H gives the first P
    slopes, and every second slope of 2P, starting with the first, gives the rest (Press et al., reference code).
    """
    power = 2 ** math.floor(math.log2(num_heads))
    main = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    if power == num_heads:
        return main
    return main + slopes(2 * power)[0::2][: num_heads - power]


class AlibiEncoding(Encoding):
    """Bias of -slope * |query position - key position|, per query head."""

    def __init__(self, config: Alibi, geometry: Geometry) -> None:
        super().__init__()
        self.slopes = slopes(geometry.num_attention_heads)

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (1|b, h, q, k), float32 (float64 for float64 queries), zero on the diagonal and negative elsewhere.

        The magnitude is symmetric: in an encoder a key ahead costs what one as far behind costs.
        """
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        slope = torch.tensor(self.slopes, dtype=dtype, device=query.device)
        distance = positions.distance().abs().to(dtype)  # (b, q, k)
        return -slope[None, :, None, None] * distance[:, None]

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"heads={len(self.slopes)}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Alibi(EncodingConfig):
    """Attention with linear biases; causal or symmetric, as the model is."""

    name: ClassVar[str] = "alibi"
    label: ClassVar[str] = "Alibi"
    module: ClassVar[type[Encoding]] = AlibiEncoding
