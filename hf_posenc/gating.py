"""What FoX and CABLE share: a number from every token, by which all scores that reach back over it are lowered.

With s = 1 (CABLE) or s = -1 (FoX) token l lowers them by softplus(s (w . x_l + b)) = -log sigmoid(-s (w . x_l + b)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Encoding, EncodingConfig
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from hf_posenc.positions import Geometry, Positions, working_dtype


class GatedEncoding(Encoding):
    """Bias of what the tokens between key and query lower a score by, in sum.

    Args:
        config: of the encoding.
        geometry: of the model.
    """

    def __init__(self, config: GatedConfig, geometry: Geometry) -> None:
        super().__init__()
        heads, self.sign = geometry.num_attention_heads, config.sign
        self.weight = nn.Parameter(torch.zeros(heads, geometry.hidden_size))
        self.offset = nn.Parameter(torch.full((heads,), float(config.bias_init)))
        if config.slopes is not None:
            with torch.no_grad():  # softplus of log(e^m - 1) is m
                self.offset.copy_(torch.tensor([self.sign * (m + math.log(-math.expm1(-m))) for m in config.slopes]))

    def gate(self, hidden_states: Tensor) -> Tensor:
        """Return what lowers scores beyond a token, below 0: (b, n, hidden_size) -> (b, h, n), float32 or float64."""
        dtype = working_dtype(hidden_states)
        wanted = nn.functional.linear(hidden_states.to(dtype), self.weight.to(dtype), self.offset.to(dtype))
        return nn.functional.logsigmoid(-self.sign * wanted).mT

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (b, h, q, k), float32 (float64 for float64 queries), zero on the diagonal and falling behind it.

        What stands for keys ahead is finite and means nothing. Summed in float64: the difference of two sums over many
        thousand tokens has to keep neighbours apart.
        """
        if positions.gates is None:
            raise UnsupportedEncodingError(f"{type(self).__name__} was asked for a bias without gates.")
        total = positions.gates.double().cumsum(-1)  # (b, h, k)
        slots = positions.own_slots()[None, None].expand(*total.shape[:2], -1)
        return (total.gather(-1, slots)[..., None] - total[:, :, None]).to(working_dtype(query))


@dataclass(frozen=True, kw_only=True)
class GatedConfig(EncodingConfig):
    """What the encodings that gate have in common; the weight w starts at 0, by which every token counts the same.

    Attributes:
        bias_init: start of b in every head, no unit.
        slopes: one positive number per head, in score per token, that b starts from instead, so that the start equals
            ALiBi with these slopes; None starts from `bias_init`.
        per_layer: gates of its own for every layer, as published, or one set for all.
    """

    bias_init: float
    slopes: tuple[float, ...] | None = None
    per_layer: bool = True

    module: ClassVar[type[Encoding]] = GatedEncoding
    sign: ClassVar[int]
    """1 where a larger w . x + b lowers scores more, -1 where it lowers them less."""

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        if isinstance(self.bias_init, bool) or not isinstance(self.bias_init, int | float):
            raise ConfigError(f"{self.label}.bias_init must be a number, was: {self.bias_init!r}")
        if not math.isfinite(self.bias_init):
            raise ConfigError(
                f"{self.label}.bias_init must be finite, or nothing could be trained, was: {self.bias_init!r}"
            )
        if self.slopes is not None:
            numbers = isinstance(self.slopes, list | tuple) and all(isinstance(m, int | float) for m in self.slopes)
            if not numbers or not all(0 < m < math.inf for m in self.slopes):
                raise ConfigError(
                    f"{self.label}.slopes must be positive numbers, in score per token, were: {self.slopes!r}"
                )
            object.__setattr__(self, "slopes", tuple(float(m) for m in self.slopes))

    def check(self, geometry: Geometry) -> None:
        """Raise where the model is bidirectional, or has another number of heads than there are slopes."""
        if not geometry.causal:
            raise UnsupportedEncodingError(
                f"{self.label} was asked for on a bidirectional model: it lowers scores over what came before, and "
                "says nothing of keys ahead. Choose alibi or kerple, which are symmetric there."
            )
        if self.slopes is not None and len(self.slopes) != geometry.num_attention_heads:
            raise ConfigError(
                f"{self.label}.slopes has {len(self.slopes)} numbers, the model has {geometry.num_attention_heads} "
                "attention heads; give one for each head."
            )
