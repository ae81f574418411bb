"""The encoding contract: a config that names an encoding, and the module that computes it.

An encoding is written as one file in `hf_posenc/encodings/`: a frozen config, decorated with `register_encoding`, and a
module with those of the hooks of `hooks.Encoding` that it needs. Neither knows of transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from hf_posenc.errors import ConfigError, did_you_mean
from hf_posenc.hooks import Encoding as Encoding
from hf_posenc.hooks import Layers as Layers
from hf_posenc.positions import Geometry
from hf_posenc.registry import Registry
from hf_posenc.temperature import Temperature, Tempering

SCHEMA_VERSION = 1


E = TypeVar("E", bound="EncodingConfig")
Choices = Mapping[str, Collection[str]]
"""Field of a config -> the words that it takes."""


@dataclass(frozen=True, kw_only=True)
class EncodingConfig:
    """Plain, frozen, validated numbers that name one encoding.

    Subclasses set `name` (the registry key), `label` (the prefix of patched class names), `module`, and `choices` where
    a field takes one of a few words. One that checks more than that, or fills fields in from the model, calls
    `super().__post_init__()`, or `super().for_model(...)`.

    Attributes:
        temperature: a factor on all scores of a query, `Temperature(kind="log_n")` or its spec, `{"kind": "log_n"}`;
            None (neutral) leaves them as they are.
    """

    temperature: Temperature | dict[str, Any] | None = None

    name: ClassVar[str]
    label: ClassVar[str]
    module: ClassVar[Callable[..., Encoding]]
    choices: ClassVar[Choices] = {}

    @property
    def within_length(self) -> str:
        """What a model says within its trained length after the patch: `changed`, `kept` (by a model that has a table
        of positions) or `either`; a patch that does otherwise is refused."""
        return "changed"

    def __post_init__(self) -> None:
        """Check `temperature`, fields that say yes or no, and those of `choices`; raises ConfigError."""
        object.__setattr__(self, "temperature", Temperature.read(self.temperature))
        for field in dataclasses.fields(self):
            value, what = getattr(self, field.name), f"{type(self).__name__}.{field.name}"
            if field.type in ("bool", bool) and not isinstance(value, bool):
                raise ConfigError(f"{what} must be True or False, was: {value!r}")
            known = self.choices.get(field.name)
            if known is not None and value not in tuple(known) and value != field.default:
                raise ConfigError(f"unknown {what} {value!r}; {did_you_mean(str(value), known)}")

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
