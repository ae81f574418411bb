"""DroPE: a rotary model without its rotation, recalibrated at its trained length and sharpened for longer texts.

Gelberg et al. 2025, "DroPE" (arXiv 2512.12167), section 5 and appendix C.2; checked against the authors' attention
module. Needs training, at the length of the model, after the patch. The normalisation of queries and keys that the
authors add for high learning rates is a change of the model, not of its positions, and not part of this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.config import Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from hf_posenc.positions import Geometry
from hf_posenc.scaling import is_number


class DroPEEncoding(Encoding):
    """No positions, and scores times 1 + coefficient * ln(factor)."""

    def __init__(self, config: DroPE, geometry: Geometry) -> None:
        super().__init__()
        self.sharpness = 1 + config.coefficient * math.log(config.factor)

    def temperature(self, position_ids: Tensor) -> Tensor:
        """Return the factor on the scores of every query: (b, n) -> (1, 1, n) float32."""
        return torch.full((1, 1, position_ids.shape[-1]), self.sharpness, device=position_ids.device)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"sharpness={self.sharpness:.6g}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class DroPE(EncodingConfig):
    """No positions, with a temperature for texts longer than the trained length; causal models only.

    Attributes:
        factor: length of the texts over the trained length, >= 1; neutral value 1, which is right while training.
        coefficient: sharpening per e-fold of length, >= 0. The authors fitted 0.412 to their 494M model and 0.103 to
            SmolLM: fit it on held-out text where the factor is not 1.
    """

    factor: float = 1.0
    coefficient: float = 0.103

    name: ClassVar[str] = "drope"
    label: ClassVar[str] = "DroPE"
    module: ClassVar[type[Encoding]] = DroPEEncoding

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        if not (is_number(self.factor) and self.factor >= 1):
            raise ConfigError(f"DroPE.factor must be a number of at least 1, was: {self.factor!r}")
        if not (is_number(self.coefficient) and self.coefficient >= 0):
            raise ConfigError(f"DroPE.coefficient must be a number of at least 0, was: {self.coefficient!r}")

    def check(self, geometry: Geometry) -> None:
        """Raise UnsupportedEncodingError for a model that is not causal."""
        if not geometry.causal:
            raise UnsupportedEncodingError(
                "DroPE is for causal models only: order reaches a model without positions through its causal mask, and "
                "an encoder would see a bag of words."
            )
