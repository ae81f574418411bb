"""Temperatures: a factor on all scores of a query, which may depend on the head and on the query's position.

With a temperature t the weights of query i are softmax over j of t_i (q_i . k_j / sqrt(head_dim) + bias_ij): what an
encoding adds is scaled with the product, whether or not it reads the query, and sees the query as it is.

- `constant`, `per_head`: Wang et al. 2024, "Length Generalization of Causal Transformers without Position Encoding".
- `log_n`: Su 2021 (kexue.fm 8823); Chiang and Cholak 2022, "Overcoming a Theoretical Limitation of Self-Attention".
- `ssmax`, `ssmax_paper`: Nakanishi 2025, "Scalable-Softmax Is Superior for Attention".
- `llama4`, `ministral3`, `inkling`, `beam`: checked against transformers' modules of these models.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_posenc.errors import ConfigError, did_you_mean
from hf_posenc.positions import Geometry
from hf_posenc.scaling import is_number

SCALES: dict[str, float | None] = {
    "constant": 1.0,
    "per_head": 1.0,
    "log_n": 1.0,
    "ssmax": 0.0,
    "ssmax_paper": None,
    "llama4": 0.1,
    "ministral3": 0.1,
    "inkling": 0.1,
    "beam": 0.1,
}
"""Kind -> its scale where none is given; None is 1 / ln(length), with which a text of that length is left as it is."""
TRAINED = ("per_head", "ssmax", "ssmax_paper")


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """A temperature. p is a query's position, n the number of keys that it sees, L the length.

    Attributes:
        kind: the factor on the scores.
            `constant`: scale.
            `per_head`: trained, starts at scale. The authors train it alone, in steps of 0.05 to 0.1.
            `log_n`: max(1, ln n / ln L); no scale.
            `ssmax`: trained scale times ln n plus a trained offset that starts at 1; nothing changes at the start.
            `ssmax_paper`: trained scale times ln n.
            `llama4`: 1 + scale ln(1 + floor((p + 1) / L)).
            `ministral3`: 1 + scale ln(1 + floor(p / L)).
            `inkling`: 1 + scale ln max(1, (p + 1) / L).
            `beam`: (1 + (p + 1) / L)^scale.
        scale: >= 0; None takes 1 for `constant` and `per_head`, 0 for `ssmax`, 1 / ln L for `ssmax_paper`, where a text
            of the trained length is left as it is, and 0.1 for the last four.
        length: L in tokens, >= 2; None takes the trained length (512 was the base of the first log-n models, 8192 is
            that of Llama 4, 2048 that of Beam).
        per_layer: trained numbers of their own for every layer, as published; then whatever else the encoding trains
            is each layer's own as well. Neutral value: False.
    """

    kind: str
    scale: float | None = None
    length: int | None = None
    per_layer: bool = False

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        if self.kind not in SCALES:
            raise ConfigError(f"unknown Temperature.kind {self.kind!r}; {did_you_mean(str(self.kind), SCALES)}")
        scale, length = self.scale, self.length
        if scale is not None and not (is_number(scale) and scale >= 0):
            raise ConfigError(f"Temperature.scale must be a number of at least 0, or None, was: {scale!r}")
        if self.kind == "log_n" and scale not in (None, 1.0):
            raise ConfigError(f"Temperature(kind='log_n') has no scale, was: {scale!r}")
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 2):
            raise ConfigError(f"Temperature.length must be at least 2 tokens, or None, was: {length!r}")
        if not isinstance(self.per_layer, bool):
            raise ConfigError(f"Temperature.per_layer must be True or False, was: {self.per_layer!r}")

    @classmethod
    def read(cls, given: object) -> Temperature | None:
        """Return what a config was given as its temperature: one, None, or the plain form `{"kind": "log_n"}`.

        Raises:
            ConfigError: it is neither, or has an unknown field.
        """
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"a temperature must be a Temperature or its spec, {{'kind': 'log_n'}}, was: {given!r}")
        known = [field.name for field in dataclasses.fields(cls)]
        for key in given:
            if key not in known:
                raise ConfigError(f"a temperature has no field {key!r}; {did_you_mean(str(key), known)}")
        if "kind" not in given:
            raise ConfigError(f"a temperature needs a 'kind', one of {', '.join(SCALES)}, was: {given!r}")
        return cls(**given)

    def for_model(self, geometry: Geometry) -> Temperature:
        """Return this with length and scale filled in; raises ConfigError where a length has no logarithm."""
        length = self.length or geometry.max_position_embeddings
        if length < 2:
            raise ConfigError("a temperature needs a length of at least 2 tokens; the model has 1, so give one")
        scale = SCALES[self.kind] if self.scale is None else self.scale
        return dataclasses.replace(self, length=length, scale=1 / math.log(length) if scale is None else scale)


class Tempering(nn.Module):
    """Gives the factor of every query.

    Parameters, where they are trained: `scale`, and for `ssmax` `offset`, (heads,) each.

    Args:
        config: what to compute.
        geometry: of the model.
    """

    def __init__(self, config: Temperature, geometry: Geometry) -> None:
        super().__init__()
        config = config.for_model(geometry)
        self.kind, self.causal = config.kind, geometry.causal
        self.length, self.start = config.length or 0, config.scale or 0.0
        if self.kind in TRAINED:
            self.scale = nn.Parameter(torch.full((geometry.num_attention_heads,), self.start))
        if self.kind == "ssmax":
            self.offset = nn.Parameter(torch.ones(geometry.num_attention_heads))

    def forward(self, position_ids: Tensor) -> Tensor:
        """Return the factor on the scores of every query: (b, n) -> (1|b, 1|h, n) float32.

        The number of keys that a query sees is its position plus one; in an encoder, the largest of its row plus one.
        """
        return self._factor(position_ids[:, None].double()).float()

    def _factor(self, position: Tensor) -> Tensor:
        """Return the factor of (1|b, 1, n) positions, float64."""
        kind, length = self.kind, self.length
        if kind in TRAINED:
            scale = self.scale[None, :, None].double()  # (1, h, 1)
            if kind == "per_head":
                return scale.expand(-1, -1, position.shape[-1])
            grown = scale * self._seen(position).log()
            return grown + self.offset[None, :, None] if kind == "ssmax" else grown
        if kind == "constant":
            return torch.full_like(position[:1], self.start)
        if kind == "log_n":
            return (self._seen(position).log() / math.log(length)).clamp(min=1)
        if kind == "beam":
            return (1 + (position + 1) / length) ** self.start
        steps = {
            "llama4": 1 + ((position + 1) / length).floor(),
            "ministral3": 1 + (position / length).floor(),
            "inkling": ((position + 1) / length).clamp(min=1),
        }[kind]
        return 1 + self.start * steps.log()

    def _seen(self, position: Tensor) -> Tensor:
        """Return how many keys every query sees, (1|b, 1, n)."""
        if self.causal:
            return position + 1
        return (position.amax(dim=-1, keepdim=True) + 1).expand_as(position)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"kind={self.kind}, scale={self.start:.6g}, length={self.length}"
