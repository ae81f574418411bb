"""ALiBi: a penalty on the scores that grows linearly with distance.

Press et al. 2022, "Train Short, Test Long", section 3. Checked against the authors' slopes and the ones that BLOOM and
MPT use. The relative form -m|i-j| is built by default, and not slope times key index: the latter leans on softmax's
shift invariance and loses it in bfloat16. It exists for parity with models that were trained so. Both sides apart:
ofirpress/attention_with_linear_biases, issue 5. Interpolation: Al-Khateeb et al. 2023, "Position Interpolation Improves
ALiBi Extrapolation".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Choices, Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from hf_posenc.positions import Geometry, Positions, working_dtype

SIDES = ("symmetric", "split")
FORMS = ("relative", "bloom", "mpt", "falcon")


def slopes(num_heads: int, bias_max: float = 8.0) -> list[float]:
    """Return the slope of every head, float64.

    For a power of two, head h of H has 2^(-bias_max(h+1)/H). Otherwise the largest power of two P below H gives the
    first P slopes, and every second one of 2P, starting with the first, gives the rest (Press et al., reference code).
    """
    power = 2 ** math.floor(math.log2(num_heads))
    main = [2.0 ** (-bias_max * (head + 1) / power) for head in range(power)]
    if power == num_heads:
        return main
    return main + slopes(2 * power, bias_max)[0::2][: num_heads - power]


class AlibiEncoding(Encoding):
    """Bias of -slope * |query position - key position|, per query head.

    The slopes are numbers of the class's own, or the parameter `slopes`, (heads,), where they are trained.
    """

    def __init__(self, config: Alibi, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        self.heads = geometry.num_attention_heads
        self.causal = geometry.causal
        self.scaling: float = geometry.head_dim**-0.5
        self.split = config.sides == "split" and not geometry.causal
        if self.split:
            half = slopes(self.heads // 2, config.bias_max)
            start = half + half
        else:
            start = slopes(self.heads, config.bias_max)
        start = [slope / config.interpolation_factor for slope in start]
        self.slopes = nn.Parameter(torch.tensor(start)) if config.trainable else start

    def overrides(self, hook: str) -> bool:
        """Tell whether `hook` has a meaning; a bias of the distance alone is that of the relative form only."""
        return super().overrides(hook) and (hook != "distance_bias" or self.config.form == "relative")

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor | None:
        """Return (1|b, h, q, k), float32 (float64 for float64 queries); (1|b, h, 1, k) in the parity forms."""
        if self.config.form == "relative":
            return super().bias(query, key, positions)
        slope = torch.as_tensor(self.slopes, dtype=working_dtype(query), device=query.device)[None, :, None, None]
        return self.by_key(slope, positions.key[:, None, None])

    def distance_bias(self, distance: Tensor) -> Tensor | None:
        """Return (h, n) for the relative form, None for the parity forms: zero at no distance and negative elsewhere.

        In an encoder a key ahead costs what one as far behind costs, or, with sides apart, is out of reach of the first
        half of the heads, as what lies behind is of the second.
        """
        if self.config.form != "relative":
            return None
        slope = torch.as_tensor(self.slopes, dtype=distance.dtype, device=distance.device)[:, None]
        penalty = -slope * distance.abs()
        if not self.split:
            return penalty
        side = torch.ones_like(slope)
        side[self.heads // 2 :] = -1
        return penalty.masked_fill(distance * side < 0, torch.finfo(torch.float32).min)

    def separable_slopes(self) -> Tensor | None:
        """Return the slopes, (h,) float32; None in an encoder, and for the form of Falcon, which rounds products."""
        if not self.causal or self.config.form == "falcon":
            return None
        return torch.as_tensor(self.slopes, dtype=torch.float32)

    def by_key(self, slope: Tensor, place: Tensor) -> Tensor:
        """Return the bias of the key alone, (1|b, h, 1, k), for (1, h, 1, 1) slopes and (1|b, 1, 1, k) positions."""
        if self.config.form == "falcon":
            return (slope.bfloat16() * place).to(slope.dtype) * self.scaling
        if self.config.form == "mpt":
            place = place - place.amax(-1, keepdim=True)
        return slope * place

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"heads={self.heads}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Alibi(EncodingConfig):
    """Attention with linear biases; causal, or two-sided in an encoder.

    Attributes:
        sides: what an encoder's heads see. `symmetric`: both sides, told apart by nothing. `split`: the first half of
            the heads sees the query and what is behind it, the second half the query and what is ahead, with the same
            slopes. A causal model has one side only and takes `symmetric`.
        interpolation_factor: the slopes are divided by it, as if positions were that much closer, > 0; for a model
            trained with ALiBi, the length asked for over the length trained. Neutral value: 1.
        bias_max: minus the binary logarithm of the smallest slope, for a power of two of heads, > 0; MPT's
            `alibi_bias_max`. Neutral value: 8.
        form: `relative` (neutral); `bloom`, slope times key position; `mpt`, slope times key position less the last
            one; or `falcon`, BLOOM's with slopes and products rounded to bfloat16 and divided by sqrt(head_dim). The
            last three are for parity with these models and lose precision in long texts.
        trainable: let the slopes be trained, each with its own value per head. Neutral value: False.
        per_layer: with trained slopes, a set for every layer instead of one for all. Neutral value: False.
    """

    sides: str = "symmetric"
    interpolation_factor: float = 1.0
    bias_max: float = 8.0
    form: str = "relative"
    trainable: bool = False
    per_layer: bool = False

    name: ClassVar[str] = "alibi"
    label: ClassVar[str] = "Alibi"
    module: ClassVar[type[Encoding]] = AlibiEncoding
    choices: ClassVar[Choices] = {"sides": SIDES, "form": FORMS}

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        for field in ("interpolation_factor", "bias_max"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"Alibi.{field} must be a finite number > 0, was: {value!r}")
        if self.per_layer and not self.trainable:
            raise ConfigError("Alibi(per_layer=True) has nothing of a layer's own without trainable=True")
        if self.form == "falcon" and self.trainable:
            raise ConfigError("Alibi(form='falcon') rounds its slopes to bfloat16, so they cannot be trained")

    def check(self, geometry: Geometry) -> None:
        """Raise where the form or the sides asked for do not exist in a model of that geometry."""
        if self.form != "relative" and not geometry.causal:
            raise UnsupportedEncodingError(
                f"Alibi(form={self.form!r}) on a bidirectional model would pull every query to the last key: a bias "
                "of the key alone stands for a distance only where no key is ahead. Choose form='relative'."
            )
        if self.sides == "split" and geometry.causal:
            raise ConfigError("Alibi(sides='split') on a causal model would leave half of the heads without any key.")
        if self.sides == "split" and geometry.num_attention_heads % 2:
            raise ConfigError(
                f"Alibi(sides='split') needs an even number of heads, the model has {geometry.num_attention_heads}"
            )
