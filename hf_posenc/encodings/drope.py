"""DroPE: a rotary model without its rotation, recalibrated at its trained length and sharpened for longer texts.

Gelberg et al. 2025, "DroPE" (arXiv 2512.12167), section 5 and appendix C.2; checked against the authors' attention
module. Needs training, at the length of the model, after the patch. For learning rates of about 1e-3 the authors
normalise queries and keys as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Choices, Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from hf_posenc.positions import Geometry, working_dtype
from hf_posenc.scaling import is_number

NORMALIZATIONS = ("none", "all_heads", "per_head")
EPS = 1e-6
"""Added to the mean square that states are divided by."""


class DroPEEncoding(Encoding):
    """No positions, scores times 1 + coefficient * ln(factor), and queries and keys normalised if that is asked for.

    Parameters, where they are: `query_weight` and `key_weight`, (heads, 1, head_dim), or (head_dim,) for `per_head`.
    """

    def __init__(self, config: DroPE, geometry: Geometry) -> None:
        super().__init__()
        self.sharpness = 1 + config.coefficient * math.log(config.factor)
        self.normalization = config.normalization
        if self.normalization != "none":
            together, dim = self.normalization == "all_heads", geometry.head_dim
            heads, shared = geometry.num_attention_heads, geometry.num_key_value_heads
            self.query_weight = nn.Parameter(torch.ones((heads, 1, dim) if together else dim))
            self.key_weight = nn.Parameter(torch.ones((shared, 1, dim) if together else dim))

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Normalise queries, whatever their position: (b, h, n, d) -> (b, h, n, d)."""
        return states if self.normalization == "none" else self._normalized(states, self.query_weight)

    def rotate_key(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Normalise keys, whatever their position: (b, h_kv, n, d) -> (b, h_kv, n, d)."""
        return states if self.normalization == "none" else self._normalized(states, self.key_weight)

    def overrides(self, hook: str) -> bool:
        """Tell whether this encoding gives `hook` a meaning of its own; it rotates only in order to normalise."""
        return super().overrides(hook) and (self.normalization != "none" or not hook.startswith("rotate"))

    def _normalized(self, states: Tensor, weight: Tensor) -> Tensor:
        wide = states.to(working_dtype(states))
        over = (1, 3) if self.normalization == "all_heads" else (3,)
        wide = wide * (wide.square().mean(over, keepdim=True) + EPS).rsqrt()
        return (wide * weight).to(states.dtype)

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
        normalization: of queries and keys before they meet: `none` (neutral); `all_heads`, as in the authors' code:
            divided by the root mean square over all heads of a token together, and multiplied by trained weights that
            start at 1; or `per_head`: each head by its own. For rotary models only; needs training.
    """

    factor: float = 1.0
    coefficient: float = 0.103
    normalization: str = "none"

    name: ClassVar[str] = "drope"
    label: ClassVar[str] = "DroPE"
    module: ClassVar[type[Encoding]] = DroPEEncoding
    choices: ClassVar[Choices] = {"normalization": NORMALIZATIONS}

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        if not (is_number(self.factor) and self.factor >= 1):
            raise ConfigError(f"DroPE.factor must be a number of at least 1, was: {self.factor!r}")
        if not (is_number(self.coefficient) and self.coefficient >= 0):
            raise ConfigError(f"DroPE.coefficient must be a number of at least 0, was: {self.coefficient!r}")

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> DroPE:
        """Return this config; raises UnsupportedEncodingError where a model without rotation is to be normalised."""
        if self.normalization != "none" and rope_parameters is None:
            raise UnsupportedEncodingError(
                f"DroPE(normalization={self.normalization!r}) is for rotary models: without a rotation, queries may "
                "come scaled already, which normalising would undo. Choose normalization='none'."
            )
        return super().for_model(geometry, rope_parameters)

    def check(self, geometry: Geometry) -> None:
        """Raise UnsupportedEncodingError for a model that is not causal."""
        if not geometry.causal:
            raise UnsupportedEncodingError(
                "DroPE is for causal models only: order reaches a model without positions through its causal mask, and "
                "an encoder would see a bag of words."
            )
