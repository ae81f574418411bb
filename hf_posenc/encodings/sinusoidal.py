"""Sinusoidal absolute positions, computed and not learned.

Vaswani et al. 2017, "Attention Is All You Need", section 3.5. Three incompatible column layouts are in use; weights
trained under one make no sense under another. Interpolation, as for learned tables: Zhu et al. 2024, "LongEmbed",
section 4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.config import Choices, Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError
from hf_posenc.positions import Geometry

LAYOUTS = ("interleaved", "concatenated", "tensor2tensor")


class SinusoidalEncoding(Encoding):
    """Adds sines and cosines of the position to the token embedding."""

    def __init__(self, config: Sinusoidal, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        pairs = geometry.hidden_size // 2
        # tensor2tensor spreads the wavelengths so that the last one is exactly theta * 2 pi
        steps = max(pairs - 1, 1) if config.layout == "tensor2tensor" else pairs
        self.frequencies = [config.theta ** (-k / steps) for k in range(pairs)]

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return (b, n, hidden_size) in float32; phases are taken in float64."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=position_ids.device)
        positions = position_ids[..., None].double() / self.config.interpolation_factor + self.config.start
        phases = positions * frequencies  # (b, n, hidden / 2)
        parts = (phases.sin(), phases.cos())
        table = torch.stack(parts, -1).flatten(-2) if self.config.layout == "interleaved" else torch.cat(parts, -1)
        return (table * self.config.scale).float()

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        given = (f"{name}={getattr(self.config, name)}" for name in ("layout", "theta", "scale", "start"))
        return f"{', '.join(given)}, factor={self.config.interpolation_factor}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Sinusoidal(EncodingConfig):
    """Sinusoidal absolute positions.

    Attributes:
        theta: base of the geometric progression of wavelengths, > 1. The paper has 10000.
        layout: column order: `interleaved` (sin, cos, sin, cos, ... as in the paper), `concatenated` (all sines, then
            all cosines, as in Marian and RoFormer) or `tensor2tensor` (concatenated, with exponent k / (d/2 - 1), as in
            fairseq, M2M100 and XGLM).
        scale: factor on the table, > 0; neutral value 1. A pretrained model whose token embeddings are small hears
            little else at 1, since the table's root mean square is 0.71.
        start: what the first position counts as, >= 0; neutral value 0. One more than the padding index for weights of
            M2M100 and NLLB, 2 for those of XGLM.
        interpolation_factor: positions are divided by it, > 0; for a model trained with sinusoids, the length asked for
            over the length trained. Neutral value: 1.
    """

    theta: float = 10000.0
    layout: str = "interleaved"
    scale: float = 1.0
    start: int = 0
    interpolation_factor: float = 1.0

    name: ClassVar[str] = "sinusoidal"
    label: ClassVar[str] = "Sinusoidal"
    module: ClassVar[type[Encoding]] = SinusoidalEncoding
    choices: ClassVar[Choices] = {"layout": LAYOUTS}

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        for field, least in (("theta", 1), ("scale", 0), ("interpolation_factor", 0)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < math.inf:
                raise ConfigError(f"Sinusoidal.{field} must be a finite number above {least}, was: {value!r}")
        if isinstance(self.start, bool) or not isinstance(self.start, int) or self.start < 0:
            raise ConfigError(f"Sinusoidal.start must be a whole number of at least 0, was: {self.start!r}")

    def check(self, geometry: Geometry) -> None:
        """Raise ConfigError where sines and cosines do not come in pairs."""
        if geometry.hidden_size % 2:
            raise ConfigError(f"sinusoidal positions need an even hidden_size, was: {geometry.hidden_size}")
