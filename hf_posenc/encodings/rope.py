"""Rotary position embedding, whole or partial, in both pairings, with every scaling that `hf_posenc.scaling` knows.

Su et al. 2021, "RoFormer", equations 14-16 and 34. Checked against `transformers.modeling_rope_utils`. Phases are taken
in float64 and cast last: in float32 the angle at position 131072 is off by 8e-3 radians, in bfloat16 by a full turn. A
larger `theta` alone is the method of Xiong et al. 2023 (adjusted base frequency).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.config import Choices, Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError
from hf_posenc.positions import Geometry, working_dtype
from hf_posenc.rotation import PAIRINGS, angles, turn
from hf_posenc.scaling import KINDS, ORIGINAL, checked, grown_factor, is_number, ntk_theta, scaled_frequencies

OURS = ("mode", "length", "ramp", "mix", "resonance")
"""Keys of a scaling that transformers does not know."""
MODELS_OWN = ("rope_theta", "partial_rotary_factor", "pairing")
"""What is said of a model's rotation beside its scaling."""


class RotaryEncoding(Encoding):
    """Rotates the first `2 * len(inv_freq)` dimensions of queries and keys by position times frequency.

    Attributes:
        inv_freq: radians per token of every pair, float64 numbers.
        attention_factor: factor on cosine and sine; scores grow by its square.
    """

    def __init__(self, config: RoPE, geometry: Geometry, *, length: int = 0) -> None:
        super().__init__()
        self.config, self.geometry = config, geometry
        self.inv_freq, self.attention_factor = config.frequencies(geometry, length=length)
        mode = config.mode if not length else None
        if mode == "consistent":
            self.rotation_grows_after = config.original_length(geometry)
        self._by_call = mode == "hf_compat"
        self._memo: tuple[Any, ...] | None = None

    def at_length(self, length: int) -> RotaryEncoding:
        """Return the static rotation for a text of `length` tokens; itself where the length plays no part."""
        grows = self._by_call or self.rotation_grows_after is not None
        return RotaryEncoding(self.config, self.geometry, length=length) if grows else self

    def angles(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine times the attention factor, each (b, 1, n, pairs) in `dtype`."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or position_ids.is_inference():
            return self._angles(position_ids, dtype)
        # every layer rotates queries and keys at the same positions; the tensor's identity and version tell that
        # nothing changed since the last call, so that no call can see another call's table
        if self._memo is not None:
            seen, version, kind, table = self._memo
            if seen() is position_ids and version == position_ids._version and kind == dtype:
                return table  # type: ignore[no-any-return]
        table = self._angles(position_ids, dtype)
        self._memo = (weakref.ref(position_ids), position_ids._version, dtype, table)
        return table

    def _angles(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        static = self.at_length(int(position_ids.max()) + 1) if self._by_call else self
        return angles(position_ids, static.inv_freq, attention_factor=static.attention_factor, dtype=dtype)

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate queries or keys: (b, h, n, d), (b, n) -> (b, h, n, d); dimensions past the rotary width bit-equal.

        Computed in float32 (float64 for float64 states), returned in the dtype of `states`. Where the rotation grows
        with the length, the length is that of the longest row.
        """
        if self.rotation_grows_after is not None:
            return self.at_length(int(position_ids.max()) + 1).rotate(states, position_ids)
        return turn(states, *self.angles(position_ids, working_dtype(states)), pairing=self.config.pairing)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the memo behind: a copy has its own calls, and a weak reference does not pickle."""
        return {**self.__dict__, "_memo": None}

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"theta={self.config.theta}, rotary_dim={2 * len(self.inv_freq)}, scaling={self.config.scaling}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class RoPE(EncodingConfig):
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies, > 1; None takes the model's own, or 10000 where it has none.
        partial_rotary_factor: rotated fraction of the head, in (0, 1]; None takes the model's own, or 1. The slowest
            pair of the rotated part ends the progression, except in `proportional`, where a whole head's would.
        scaling: transformers' own description of a scaling, `{"rope_type": ..., "factor": ..., ...}`, with `rope_type`
            one of default, linear, ntk, dynamic, ntk_by_parts, yarn, longrope, llama3, proportional; any of them takes
            `resonance`, which rounds wavelengths to whole tokens. `original_max_position_embeddings`, in tokens, is
            read from the model where it is left out, and recorded. None keeps the scaling that the model has.
        pairing: `half_split` (dimension k with k + half, as in Llama) or `interleaved` (2k with 2k + 1, as in GPT-J);
            None takes that of the model's weights, or half_split where it has no rotation.
    """

    theta: float | None = None
    partial_rotary_factor: float | None = None
    scaling: dict[str, Any] | None = None
    pairing: str | None = None

    name: ClassVar[str] = "rope"
    label: ClassVar[str] = "Rotary"
    module: ClassVar[Callable[..., Encoding]] = RotaryEncoding
    choices: ClassVar[Choices] = {"pairing": PAIRINGS}

    def __post_init__(self) -> None:
        """Check the fields and bring `scaling` into one spelling; raises ConfigError."""
        super().__post_init__()
        if self.theta is not None and not (is_number(self.theta) and self.theta > 1):
            raise ConfigError(f"RoPE.theta must be a finite number above 1, was: {self.theta!r}")
        factor = self.partial_rotary_factor
        if factor is not None and not (is_number(factor) and 0 < factor <= 1):
            raise ConfigError(f"RoPE.partial_rotary_factor must lie in (0, 1], was: {factor!r}")
        if self.scaling is not None:
            object.__setattr__(self, "scaling", checked(self.scaling))

    @property
    def rope_type(self) -> str:
        """The `rope_type` of the scaling, `default` without one."""
        return str((self.scaling or {}).get("rope_type", "default"))

    @property
    def mode(self) -> str | None:
        """How the rotation follows the length of the text, one of `scaling.MODES`, or None where it does not."""
        modes = KINDS[self.rope_type].choices.get("mode")
        return (self.scaling or {}).get("mode", modes[0]) if modes else None

    def check(self, geometry: Geometry) -> None:
        """Raise ConfigError where the rotated width is odd or zero, or a factor is at odds with the lengths."""
        dim = self.rotary_dim(geometry)
        if dim < 2 or dim % 2:
            raise ConfigError(
                f"rotary width must be even and at least 2, was: {dim} (head_dim {geometry.head_dim} times "
                f"partial_rotary_factor {self.partial_rotary_factor or 1.0})"
            )
        if dim == 2 and self.rope_type in ("ntk", "dynamic", "ntk_by_parts"):
            raise ConfigError("NTK scaling needs a rotary width above 2: its exponent is dim / (dim - 2)")
        if not any(self.frequencies(geometry)[0]):
            raise ConfigError(f"partial_rotary_factor {self.partial_rotary_factor} of {dim} dimensions turns no pair")

    def rotary_dim(self, geometry: Geometry) -> int:
        """Return the number of dimensions of a head that stand in rotated pairs."""
        factor = 1.0 if self.rope_type == "proportional" else self.partial_rotary_factor or 1.0
        return int(geometry.head_dim * factor)

    def original_length(self, geometry: Geometry) -> int:
        """Return the length in tokens that the frequencies were trained for."""
        return int((self.scaling or {}).get(ORIGINAL, geometry.max_position_embeddings))

    def frequencies(self, geometry: Geometry, *, length: int = 0) -> tuple[tuple[float, ...], float]:
        """Return the radians per token of every pair and the attention factor, for a text of `length` tokens."""
        known = {ORIGINAL: geometry.max_position_embeddings, "partial_rotary_factor": self.partial_rotary_factor or 1.0}
        scaling = {**known, "rope_type": "default", **(self.scaling or {})}
        scaled, attention_factor = scaled_frequencies(self.theta or 10000.0, self.rotary_dim(geometry), scaling, length)
        return tuple(scaled), attention_factor

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> RoPE:
        """Fill in theta, rotated fraction, scaling, original length and pairing from the model."""
        own = dict(rope_parameters or {})
        theta = self.theta or own.pop("rope_theta", None) or 10000.0
        factor = self.partial_rotary_factor or own.pop("partial_rotary_factor", None) or 1.0
        scaling = self.scaling
        if scaling is None and own.get("rope_type", "default") != "default":
            scaling = checked({key: own[key] for key in own if key not in MODELS_OWN})
        if scaling and ORIGINAL in KINDS[scaling["rope_type"]].keys:
            scaling = {**scaling, ORIGINAL: scaling.get(ORIGINAL) or geometry.max_position_embeddings}
        filled = super().for_model(geometry, rope_parameters)
        return dataclasses.replace(
            filled,
            theta=float(theta),
            partial_rotary_factor=float(factor),
            scaling=scaling,
            pairing=self.pairing or own.get("pairing") or "half_split",
        )

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any] | None:
        """Return transformers' `rope_parameters` for this encoding, complete, or None where it has no such rotation.

        Static NTK, and dynamic NTK frozen at a length, are a theta of their own there. Dynamic NTK as such is
        transformers' only in the mode `hf_compat`, and from the model's own length on, which transformers reads.
        """
        scaling, theta = dict(self.scaling or {"rope_type": "default"}), self.theta or 10000.0
        unknown = scaling.get("resonance") or scaling.get("ramp") == "rotations" or scaling.get("mix") == "harmonic"
        if unknown or self.temperature or self.pairing == "interleaved" or self.rope_type == "ntk_by_parts":
            return None
        if self.rope_type == "dynamic" and self.mode != "frozen":
            if self.mode == "consistent" or self.original_length(geometry) != geometry.max_position_embeddings:
                return None
            scaling.pop(ORIGINAL, None)
        if self.rope_type == "longrope":
            if self.mode == "consistent":
                return None
            if self.mode == "frozen":
                kind = "long_factor" if scaling["length"] > self.original_length(geometry) else "short_factor"
                scaling |= {"short_factor": scaling[kind], "long_factor": scaling[kind]}
        if self.rope_type == "ntk" or (self.rope_type == "dynamic" and self.mode == "frozen"):
            known = {ORIGINAL: geometry.max_position_embeddings, **scaling}
            factor = scaling["factor"] if self.rope_type == "ntk" else grown_factor(known, scaling["length"])
            theta = ntk_theta(theta, self.rotary_dim(geometry), factor)
            scaling = {"rope_type": "default"}
        kept = {key: value for key, value in scaling.items() if key not in OURS}
        return {**kept, "rope_theta": theta, "partial_rotary_factor": self.partial_rotary_factor or 1.0}
