"""Sandwich: the inner products of sinusoidal positions, alone, as a bias.

Chi et al. 2023, "Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis", section 4.2:
(sum over k of cos(d * 10000^(-2k/w)) - w/2) * H / (8h) for the distance d and head h of H, counted from 1. Checked
against NVIDIA NeMo's `SandwichRelativePositionEmbedding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.config import Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError
from hf_posenc.positions import Geometry


class SandwichEncoding(Encoding):
    """Bias that falls about logarithmically with distance, at another rate in every head; nothing is trained."""

    def __init__(self, config: Sandwich, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        heads, pairs = geometry.num_attention_heads, config.width // 2
        first = config.first_index
        self.inv_freq = [10000.0 ** (-2 * k / config.width) for k in range(first, first + pairs)]
        self.slopes = [heads / (8.0 * head) for head in range(1, heads + 1)]

    def distance_bias(self, distance: Tensor) -> Tensor:
        """Return (n,) -> (h, n), zero at no distance and symmetric; phases in float64."""
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float64, device=distance.device)
        slope = torch.tensor(self.slopes, dtype=distance.dtype, device=distance.device)[:, None]
        total = (distance.double()[:, None] * inv_freq).cos().sum(-1) - self.config.width / 2
        return slope * total.to(distance.dtype)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"width={self.config.width}, heads={len(self.slopes)}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Sandwich(EncodingConfig):
    """Sinusoidal inner products as a bias; causal or symmetric, as the model is.

    Attributes:
        width: number of sines and cosines, even, >= 2; 128 in the paper, the width of a head in NeMo.
        first_index: the k of the first pair. 1, as in NeMo, or 0, which gives the first pair a wavelength of 2 pi.
    """

    width: int = 128
    first_index: int = 1

    name: ClassVar[str] = "sandwich"
    label: ClassVar[str] = "Sandwich"
    module: ClassVar[type[Encoding]] = SandwichEncoding

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        if isinstance(self.width, bool) or not isinstance(self.width, int) or self.width < 2 or self.width % 2:
            raise ConfigError(f"Sandwich.width must be an even integer >= 2, was: {self.width!r}")
        if isinstance(self.first_index, bool) or self.first_index not in (0, 1):
            raise ConfigError(f"Sandwich.first_index must be 0 or 1, was: {self.first_index!r}")
