"""FIRE: a small network maps the distance, relative to how far the text has come, to a bias per head.

Li et al. 2024, "Functional Interpolation for Relative Positions Improves Long Context Transformers", equations 5-8:
f(psi(i - j) / psi(max(i, L))) with psi(x) = log(c x + 1), a trained c, a trained multiple of a threshold length L, and
f of one hidden ReLU layer. Checked against the code of DAPE (chuanyang-Zheng/DAPE).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Choices, Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from hf_posenc.positions import Geometry, Positions

THRESHOLDS = ("half_length", "length")
COUNTS = ("from_zero", "from_one")
EPS = 1e-6
"""Added to the denominator, as in the reference: the first query divides by psi(0) where the threshold is 0."""


class FIREEncoding(Encoding):
    """Bias by an interpolated function of the distance; its last layer is zero at the start, so it changes nothing."""

    def __init__(self, config: FIRE, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        length = config.original_max_position_embeddings or geometry.max_position_embeddings
        self.threshold = length // 2 if config.threshold == "half_length" else length
        self.c = nn.Parameter(torch.tensor(0.1))
        self.length_multiplier = nn.Parameter(torch.tensor(1.0))
        self.hidden = nn.Linear(1, config.width)
        self.output = nn.Linear(config.width, geometry.num_attention_heads)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (1|b, h, q, k), float32 (float64 for float64 queries); keys ahead count as being as far behind."""
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        c = self.c.to(dtype)
        come = positions.query.to(dtype) + (1 if self.config.count == "from_one" else 0)
        far = torch.maximum(come, (self.length_multiplier.to(dtype) * self.threshold).abs())
        scale = torch.log1p((c * far).abs()) + EPS  # (1|b, q)
        x = torch.log1p((c * positions.distance().to(dtype)).abs()) / scale[..., None]  # (1|b, q, k)
        slopes, heights, outputs = self.units(x.detach().max() if x.numel() else c)
        bent = torch.addcmul(heights[:, None], slopes[:, None], x.flatten()).relu_()  # (units, b q k)
        scores: Tensor = outputs @ bent
        return scores.view(-1, *x.shape).transpose(0, 1)

    def units(self, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the network from 0 to the largest argument there is: f(x) = outputs . relu(slopes x + heights).

        Units without a kink in there are a straight line or nothing, so that one unit stands for all of them: what a
        score costs depends on how many bend. Gradients are those of the network.

        Returns:
            Slopes and heights, (units,) each, and outputs, (h, units), in the dtype of `largest`. The first two units
            are the constant and x itself.
        """
        dtype = largest.dtype
        w, b = self.hidden.weight.to(dtype)[:, 0], self.hidden.bias.to(dtype)
        out, offset = self.output.weight.to(dtype), self.output.bias.to(dtype)
        constant = w.new_tensor([0.0, 1.0])
        if torch.compiler.is_compiling():  # a graph cannot look at the numbers
            straight = torch.stack((offset, torch.zeros_like(offset)), dim=1)
            return torch.cat((constant, w)), torch.cat((constant.flip(0), b)), torch.cat((straight, out), dim=1)
        with torch.no_grad():
            ends = b, w * largest + b
            bent = ends[0] * ends[1] < 0
            on = ~bent & (ends[0] + ends[1] > 0)
        straight = torch.stack((out[:, on] @ b[on] + offset, out[:, on] @ w[on]), dim=1)
        slopes, heights = torch.cat((constant, w[bent])), torch.cat((constant.flip(0), b[bent]))
        return slopes, heights, torch.cat((straight, out[:, bent]), dim=1)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"threshold={self.threshold}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class FIRE(EncodingConfig):
    """Functional interpolation for relative positions; for causal models only.

    Attributes:
        original_max_position_embeddings: length in tokens that the threshold is taken from, >= 2; None takes the length
            of the model.
        threshold: up to which query the denominator stays, before training moves it: `half_length`, as in the reference
            code, or `length`.
        count: position of the first query in the denominator: `from_zero`, as in the reference code, or `from_one`.
        width: units of the hidden layer, >= 1; 32 in the paper.
        per_layer: a network of its own for every layer, instead of one for all, as the paper allows both. Neutral
            value: False.
    """

    original_max_position_embeddings: int | None = None
    threshold: str = "half_length"
    count: str = "from_zero"
    width: int = 32
    per_layer: bool = False

    name: ClassVar[str] = "fire"
    label: ClassVar[str] = "FIRE"
    module: ClassVar[type[Encoding]] = FIREEncoding
    choices: ClassVar[Choices] = {"threshold": THRESHOLDS, "count": COUNTS}

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        for field, least in (("original_max_position_embeddings", 2), ("width", 1)):
            value = getattr(self, field)
            optional = value is None and field != "width"
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"FIRE.{field} must be an integer >= {least}, was: {value!r}")

    def check(self, geometry: Geometry) -> None:
        """Raise UnsupportedEncodingError for a model that is not causal."""
        if not geometry.causal:
            raise UnsupportedEncodingError(
                "FIRE was asked for on a bidirectional model: it divides by how far the text has come at the query, "
                "which says nothing of keys ahead. Choose t5 or kerple, which have a form for both sides."
            )

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> FIRE:
        """Record the model's own length where none was given."""
        length = self.original_max_position_embeddings or geometry.max_position_embeddings
        filled = super().for_model(geometry, rope_parameters)
        return dataclasses.replace(filled, original_max_position_embeddings=length)
