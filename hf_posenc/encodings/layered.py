"""Layers that differ: another encoding in every layer, or a pattern of encodings repeated over the layers.

Every n-th layer without positions: SmolLM3, Llama 4 and Yang et al. 2025, "Rope to Nope and Back Again: A New Hybrid
Attention Strategy" (arXiv 2501.18795). Checked against transformers' `no_rope_layers` of SmolLM3, whose 1 means that a
layer does rotate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from hf_posenc.config import SCHEMA_VERSION, Encoding, EncodingConfig, Layers, from_dict, register_encoding
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from hf_posenc.positions import Geometry

Spec = dict[str, Any] | EncodingConfig
Specs = Sequence[Spec]


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Layered(EncodingConfig):
    """An encoding of its own for every layer. Exactly one of the two fields is given.

    What is trained is never shared between layers, whatever `per_layer` says inside.

    Attributes:
        layers: one encoding a layer, in order, each as a config or as its spec, `{"name": "nope"}`.
        pattern: encodings that are repeated, in order, over all layers of the model; the last repetition may be cut
            short. `[rope, rope, rope, nope]` leaves every fourth layer without positions, the first of them layer 3
            counted from 0. One encoding alone is the neutral pattern.
    """

    layers: Specs | None = None
    pattern: Specs | None = None

    name: ClassVar[str] = "layered"
    label: ClassVar[str] = "Layered"
    module: ClassVar[Callable[..., Encoding]] = Layers

    @property
    def within_length(self) -> str:
        """A table in one layer, and nothing in the others, keeps what a model says."""
        return "either" if any(config.within_length != "changed" for config in self.inner()) else "changed"

    def __post_init__(self) -> None:
        """Check the fields, and the configs inside, and bring these into their plain form; raises ConfigError."""
        super().__post_init__()
        if self.temperature is not None:
            raise ConfigError("Layered has no temperature of its own; give one to each encoding inside that needs it.")
        if (self.layers is None) == (self.pattern is None):
            raise ConfigError(
                "Layered needs either layers, one encoding for each layer of the model, or pattern, encodings to "
                f"repeat over the layers; {'none' if self.layers is None else 'both'} of them was given."
            )
        field = "layers" if self.pattern is None else "pattern"
        given = getattr(self, field)
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise ConfigError(f"Layered.{field} must be a list of encoding configs or of their specs, was: {given!r}")
        object.__setattr__(self, field, [_plain(spec, f"Layered.{field}[{index}]") for index, spec in enumerate(given)])

    def inner(self) -> list[EncodingConfig]:
        """Return the configs inside, in order."""
        return [from_dict(dict(spec)) for spec in self.layers or self.pattern or ()]  # type: ignore[arg-type]

    def check(self, geometry: Geometry) -> None:
        """Raise what an encoding inside raises."""
        for config in self.inner():
            config.check(geometry)

    def build(self, geometry: Geometry) -> NoReturn:
        """Raise ConfigError: several encodings are not one."""
        raise ConfigError(
            "Layered is one encoding for each layer and cannot stand inside another encoding, nor be built for a "
            "single layer. Put the others inside it, as in Layered(pattern=[RoPE(), NoPE()])."
        )

    def build_layers(self, geometry: Geometry, layers: int) -> Encoding:
        """Return the module for a model of so many layers.

        Raises:
            ConfigError: there is another number of encodings than of layers.
            UnsupportedEncodingError: two layers want to add to the token embedding, which happens once.
        """
        configs = self.inner()
        if self.pattern is not None:
            configs = [configs[index % len(configs)] for index in range(layers)]
        if len(configs) != layers:
            raise ConfigError(
                f"Layered.layers has {len(configs)} encodings, the model {layers} layers; give one for each, or a "
                "pattern to repeat over them."
            )
        built = [config.build(geometry) for config in configs]
        adding = [
            f"layer {index} ({configs[index].name})" for index in range(layers) if built[index].overrides("embed")
        ]
        if len(adding) > 1:
            raise UnsupportedEncodingError(
                f"{' and '.join(adding)} add to the token embedding, which a model has once, before its first layer: "
                "let one layer do so, and give the others an encoding that acts inside attention, or nope."
            )
        return Layers(built)

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> Layered:
        """Fill in the encodings inside from the model."""
        filled = [config.for_model(geometry, rope_parameters).to_dict() for config in self.inner()]
        fields: dict[str, Any] = {"layers" if self.pattern is None else "pattern": filled}
        return dataclasses.replace(self, **fields)


def _plain(spec: object, where: str) -> dict[str, Any]:
    """Return the complete plain form of one encoding inside; raises ConfigError."""
    given = spec.to_dict() if isinstance(spec, EncodingConfig) else spec
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be an encoding config or its spec, was: {spec!r}")
    config = from_dict({"version": SCHEMA_VERSION, **given})
    if isinstance(config, Layered):
        raise ConfigError(f"{where} is layered itself; a layer has one encoding.")
    return config.to_dict()
