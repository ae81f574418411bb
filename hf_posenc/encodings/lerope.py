"""LeRoPE: a rotation whose frequencies are trained.

No paper known; the form is that of transformers' `mistral_large4`: every frequency times exp(alpha). At the start alpha
is 0, and the rotation the plain one to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Encoding, register_encoding
from hf_posenc.positions import Geometry, working_dtype
from hf_posenc.rotation import RotaryConfig, turn


class LeRoPEEncoding(Encoding):
    """Rotates queries and keys by position times frequency times exp(alpha)."""

    def __init__(self, config: LeRoPE, geometry: Geometry) -> None:
        super().__init__()
        rotation: Any = config.rotation(geometry)
        self.pairing = config.pairing
        self.inv_freq, self.attention_factor = rotation.inv_freq, rotation.attention_factor
        self.alpha = nn.Parameter(torch.zeros(len(self.inv_freq)))

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate queries or keys: (b, h, n, d), (b, n) -> (b, h, n, d); phases in float64."""
        speed = torch.tensor(self.inv_freq, dtype=torch.float64, device=position_ids.device) * self.alpha.double().exp()
        phases = position_ids[:, None, :, None].double() * speed  # (b, 1, n, pairs)
        cos, sin = (part * self.attention_factor for part in (phases.cos(), phases.sin()))
        dtype = working_dtype(states)
        return turn(states, cos.to(dtype), sin.to(dtype), pairing=self.pairing)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"rotary_dim={2 * len(self.inv_freq)}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class LeRoPE(RotaryConfig):
    """Rotary position embedding with trained frequencies.

    Attributes:
        per_layer: frequencies of their own for every layer; neutral value False, one set for all.
    """

    per_layer: bool = False

    name: ClassVar[str] = "lerope"
    label: ClassVar[str] = "LeRoPE"
    module: ClassVar[type[Encoding]] = LeRoPEEncoding
