"""KERPLE: a learned penalty on the scores that is logarithmic in the distance, or a power of it.

Chi et al. 2022, "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation", the two conditionally
positive definite kernels of section 4: -r1 * log(1 + r2 * d) and -r1 * d^r2, d the distance in tokens. Checked against
the authors' `ParallelKerpleLog` and `ParallelKerplePower`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Choices, Encoding, EncodingConfig, register_encoding
from hf_posenc.positions import Geometry

KERNELS = ("log", "power")
PARAMETRIZATIONS = ("softplus", "clamp")
SMALLEST = 0.01
"""Floor of both parameters in the reference code, which draws them from (0, 1) and (0, 2)."""
LARGEST_POWER = 2.0
"""Above it the power kernel is no longer conditionally positive definite."""


class KerpleEncoding(Encoding):
    """Bias with two positive numbers per head, kept as `raw`, (2, heads)."""

    def __init__(self, config: Kerple, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        start = torch.rand(2, geometry.num_attention_heads)
        start[0 if config.kernel == "log" else 1] *= 2
        start = start.clamp(min=SMALLEST)
        # the number whose softplus is x: x + log(1 - exp(-x))
        self.raw = nn.Parameter(start if config.parametrization == "clamp" else start + torch.log(-torch.expm1(-start)))

    def parameters_by_head(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return r1 and r2, (h,) each: r1 > 0, r2 > 0, and r2 <= 2 for the power kernel."""
        raw = self.raw.to(dtype)
        if self.config.parametrization == "softplus":
            r1, r2 = nn.functional.softplus(raw)
            return r1, r2 if self.config.kernel == "log" else _passing(r2, r2.clamp(max=LARGEST_POWER))
        r1, r2 = _passing(raw, raw.clamp(min=SMALLEST))
        return r1, r2 if self.config.kernel == "log" else _passing(r2, r2.clamp(max=LARGEST_POWER))

    def distance_bias(self, distance: Tensor) -> Tensor:
        """Return (n,) -> (h, n), zero at no distance and negative elsewhere.

        The magnitude is symmetric: in an encoder a key ahead costs what one as far behind costs.
        """
        r1, r2 = (number[:, None] for number in self.parameters_by_head(distance.dtype))
        if self.config.kernel == "log":
            return -r1 * torch.log1p(r2 * distance.abs())
        return -r1 * distance.abs().pow(r2)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"kernel={self.config.kernel}, heads={self.raw.shape[1]}"


def _passing(value: Tensor, bounded: Tensor) -> Tensor:
    """Return `bounded`, with the gradient of `value`: a number beyond its bound can come back."""
    return bounded.detach() + (value - value.detach())


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Kerple(EncodingConfig):
    """Kernelised relative positions; causal or symmetric, as the model is.

    It starts at random, as the reference does; the closer r1 is to 0, the less it changes.

    Attributes:
        kernel: `log`, the better one in the paper, or `power`.
        parametrization: how r1 and r2 stay positive. `softplus`: they are softplus of what is trained. `clamp`, as in
            the reference code: they are trained themselves and read as at least 0.01. The start is the same.
        per_layer: numbers of its own for every layer, as published, or one set for all.
    """

    kernel: str = "log"
    parametrization: str = "softplus"
    per_layer: bool = True

    name: ClassVar[str] = "kerple"
    label: ClassVar[str] = "Kerple"
    module: ClassVar[type[Encoding]] = KerpleEncoding
    choices: ClassVar[Choices] = {"kernel": KERNELS, "parametrization": PARAMETRIZATIONS}
