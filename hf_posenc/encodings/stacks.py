"""Encoder and decoder with an encoding each.

As in Raffel et al. 2020, "Exploring the Limits of Transfer Learning", section 2.1: either stack has a bias of its own,
two-sided in one and one-sided in the other. Nothing says that the two have to be of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from hf_posenc.config import SCHEMA_VERSION, Encoding, EncodingConfig, from_dict, register_encoding
from hf_posenc.errors import ConfigError
from hf_posenc.positions import Geometry

Spec = dict[str, Any] | EncodingConfig


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Stacks(EncodingConfig):
    """An encoding of its own for the encoder and for the decoder of a model that has both; at least one is given.

    Attributes:
        encoder: of the encoder, as a config or as its spec, `{"name": "alibi"}`; None (neutral) leaves it as it is.
        decoder: of the decoder, likewise. Cross-attention, from one to the other, never has positions.
    """

    encoder: Spec | None = None
    decoder: Spec | None = None

    name: ClassVar[str] = "stacks"
    label: ClassVar[str] = "Stacks"
    module: ClassVar[Callable[..., Encoding]] = Encoding

    def __post_init__(self) -> None:
        """Check the configs inside, and bring them into their plain form; raises ConfigError."""
        super().__post_init__()
        if self.temperature is not None:
            raise ConfigError("Stacks has no temperature of its own; give one to the encoding of a stack.")
        if self.encoder is None and self.decoder is None:
            raise ConfigError("Stacks needs an encoding for the encoder, for the decoder, or for both; got neither.")
        for name in ("encoder", "decoder"):
            spec = getattr(self, name)
            if spec is not None:
                object.__setattr__(self, name, _plain(spec, f"Stacks.{name}"))

    def for_stacks(self, names: Sequence[str]) -> dict[str, EncodingConfig]:
        """Return the encoding of every stack that was given one.

        Raises:
            ConfigError: one was given to a stack that the model does not have.
        """
        specs = {"encoder": self.encoder, "decoder": self.decoder}
        given = {name: from_dict(dict(spec)) for name, spec in specs.items() if spec is not None}  # type: ignore[arg-type]
        for name in given:
            if name not in names:
                raise ConfigError(f"Stacks({name}=...) on a model whose only stack is its {' and '.join(names)}.")
        return given

    def check(self, geometry: Geometry) -> NoReturn:
        """Raise ConfigError: one stack has one encoding."""
        raise ConfigError(
            "Stacks is for models with an encoder and a decoder, and cannot stand inside another encoding; this model "
            "has one stack. Pass the encoding itself, such as posenc.RoPE()."
        )


def _plain(spec: object, where: str) -> dict[str, Any]:
    """Return the complete plain form of the encoding of one stack; raises ConfigError."""
    given = spec.to_dict() if isinstance(spec, EncodingConfig) else spec
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be an encoding config or its spec, was: {spec!r}")
    config = from_dict({"version": SCHEMA_VERSION, **given})
    if isinstance(config, Stacks):
        raise ConfigError(f"{where} is one stack, which has one encoding.")
    return config.to_dict()
