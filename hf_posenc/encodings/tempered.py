"""A temperature over any encoding: scores times a factor that may depend on the head and on the query's position.

- `constant`, `per_head`: Wang et al. 2024, "Length Generalization of Causal Transformers without Position Encoding".
- `log_n`: Su 2021 (kexue.fm 8823); Chiang and Cholak 2022, "Overcoming a Theoretical Limitation of Self-Attention".
- `ssmax`, `ssmax_paper`: Nakanishi 2025, "Scalable-Softmax Is Superior for Attention".
- `llama4`, `ministral3`, `inkling`, `beam`: checked against transformers' modules of these models.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import SCHEMA_VERSION, Encoding, EncodingConfig, from_dict, register_encoding
from hf_posenc.errors import ConfigError, did_you_mean
from hf_posenc.positions import Geometry, Positions
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


class TemperedEncoding(Encoding):
    """Every hook is that of the encoding inside; its scores are multiplied by `temperature`."""

    def __init__(self, config: Tempered, geometry: Geometry) -> None:
        super().__init__()
        self.config, self.geometry = config, geometry
        self.inner = config.inner().build(geometry)
        self.rotation_grows_after, self.visible = self.inner.rotation_grows_after, self.inner.visible
        self.length = config.length or geometry.max_position_embeddings
        self.start = config.scale_at(self.length)
        if config.kind in TRAINED:
            self.scale = nn.Parameter(torch.full((geometry.num_attention_heads,), self.start))
        if config.kind == "ssmax":
            self.offset = nn.Parameter(torch.ones(geometry.num_attention_heads))

    def overrides(self, hook: str) -> bool:
        """Tell whether this encoding gives `hook` a meaning of its own, which depends on the one inside."""
        return hook == "temperature" or self.inner.overrides(hook)

    def temperature(self, position_ids: Tensor) -> Tensor:
        """Return the factor on the scores of every query: (b, n) -> (1|b, 1|h, n) float32, times that of the inside.

        The number of keys that a query sees is its position plus one; in an encoder, the largest of its row plus one.
        """
        factor = self._factor(position_ids[:, None].double())  # (1|b, 1|h, n)
        inner = self.inner.temperature(position_ids)
        return (factor if inner is None else factor * inner).float()

    def _factor(self, position: Tensor) -> Tensor:
        kind, length = self.config.kind, self.length
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
        if self.geometry.causal:
            return position + 1
        return (position.amax(dim=-1, keepdim=True) + 1).expand_as(position)

    def at_length(self, length: int) -> Encoding:
        """Return the static encoding in force for a query at position `length - 1`: the inside's, equally tempered."""
        if self.rotation_grows_after is None:
            return self
        static = copy.copy(self)  # the trained numbers stay the same objects
        static._modules = {"inner": self.inner.at_length(length)}
        static.rotation_grows_after = None
        return static

    def embed(self, position_ids: Tensor) -> Tensor | None:
        """As the encoding inside: (b, n) -> (b, n, hidden_size) or None."""
        return self.inner.embed(position_ids)

    def remap(self, positions: Tensor) -> Tensor:
        """As the encoding inside: (b, n) -> (b, n)."""
        return self.inner.remap(positions)

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """As the encoding inside: (b, h, n, d), (b, n) -> (b, h, n, d)."""
        return self.inner.rotate(states, position_ids)

    def rotate_key(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """As the encoding inside: (b, h_kv, n, d), (b, n) -> (b, h_kv, n, d)."""
        return self.inner.rotate_key(states, position_ids)

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor | None:
        """As the encoding inside: (1|b, 1|h, q, k) or None; not tempered."""
        return self.inner.bias(query, key, positions)

    def distance_bias(self, distance: Tensor) -> Tensor | None:
        """As the encoding inside: (n,) -> (h, n) or None."""
        return self.inner.distance_bias(distance)

    def gate(self, hidden_states: Tensor) -> Tensor | None:
        """As the encoding inside: (b, n, hidden_size) -> (b, h, n) or None."""
        return self.inner.gate(hidden_states)

    def score(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor | None:
        """As the encoding inside: (b, h, q, k) or None."""
        return self.inner.score(query, key, positions)

    def output_bias(self, weights: Tensor, positions: Positions) -> Tensor | None:
        """As the encoding inside: (b, h, q, k) -> (b, h, q, d) or None."""
        return self.inner.output_bias(weights, positions)

    def adopt(self, table: Tensor | None) -> None:
        """As the encoding inside."""
        self.inner.adopt(table)

    def max_positions(self) -> int | None:
        """As the encoding inside."""
        return self.inner.max_positions()

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"kind={self.config.kind}, scale={self.start:.6g}, length={self.length}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Tempered(EncodingConfig):
    """A temperature over another encoding. p is a query's position, n the number of keys that it sees, L the length.

    Attributes:
        encoding: the encoding inside, as a config or as its spec, `{"name": "nope"}`.
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
        per_layer: trained numbers of their own for every layer; neutral value False.
    """

    encoding: dict[str, Any] | EncodingConfig
    kind: str
    scale: float | None = None
    length: int | None = None
    per_layer: bool = False

    name: ClassVar[str] = "tempered"
    label: ClassVar[str] = "Tempered"
    module: ClassVar[type[Encoding]] = TemperedEncoding

    @property
    def within_length(self) -> str:
        """A temperature may start at one, over an encoding that keeps what the model says."""
        return "either"

    def __post_init__(self) -> None:
        """Check the fields, and the config inside; raises ConfigError."""
        given = self.encoding.to_dict() if isinstance(self.encoding, EncodingConfig) else self.encoding
        if not isinstance(given, Mapping):
            raise ConfigError(f"Tempered.encoding must be an encoding config or its spec, was: {given!r}")
        inner = from_dict({"version": SCHEMA_VERSION, **given})
        object.__setattr__(self, "encoding", inner.to_dict())
        object.__setattr__(self, "per_layer", self.per_layer or bool(getattr(inner, "per_layer", False)))
        if self.kind not in SCALES:
            raise ConfigError(f"unknown Tempered.kind {self.kind!r}; {did_you_mean(str(self.kind), SCALES)}")
        scale, length = self.scale, self.length
        if scale is not None and not (is_number(scale) and scale >= 0):
            raise ConfigError(f"Tempered.scale must be a number of at least 0, or None, was: {scale!r}")
        if self.kind == "log_n" and scale not in (None, 1.0):
            raise ConfigError(f"Tempered(kind='log_n') has no scale, was: {scale!r}")
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 2):
            raise ConfigError(f"Tempered.length must be at least 2 tokens, or None, was: {length!r}")

    def inner(self) -> EncodingConfig:
        """Return the config of the encoding inside."""
        return from_dict(dict(self.encoding))  # type: ignore[arg-type]

    def scale_at(self, length: int) -> float:
        """Return the scale, at the start where it is trained, for a model of that length."""
        found = SCALES[self.kind] if self.scale is None else self.scale
        return 1 / math.log(length) if found is None else found

    def check(self, geometry: Geometry) -> None:
        """Raise what the encoding inside raises, and ConfigError for a model whose length has no logarithm."""
        self.inner().check(geometry)
        if (self.length or geometry.max_position_embeddings) < 2:
            raise ConfigError("Tempered needs a length of at least 2 tokens; the model has 1, so give one")

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> Tempered:
        """Fill in the length, and the encoding inside, from the model."""
        inner = self.inner().for_model(geometry, rope_parameters)
        length = self.length or geometry.max_position_embeddings
        return dataclasses.replace(self, encoding=inner.to_dict(), length=length, scale=self.scale_at(length))
