"""CABLE: every token adds its own cost, per head, to reaching back over it.

Veisi et al. 2025, "Context-aware Biases for Length Extrapolation" (2503.08067). Token l costs softplus(w . x_l + b);
the score of query i and key j is lowered by the sum of the costs over j < l <= i. Checked against the authors'
`Cable.py`. FoX is the same sum with the opposite sign before w and b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from hf_posenc.positions import Geometry, Positions


class CableEncoding(Encoding):
    """Bias of the summed costs of the tokens between key and query."""

    def __init__(self, config: Cable, geometry: Geometry) -> None:
        super().__init__()
        heads = geometry.num_attention_heads
        self.weight = nn.Parameter(torch.zeros(heads, geometry.hidden_size))
        self.offset = nn.Parameter(torch.empty(heads))
        if config.slopes is None:
            nn.init.constant_(self.offset, config.bias_init)
        else:
            with torch.no_grad():  # softplus of log(e^m - 1) is m
                self.offset.copy_(torch.tensor([m + math.log(-math.expm1(-m)) for m in config.slopes]))

    def gate(self, hidden_states: Tensor) -> Tensor:
        """Return minus the cost: (b, n, hidden_size) -> (b, h, n) float32 (float64 for float64 states)."""
        dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        cost = nn.functional.linear(hidden_states.to(dtype), self.weight.to(dtype), self.offset.to(dtype))
        return -nn.functional.softplus(cost).mT

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (b, h, q, k), float32 (float64 for float64 queries), zero on the diagonal and falling behind it.

        What stands for keys ahead is finite and means nothing. Summed in float64: the difference of two sums over many
        thousand tokens has to keep neighbours apart.
        """
        if positions.gates is None:
            raise UnsupportedEncodingError("Cable was asked for a bias without gates: this attention hands none over.")
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        total = positions.gates.double().cumsum(-1)  # (b, h, k)
        slots = positions.own_slots()[None, None].expand(*total.shape[:2], -1)
        return (total.gather(-1, slots)[..., None] - total[:, :, None]).to(dtype)


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Cable(EncodingConfig):
    """Costs that depend on the text; for causal models only.

    The weight w starts at 0: at first every token costs the same, as if by ALiBi.

    Attributes:
        bias_init: start of b in every head, no unit. The smaller, the less is lost: -5 lowers a score by 0.0067 per
            token. The reference starts from 0, by which every head loses 0.69 per token and sees a few tokens only.
            Neutral value: minus infinity, which could not be trained.
        slopes: one positive number per head, in score per token, that b starts from instead, so that the start equals
            ALiBi with these slopes; None starts from `bias_init`.
        per_layer: costs of its own for every layer, as published, or one set for all.
    """

    bias_init: float = -5.0
    slopes: tuple[float, ...] | None = None
    per_layer: bool = True

    name: ClassVar[str] = "cable"
    label: ClassVar[str] = "Cable"
    module: ClassVar[type[Encoding]] = CableEncoding

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        if isinstance(self.bias_init, bool) or not isinstance(self.bias_init, int | float):
            raise ConfigError(f"Cable.bias_init must be a number, was: {self.bias_init!r}")
        if not math.isfinite(self.bias_init):
            raise ConfigError(f"Cable.bias_init must be finite, or no cost could be trained, was: {self.bias_init!r}")
        if self.slopes is not None:
            numbers = isinstance(self.slopes, list | tuple) and all(isinstance(m, int | float) for m in self.slopes)
            if not numbers or not all(0 < m < math.inf for m in self.slopes):
                raise ConfigError(f"Cable.slopes must be positive numbers, in score per token, were: {self.slopes!r}")
            object.__setattr__(self, "slopes", tuple(float(m) for m in self.slopes))
        if not isinstance(self.per_layer, bool):
            raise ConfigError(f"Cable.per_layer must be True or False, was: {self.per_layer!r}")

    def check(self, geometry: Geometry) -> None:
        """Raise where the model is bidirectional, or has another number of heads than there are slopes."""
        if not geometry.causal:
            raise UnsupportedEncodingError(
                "CABLE was asked for on a bidirectional model: a token makes it harder to reach back over it, and says "
                "nothing of keys ahead. Choose alibi or kerple, which are symmetric there."
            )
        if self.slopes is not None and len(self.slopes) != geometry.num_attention_heads:
            raise ConfigError(
                f"Cable.slopes has {len(self.slopes)} numbers, the model has {geometry.num_attention_heads} attention "
                "heads; give one for each head."
            )
