"""The encoding contract: a config that names an encoding, and the module that computes it.

An encoding is written as one file in `hf_posenc/encodings/`: a frozen config, decorated with `register_encoding`, and a
module with up to four hooks. Neither knows of transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import ConfigError, did_you_mean
from hf_posenc.positions import Geometry, Positions, working_dtype
from hf_posenc.registry import Registry
from hf_posenc.temperature import Temperature, Tempering

SCHEMA_VERSION = 1


class Encoding(nn.Module):
    """What positions do to a model: hooks, all neutral here.

    Most encodings need one of the first four (`embed`, `remap`, `rotate`, `bias`); the other hooks are for what those
    cannot say. Derived tables are never kept in buffers: transformers refills non-persistent buffers with garbage after
    `from_pretrained`, and `model.to(bfloat16)` would round them. They are derived from plain numbers when needed.
    """

    rotation_grows_after: int | None = None
    """Length in tokens after which the rotation of a query depends on how far the text has come, or None where it never
    does. Keys are then cached unrotated, and `at_length` gives the static encoding of a query at that length."""

    tempering: Tempering | None
    """The temperature that the config asked for, beside whatever `temperature` does, or None."""

    visible: tuple[int, int] | None = None
    """How many first, and how many most recent tokens of a text a query sees, its own among the latter, or None where
    it sees all. Whatever a dynamic cache holds beyond these is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.tempering = None

    def embed(self, position_ids: Tensor) -> Tensor | None:
        """Return what is added to the token embedding: (b, n) int64 -> (b, n, hidden_size), or None."""
        return None

    def remap(self, positions: Tensor) -> Tensor:
        """Return the integers that the other hooks see: (b, n) int64 -> (b, n) int64."""
        return positions

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate queries or keys: (b, h, n, d), (b, n) -> (b, h, n, d), dtype kept."""
        return states

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor | None:
        """Return what is added to the scaled scores before softmax: (1|b, 1|h, q, k) float32, or None.

        Args:
            query: (b, h, q, d), rotated and scaled, so that its product with a key is a score; not tempered.
            key: (b, h, k, d) or, with grouped heads, (b, h_kv, k, d), rotated.
            positions: of these queries and these keys.
        """
        return self._bias_by_distance(positions, working_dtype(query)) if self.overrides("distance_bias") else None

    def distance_bias(self, distance: Tensor) -> Tensor | None:
        """Return the bias of a distance, where it depends on nothing else: (n,) -> (h, n), or None where it does.

        `bias` follows from it. What says so is not asked for more than one row of numbers, where a call has plain
        positions, and its gradients come from that row.

        Args:
            distance: query minus key position, whole numbers in the dtype of the result, float32 or float64.
        """
        return None

    def _bias_by_distance(self, positions: Positions, dtype: torch.dtype) -> Tensor | None:
        """Return (1|b, h, q, k), looked up in the numbers of all distances that there are."""
        distance = positions.distance()
        lowest, highest = (int(end) for end in distance.aminmax())
        if highest - lowest < 4 * sum(distance.shape[1:]):
            known, index = torch.arange(lowest, highest + 1, device=distance.device), distance - lowest
        else:  # positions with gaps
            known, index = distance.unique(return_inverse=True)
        table = self.distance_bias(known.to(dtype))  # (h, n)
        # contiguous: kernels are slow where neighbouring keys do not lie side by side
        return None if table is None else nn.functional.embedding(index, table.T).permute(0, 3, 1, 2).contiguous()

    def rotate_key(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate keys, where they turn otherwise than queries: (b, h_kv, n, d), (b, n) -> (b, h_kv, n, d)."""
        return self.rotate(states, position_ids)

    def temperature(self, position_ids: Tensor) -> Tensor | None:
        """Return the factor on the scores of every query, bias included: (b, n) -> (1|b, 1|h, n) float32, or None."""
        return None

    def factor(self, position_ids: Tensor) -> Tensor | None:
        """Return `temperature`, times the one that the config asked for: (b, n) -> (1|b, 1|h, n) float32, or None."""
        own = self.temperature(position_ids)
        if self.tempering is None:
            return own
        asked: Tensor = self.tempering(position_ids)
        return asked if own is None else own * asked

    def gate(self, hidden_states: Tensor) -> Tensor | None:
        """Return what is remembered of every key beside the key: (b, n, hidden_size) -> (b, h, n) float32, or None.

        It comes back as `positions.gates`, (b, h, k), for all cached keys and the new ones.
        """
        return None

    def score(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor | None:
        """Return the scaled scores themselves, (b, h, q, k) float32, where no rotation gives them; None elsewhere.

        Queries come scaled and tempered, keys as projected; `rotate` is not called, `bias` still is. Arguments as in
        `bias`.
        """
        return None

    def output_bias(self, weights: Tensor, positions: Positions) -> Tensor | None:
        """Return what is added to the output of every head: weights (b, h, q, k) -> (b, h, q, d), or None.

        Stock attention functions hand no weights over: where this is overridden, none of them is called.
        """
        return None

    def adopt(self, table: Tensor | None) -> None:
        """Take over what can be taken from the position table that is being replaced, (rows, hidden_size) or None."""

    def adopt_bias(self, tables: Sequence[Tensor]) -> None:
        """Take over what can be taken from the bias that is being replaced.

        Args:
            tables: (num_buckets, num_attention_heads) each, one for all layers or one for every layer.
        """

    def at_length(self, length: int) -> Encoding:
        """Return the static encoding in force for a query at position `length - 1`."""
        return self

    def max_positions(self) -> int | None:
        """Return the number of positions this encoding can express, or None where it has no end."""
        return None

    def overrides(self, hook: str) -> bool:
        """Tell whether this encoding gives `hook` a meaning of its own."""
        if hook == "temperature" and self.tempering is not None:
            return True
        own = getattr(type(self), hook) is not getattr(Encoding, hook)
        return own or (hook == "bias" and self.overrides("distance_bias"))


class Layers(Encoding):
    """An encoding for every layer.

    Attention modules take the hooks of their own layer; what is added to the token embedding comes from the first one
    that adds anything.

    Args:
        layers: one encoding a layer, in order.
    """

    def __init__(self, layers: Sequence[Encoding]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        grown = [layer.rotation_grows_after for layer in layers if layer.rotation_grows_after is not None]
        self.rotation_grows_after = min(grown, default=None)
        visible = [layer.visible for layer in layers]
        if None not in visible:
            self.visible = max(v[0] for v in visible if v), max(v[1] for v in visible if v)

    def of(self, index: int) -> Encoding:
        """Return the encoding of one layer."""
        layer: Encoding = self.layers[index]  # type: ignore[assignment]
        return layer

    def overrides(self, hook: str) -> bool:
        """Tell whether any layer gives `hook` a meaning of its own."""
        return any(self.of(index).overrides(hook) for index in range(len(self.layers)))

    def embed(self, position_ids: Tensor) -> Tensor | None:
        """Return what the first layer that adds to the token embedding adds: (b, n) -> (b, n, hidden_size) or None."""
        found = (self.of(index).embed(position_ids) for index in range(len(self.layers)))
        return next((added for added in found if added is not None), None)

    def adopt(self, table: Tensor | None) -> None:
        """Let every layer take over what it can from the table being replaced, (rows, hidden_size) or None."""
        for index in range(len(self.layers)):
            self.of(index).adopt(table)

    def adopt_bias(self, tables: Sequence[Tensor]) -> None:
        """Let every layer take over what it can from the bias of that layer."""
        for index in range(len(self.layers)):
            self.of(index).adopt_bias([tables[index % len(tables)]])

    def max_positions(self) -> int | None:
        """Return the smallest number of positions that a layer can express, or None where none has an end."""
        found = (self.of(index).max_positions() for index in range(len(self.layers)))
        return min((rows for rows in found if rows is not None), default=None)


E = TypeVar("E", bound="EncodingConfig")


@dataclass(frozen=True, kw_only=True)
class EncodingConfig:
    """Plain, frozen, validated numbers that name one encoding.

    Subclasses set `name` (the registry key), `label` (the prefix of patched class names) and `module`. One that checks
    fields of its own, or fills them in from the model, calls `super().__post_init__()`, or `super().for_model(...)`.

    Attributes:
        temperature: a factor on all scores of a query, `Temperature(kind="log_n")` or its spec, `{"kind": "log_n"}`;
            None (neutral) leaves them as they are.
    """

    temperature: Temperature | dict[str, Any] | None = None

    name: ClassVar[str]
    label: ClassVar[str]
    module: ClassVar[Callable[..., Encoding]]

    @property
    def within_length(self) -> str:
        """What a model says within its trained length after the patch: `changed`, `kept` (by a model that has a table
        of positions) or `either`; a patch that does otherwise is refused."""
        return "changed"

    def __post_init__(self) -> None:
        """Check the fields that all encodings may have; raises ConfigError."""
        object.__setattr__(self, "temperature", Temperature.read(self.temperature))

    def to_dict(self) -> dict[str, Any]:
        """Return the plain-JSON form, which `from_dict` reads back exactly."""
        return {"name": self.name, "version": SCHEMA_VERSION, **dataclasses.asdict(self)}

    def check(self, geometry: Geometry) -> None:
        """Raise ConfigError where this config does not fit a model of that geometry."""

    def build(self, geometry: Geometry) -> Encoding:
        """Return the module that computes this encoding for a model of that geometry.

        Raises:
            ConfigError: the config does not fit the geometry.
        """
        self.check(geometry)
        module = self.module(self, geometry)
        if (temperature := Temperature.read(self.temperature)) is not None:
            module.tempering = Tempering(temperature, geometry)
        return module

    def build_layers(self, geometry: Geometry, layers: int) -> Encoding:
        """Return the module for a model of so many layers: one that all share, or `Layers` where `per_layer` is set."""
        if getattr(self, "per_layer", False) or getattr(self.temperature, "per_layer", False):
            return Layers([self.build(geometry) for _ in range(layers)])
        return self.build(geometry)

    def for_model(self: E, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> E:
        """Return this config with every default that is read from the model filled in.

        Args:
            geometry: of the model.
            rope_parameters: the model's own, where it is a rotary one, and its `pairing`.
        """
        temperature = Temperature.read(self.temperature)
        return self if temperature is None else dataclasses.replace(self, temperature=temperature.for_model(geometry))

    def for_stacks(self, names: Sequence[str]) -> dict[str, EncodingConfig]:
        """Return the encoding of every stack of these names, encoder and decoder, that is to have another one."""
        return dict.fromkeys(names, self)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any] | None:
        """Return transformers' own description of this encoding, or None where it is not a rotary one."""
        return None


ENCODINGS: Registry[type[EncodingConfig]] = Registry(kind="encoding", package="hf_posenc.encodings")

C = TypeVar("C", bound=type[EncodingConfig])


def register_encoding(cls: C) -> C:
    """Class decorator: make a config class known under its `name`; raises ConfigError where the name is taken."""
    ENCODINGS.add(cls.name, cls)
    return cls


def encodings() -> list[str]:
    """Return the names of all encodings."""
    return list(ENCODINGS)


def encoding(name: str, **fields: Any) -> EncodingConfig:
    """Build an encoding config by name.

    Args:
        name: one of `encodings()`.
        **fields: the fields of that encoding's config.

    Raises:
        UnknownNameError: no encoding has that name.
        ConfigError: an unknown field, or a value out of range.
    """
    cls = ENCODINGS[name]
    known = [field.name for field in dataclasses.fields(cls)]
    for key in fields:
        if key not in known:
            raise ConfigError(f"encoding {name!r} has no field {key!r}; {did_you_mean(key, known)}")
    return cls(**fields)


def from_dict(spec: dict[str, Any]) -> EncodingConfig:
    """Read the form that `EncodingConfig.to_dict` writes.

    Raises:
        ConfigError: no name, a newer schema version, an unknown field, or a value out of range.
    """
    fields = dict(spec)
    name, version = fields.pop("name", None), fields.pop("version", None)
    if not isinstance(name, str):
        raise ConfigError(f"a position-encoding spec needs a 'name', was: {spec!r}")
    if version != SCHEMA_VERSION:
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        raise ConfigError(
            f"position-encoding spec version {version!r} of {name!r} is not readable: "
            + ("a newer hf_posenc wrote it; upgrade this one, which" if newer else "no release wrote it; this one")
            + f" reads version {SCHEMA_VERSION}."
        )
    return encoding(name, **fields)


def build(config: EncodingConfig, geometry: Geometry) -> Encoding:
    """Return the `Encoding` module of `config` for a model of that geometry; raises ConfigError where they disagree."""
    if not isinstance(config, EncodingConfig):
        raise ConfigError(f"expected an encoding config such as posenc.RoPE(), got: {config!r}")
    return config.for_model(geometry).build(geometry)
