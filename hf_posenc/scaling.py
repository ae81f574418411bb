"""How a rotary model is slowed down for longer texts: the frequencies of every `rope_type`, as plain numbers.

The names and keys are transformers' own wherever it has them. Where a paper and its released code differ, the choice is
a named key whose default is what the released code does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_posenc.errors import ConfigError, did_you_mean

Frequencies = list[float]
Scaling = Mapping[str, Any]

ORIGINAL = "original_max_position_embeddings"
MODES = ("consistent", "frozen", "hf_compat")
"""What a scaling that depends on the length of the text takes for that length: for every query the text up to it; one
length for good, `length`; or, as transformers does, the longest position of the call, with cached keys left turned by
the length of the call in which they came."""


def frequencies(theta: float, dim: int) -> Frequencies:
    """Return theta^(-2k/dim) for k < dim/2, in radians per token."""
    return [theta ** (-2 * k / dim) for k in range(dim // 2)]


def ntk_theta(theta: float, dim: int, factor: float) -> float:
    """Return theta * factor^(dim/(dim-2)), with which the slowest pair is slowed by exactly `factor` (bloc97, 2023)."""
    return float(theta * factor ** (dim / (dim - 2)))


def grown_factor(scaling: Scaling, length: int) -> float:
    """Return the NTK factor of `dynamic` for a text of `length` tokens: 1 up to the original length, then growing."""
    original = scaling[ORIGINAL]
    return float(scaling["factor"] * max(length, original) / original - (scaling["factor"] - 1))


def resonant(frequency: float) -> float:
    """Return the frequency whose wavelength is the nearest whole number of tokens; 0 stays.

    Wang et al. 2024, "Resonance RoPE", section 4: a pair then meets no phase that it has not met in its first turn.
    """
    return 2 * math.pi / round(2 * math.pi / frequency) if frequency else 0.0


def _linear(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    """Position interpolation, Chen et al. 2023, equation 4."""
    return [f / scaling["factor"] for f in frequencies(theta, dim)], 1.0


def _ntk(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    return frequencies(ntk_theta(theta, dim, scaling["factor"]), dim), 1.0


def _dynamic(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    """NTK with a factor that grows with the text (emozilla, 2023); no change up to the original length."""
    return frequencies(ntk_theta(theta, dim, grown_factor(scaling, length)), dim), 1.0


def _slowed(frequency: float, factor: float, share: float) -> float:
    """Return `share` of a frequency and the rest of its `factor`-th part; bit-equal at a factor or share of 1."""
    return frequency * (share + (1 - share) / factor)


def _kept(theta: float, dim: int, scaling: Scaling, fast: float, slow: float) -> list[float]:
    """Return how much of every pair is kept: 1 where it turns `fast` times in the original length, 0 where `slow`.

    Between them the share falls linearly, either with the pair's index (`ramp` "dimension", as in every released YaRN)
    or with its number of turns ("rotations", Peng et al. 2023, equation 18). By pair, the two ends are rounded outwards
    to whole pairs unless `truncate` is False (gpt-oss).
    """
    original = scaling[ORIGINAL]
    if scaling.get("ramp") == "rotations":
        turns = [original * f / (2 * math.pi) for f in frequencies(theta, dim)]
        return [min(max((turn - slow) / (fast - slow), 0.0), 1.0) for turn in turns]

    def pair_that_turns(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(fast), pair_that_turns(slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    return [1 - min(max((k - low) / width, 0.0), 1.0) for k in range(dim // 2)]


def _yarn(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    """YaRN, Peng et al. 2023, section 3.4.

    `mix` says whether frequencies are mixed ("linear", as released) or their wavelengths ("harmonic"). The attention
    factor is 0.1 ln(factor) + 1; with both `mscale` and `mscale_all_dim` it is the ratio of that of the one to that of
    the other (DeepSeek); `attention_factor` sets it outright.
    """
    factor = scaling["factor"]
    kept = _kept(theta, dim, scaling, scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
    scaled = []
    for f, share in zip(frequencies(theta, dim), kept, strict=True):
        harmonic = scaling.get("mix") == "harmonic"
        scaled.append(f / (factor * (1 - share) + share) if harmonic else _slowed(f, factor, share))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        both = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = mscale(both[0]) / mscale(both[1]) if both[0] and both[1] else mscale(1.0)
    return scaled, float(attention_factor)


def _ntk_by_parts(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    """YaRN without its temperature, by rotations as in the paper's equations 17-20, or an older form of its repository.

    The older form goes from interpolation to NTK between 0.75 and 1.25 turns, and from there to no change between 2
    and 16, both by index.
    """
    if scaling.get("form", "paper") == "paper":
        return _yarn(theta, dim, {"ramp": "rotations", **scaling, "attention_factor": 1.0}, length)
    slowed, ntk = (formula(theta, dim, scaling, length)[0] for formula in (_linear, _ntk))
    inner = _kept(theta, dim, scaling, 1.25, 0.75)
    outer = _kept(theta, dim, scaling, 16, 2)
    mixed = [s + (n - s) * share for s, n, share in zip(slowed, ntk, inner, strict=True)]
    plain = frequencies(theta, dim)
    return [m + (f - m) * share for m, f, share in zip(mixed, plain, outer, strict=True)], 1.0


def _longrope(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    """LongRoPE, Ding et al. 2024, equation 3: searched divisors of the pairs, others past the original length."""
    original = scaling[ORIGINAL]
    divisors = scaling["long_factor" if length > original else "short_factor"]
    if len(divisors) != dim // 2:
        raise ConfigError(f"rope_type 'longrope' needs {dim // 2} factors, one a pair, got: {len(divisors)}")
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + max(math.log(scaling["factor"]), 0) / math.log(original))
    return [f / divisor for f, divisor in zip(frequencies(theta, dim), divisors, strict=True)], float(attention_factor)


def _llama3(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    """Llama 3.1: pairs with short wavelengths stay, those with long ones are interpolated, the rest blended."""
    factor, original = scaling["factor"], scaling[ORIGINAL]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    scaled = []
    for f in frequencies(theta, dim):
        turns = original * f / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append(_slowed(f, factor, keep))
    return scaled, 1.0


def _proportional(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    """p-RoPE, Barbero et al. 2025, section 6.1: the fastest pairs turn as in a whole head, the others not at all."""
    turning = int(scaling["partial_rotary_factor"] * dim // 2)
    plain = frequencies(theta, dim)
    return [f / scaling.get("factor", 1.0) if k < turning else 0.0 for k, f in enumerate(plain)], 1.0


@dataclass(frozen=True)
class Kind:
    """One `rope_type`: its formula and the keys that it takes beside `rope_type`."""

    formula: Callable[[float, int, Scaling, int], tuple[Frequencies, float]]
    required: tuple[str, ...] = ("factor",)
    optional: tuple[str, ...] = ()
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def keys(self) -> set[str]:
        """Return the keys that a description of this type may have."""
        return {"rope_type", "resonance", *self.required, *self.optional, *self.choices}


def _default(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    return frequencies(theta, dim), 1.0


_RAMP = {"ramp": ("dimension", "rotations"), "mix": ("linear", "harmonic"), "truncate": (True, False)}
_BETAS = ("beta_fast", "beta_slow")
KINDS: dict[str, Kind] = {
    "default": Kind(_default, required=()),
    "linear": Kind(_linear),
    "ntk": Kind(_ntk),
    "dynamic": Kind(_dynamic, optional=(ORIGINAL, "length"), choices={"mode": MODES}),
    "ntk_by_parts": Kind(
        _ntk_by_parts, optional=(ORIGINAL, *_BETAS), choices={"form": ("paper", "repository"), "ramp": _RAMP["ramp"]}
    ),
    "yarn": Kind(_yarn, optional=(ORIGINAL, "attention_factor", *_BETAS, "mscale", "mscale_all_dim"), choices=_RAMP),
    "longrope": Kind(
        _longrope,
        required=("short_factor", "long_factor"),
        optional=(ORIGINAL, "factor", "attention_factor", "length"),
        choices={"mode": MODES},
    ),
    "llama3": Kind(_llama3, required=("factor", "low_freq_factor", "high_freq_factor"), optional=(ORIGINAL,)),
    "proportional": Kind(_proportional, required=(), optional=("factor",)),
}


def scaled_frequencies(theta: float, dim: int, scaling: Scaling, length: int) -> tuple[Frequencies, float]:
    """Return the radians per token of every pair, and the factor on cosine and sine, for a text of `length` tokens.

    Args:
        theta: base of the frequencies.
        dim: rotated dimensions of a head.
        scaling: as `checked` returns it, with the original length where the type has one, and with
            `partial_rotary_factor` for `proportional`.
        length: tokens; 0 for a text within the original length.

    Raises:
        ConfigError: `longrope` with another number of factors than pairs.
    """
    length = scaling["length"] if scaling.get("mode") == "frozen" else length
    found, attention_factor = KINDS[scaling["rope_type"]].formula(theta, dim, scaling, length)
    return [resonant(f) for f in found] if scaling.get("resonance") else found, attention_factor


def is_number(value: object) -> bool:
    """Tell whether this is a finite number, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def checked(scaling: Scaling) -> dict[str, Any]:
    """Return `scaling` with `rope_type` for the legacy `type`, without empty keys.

    Raises:
        ConfigError: anything unknown, missing or out of range.
    """
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"RoPE.scaling must be a dict such as {{'rope_type': 'linear', 'factor': 2.0}}: {scaling!r}")
    given = {key: value for key, value in scaling.items() if value is not None}
    rope_type = given.pop("rope_type", given.pop("type", None))
    if rope_type not in KINDS:
        raise ConfigError(f"unknown rope_type {rope_type!r}; {did_you_mean(str(rope_type), KINDS)}")
    kind = KINDS[rope_type]
    for key in given:
        if key not in kind.keys:
            raise ConfigError(f"rope_type {rope_type!r} has no key {key!r}; {did_you_mean(key, kind.keys)}")
    for key in kind.required:
        if key not in given:
            raise ConfigError(f"rope_type {rope_type!r} needs the key {key!r}, got: {sorted(given)}")
    fields = {key: _value(key, value, kind) for key, value in given.items()}
    if rope_type == "llama3" and fields["high_freq_factor"] <= fields["low_freq_factor"]:
        raise ConfigError("rope_type 'llama3' needs high_freq_factor above low_freq_factor")
    if rope_type == "longrope" and not {"factor", "attention_factor"} & fields.keys():
        raise ConfigError("rope_type 'longrope' needs 'factor', or an 'attention_factor' of its own")
    if len(fields.get("short_factor", ())) != len(fields.get("long_factor", ())):
        raise ConfigError("rope_type 'longrope' needs as many entries in 'short_factor' as in 'long_factor'")
    if fields.get("beta_fast", 32) <= fields.get("beta_slow", 1):
        raise ConfigError(f"rope_type {rope_type!r} needs beta_fast above beta_slow")
    if (fields.get("mode") == "frozen") != ("length" in fields):
        raise ConfigError(
            "mode 'frozen' needs 'length', the tokens of the text that it is frozen at; no other takes it"
        )
    return {"rope_type": rope_type, **fields}


def _value(key: str, value: Any, kind: Kind) -> Any:
    """Return one value of a scaling as it is kept; raises ConfigError where it is out of range."""
    choices = {**kind.choices, "resonance": (True, False)}.get(key)
    if choices is not None:
        if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
            raise ConfigError(f"RoPE.scaling[{key!r}] must be one of {', '.join(map(repr, choices))}, was: {value!r}")
        return value
    if key in ("short_factor", "long_factor"):
        if not isinstance(value, list | tuple) or not all(is_number(one) and one > 0 for one in value):
            raise ConfigError(f"RoPE.scaling[{key!r}] must be a list of positive numbers, was: {value!r}")
        return list(value)
    if not (is_number(value) and value > 0):
        raise ConfigError(f"RoPE.scaling[{key!r}] must be a positive number, was: {value!r}")
    if key == "factor" and value < 1:
        raise ConfigError(f"RoPE.scaling['factor'] must be at least 1, was: {value!r}")
    if key in (ORIGINAL, "length"):
        if int(value) != value:
            raise ConfigError(f"RoPE.scaling[{key!r}] must be a whole number of tokens: {value!r}")
        return int(value)
    return value
