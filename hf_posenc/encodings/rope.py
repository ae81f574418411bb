"""Rotary position embedding, whole or partial, with the frequency scalings that transformers knows and static NTK.

Su et al. 2021, "RoFormer", equations 14-16 and 34, in the half-split pairing of GPT-NeoX and Llama. Checked against
`transformers.modeling_rope_utils`. Phases are taken in float64 and cast last: in float32 the angle at position 131072
is off by 8e-3 radians, in bfloat16 by a full turn.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.config import Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError, did_you_mean
from hf_posenc.positions import Geometry

Frequencies = list[float]
Scaling = Mapping[str, Any]


def frequencies(theta: float, dim: int) -> Frequencies:
    """Return theta^(-2k/dim) for k < dim/2, in radians per token."""
    return [theta ** (-2 * k / dim) for k in range(dim // 2)]


def ntk_theta(theta: float, dim: int, factor: float) -> float:
    """Return theta * factor^(dim/(dim-2)), with which the slowest pair is slowed by exactly `factor` (bloc97, 2023)."""
    return float(theta * factor ** (dim / (dim - 2)))


def _linear(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    """Position interpolation, Chen et al. 2023, equation 4."""
    return [f / scaling["factor"] for f in frequencies(theta, dim)], 1.0


def _ntk(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    return frequencies(ntk_theta(theta, dim, scaling["factor"]), dim), 1.0


def _dynamic(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    """NTK with a factor that grows with the text (emozilla, 2023); no change up to the original length."""
    original = scaling["original_max_position_embeddings"]
    grown = scaling["factor"] * max(length, original) / original - (scaling["factor"] - 1)
    return frequencies(ntk_theta(theta, dim, grown), dim), 1.0


def _yarn(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    """YaRN, Peng et al. 2023, section 3.4.

    The ramp between kept and interpolated pairs runs over the pair's index, as in every released implementation, and
    not over its number of rotations, as in the paper's equation 18.
    """
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_that_turns(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.get("beta_fast", 32)), pair_that_turns(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        both = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = mscale(both[0]) / mscale(both[1]) if both[0] and both[1] else mscale(1.0)
    ramps = [min(max((k - low) / width, 0.0), 1.0) for k in range(dim // 2)]  # 0 keeps a pair, 1 interpolates it
    scaled = [f / factor * ramp + f * (1 - ramp) for f, ramp in zip(frequencies(theta, dim), ramps, strict=True)]
    return scaled, float(attention_factor)


def _llama3(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    """Llama 3.1: pairs with short wavelengths stay, those with long ones are interpolated, the rest blended."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    scaled = []
    for f in frequencies(theta, dim):
        turns = original * f / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append(f / factor * (1 - keep) + f * keep)
    return scaled, 1.0


@dataclass(frozen=True)
class _Kind:
    """One `rope_type`: its formula and the keys that it takes beside `rope_type` and `factor`."""

    formula: Callable[[float, int, Scaling, int], tuple[Frequencies, float]]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def keys(self) -> set[str]:
        return {"rope_type", "factor", *self.required, *self.optional}


_ORIGINAL = "original_max_position_embeddings"
KINDS: dict[str, _Kind] = {
    "linear": _Kind(_linear),
    "ntk": _Kind(_ntk),
    "dynamic": _Kind(_dynamic, optional=(_ORIGINAL,)),
    "yarn": _Kind(
        _yarn,
        optional=(_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": _Kind(_llama3, required=("low_freq_factor", "high_freq_factor"), optional=(_ORIGINAL,)),
}


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
        if not length and (config.scaling or {}).get("rope_type") == "dynamic":
            self.rotation_grows_after = config.original_length(geometry)
        self._memo: tuple[Any, ...] | None = None

    def at_length(self, length: int) -> RotaryEncoding:
        """Return the static rotation for a text of `length` tokens; itself where the length plays no part."""
        return self if self.rotation_grows_after is None else RotaryEncoding(self.config, self.geometry, length=length)

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
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float64, device=position_ids.device)
        phases = position_ids[:, None, :, None].double() * inv_freq  # (b, 1, n, pairs)
        return (phases.cos() * self.attention_factor).to(dtype), (phases.sin() * self.attention_factor).to(dtype)

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate queries or keys: (b, h, n, d), (b, n) -> (b, h, n, d); dimensions past the rotary width bit-equal.

        Computed in float32 (float64 for float64 states), returned in the dtype of `states`. Where the rotation grows
        with the length, the length is that of the longest row.
        """
        if self.rotation_grows_after is not None:
            return self.at_length(int(position_ids.max()) + 1).rotate(states, position_ids)
        dtype = torch.float64 if states.dtype == torch.float64 else torch.float32
        cos, sin = self.angles(position_ids, dtype)
        pairs = len(self.inv_freq)
        first, second = states[..., :pairs].to(dtype), states[..., pairs : 2 * pairs].to(dtype)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat([half.to(states.dtype) for half in rotated] + [states[..., 2 * pairs :]], dim=-1)

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
        partial_rotary_factor: rotated fraction of the head, in (0, 1]; None takes the model's own, or 1.
        scaling: transformers' own description of a scaling, `{"rope_type": ..., "factor": ..., ...}`, with `rope_type`
            one of default, linear, ntk, dynamic, yarn, llama3. `original_max_position_embeddings`, in tokens, is read
            from the model where it is left out, and recorded. None keeps the scaling that the model has.
    """

    theta: float | None = None
    partial_rotary_factor: float | None = None
    scaling: dict[str, Any] | None = None

    name: ClassVar[str] = "rope"
    label: ClassVar[str] = "Rotary"
    module: ClassVar[Callable[..., Encoding]] = RotaryEncoding

    def __post_init__(self) -> None:
        """Check the fields and bring `scaling` into one spelling; raises ConfigError."""
        if self.theta is not None and not (_is_number(self.theta) and self.theta > 1):
            raise ConfigError(f"RoPE.theta must be a finite number above 1, was: {self.theta!r}")
        factor = self.partial_rotary_factor
        if factor is not None and not (_is_number(factor) and 0 < factor <= 1):
            raise ConfigError(f"RoPE.partial_rotary_factor must lie in (0, 1], was: {factor!r}")
        if self.scaling is not None:
            object.__setattr__(self, "scaling", _checked(self.scaling))

    def check(self, geometry: Geometry) -> None:
        """Raise ConfigError where the rotated width is odd or zero, or a factor is at odds with the lengths."""
        dim = self.rotary_dim(geometry)
        if dim < 2 or dim % 2:
            raise ConfigError(
                f"rotary width must be even and at least 2, was: {dim} (head_dim {geometry.head_dim} times "
                f"partial_rotary_factor {self.partial_rotary_factor or 1.0})"
            )
        if dim == 2 and (self.scaling or {}).get("rope_type") in ("ntk", "dynamic"):
            raise ConfigError("NTK scaling needs a rotary width above 2: its exponent is dim / (dim - 2)")

    def rotary_dim(self, geometry: Geometry) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(geometry.head_dim * (self.partial_rotary_factor or 1.0))

    def original_length(self, geometry: Geometry) -> int:
        """Return the length in tokens that the frequencies were trained for."""
        return int((self.scaling or {}).get(_ORIGINAL, geometry.max_position_embeddings))

    def frequencies(self, geometry: Geometry, *, length: int = 0) -> tuple[tuple[float, ...], float]:
        """Return the radians per token of every pair and the attention factor, for a text of `length` tokens."""
        theta, dim = self.theta or 10000.0, self.rotary_dim(geometry)
        if not self.scaling or self.scaling["rope_type"] == "default":
            return tuple(frequencies(theta, dim)), 1.0
        scaling = {_ORIGINAL: geometry.max_position_embeddings, **self.scaling}
        scaled, attention_factor = KINDS[scaling["rope_type"]].formula(theta, dim, scaling, length)
        return tuple(scaled), attention_factor

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> RoPE:
        """Fill in theta, rotated fraction, scaling and original length from the model."""
        own = dict(rope_parameters or {})
        theta = self.theta or own.pop("rope_theta", None) or 10000.0
        factor = self.partial_rotary_factor or own.pop("partial_rotary_factor", None) or 1.0
        scaling = self.scaling
        if scaling is None and own.get("rope_type", "default") != "default":
            scaling = {key: own[key] for key in own if key not in ("rope_theta", "partial_rotary_factor")}
        if scaling and _ORIGINAL in KINDS.get(scaling["rope_type"], _Kind(_linear)).keys:
            scaling = {**scaling, _ORIGINAL: scaling.get(_ORIGINAL) or geometry.max_position_embeddings}
        return dataclasses.replace(self, theta=float(theta), partial_rotary_factor=float(factor), scaling=scaling)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        """Return transformers' own complete description of this encoding; static NTK is a theta of its own there."""
        scaling, theta = dict(self.scaling or {"rope_type": "default"}), self.theta or 10000.0
        if scaling["rope_type"] == "ntk":
            theta = ntk_theta(theta, self.rotary_dim(geometry), scaling["factor"])
            scaling = {"rope_type": "default"}
        return {**scaling, "rope_theta": theta, "partial_rotary_factor": self.partial_rotary_factor or 1.0}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _checked(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return `scaling` with `rope_type` for the legacy `type`; raises ConfigError on anything unknown or missing."""
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"RoPE.scaling must be a dict such as {{'rope_type': 'linear', 'factor': 2.0}}: {scaling!r}")
    fields = dict(scaling)
    rope_type = fields.pop("rope_type", fields.pop("type", None))
    known = ["default", *KINDS]
    if rope_type not in known:
        raise ConfigError(f"unknown rope_type {rope_type!r}; {did_you_mean(str(rope_type), known)}")
    if rope_type == "default":
        if fields:
            raise ConfigError(f"rope_type 'default' takes no other key, got: {sorted(fields)}")
        return {"rope_type": "default"}
    kind = KINDS[rope_type]
    for key in fields:
        if key not in kind.keys:
            raise ConfigError(f"rope_type {rope_type!r} has no key {key!r}; {did_you_mean(key, kind.keys)}")
    for key in ("factor", *kind.required):
        if key not in fields:
            raise ConfigError(f"rope_type {rope_type!r} needs the key {key!r}, got: {sorted(fields)}")
    for key, value in fields.items():
        if key != "truncate" and value is not None and not (_is_number(value) and value > 0):
            raise ConfigError(f"RoPE.scaling[{key!r}] must be a positive number, was: {value!r}")
    if fields["factor"] < 1:
        raise ConfigError(f"RoPE.scaling['factor'] must be at least 1, was: {fields['factor']!r}")
    if _ORIGINAL in fields:
        if int(fields[_ORIGINAL]) != fields[_ORIGINAL]:
            raise ConfigError(f"RoPE.scaling[{_ORIGINAL!r}] must be a whole number of tokens: {fields[_ORIGINAL]!r}")
        fields[_ORIGINAL] = int(fields[_ORIGINAL])
    if rope_type == "llama3" and fields["high_freq_factor"] <= fields["low_freq_factor"]:
        raise ConfigError("rope_type 'llama3' needs high_freq_factor above low_freq_factor")
    return {"rope_type": rope_type, **{key: fields[key] for key in fields if fields[key] is not None}}
