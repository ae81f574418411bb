"""What of a length curve can stand on an axis: the numbers, their intervals, and how the axis is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from hf_posenc.evaluation import LengthCurve

_MOST = 1e200  # what an axis can still be drawn around
Intervals: TypeAlias = Mapping[int, tuple[float, float] | None]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One number for each length of a curve.

    Attributes:
        name: in words, for headings and file names.
        axis: what stands at the axis: unit, and which way is better.
        log: whether the axis is logarithmic.
        decimals: with which a value is written.
        values: curve -> length -> number; empty where the curve has none.
        intervals: curve -> length -> 95 % interval over documents, None where there is none.
    """

    name: str
    axis: str
    log: bool
    decimals: int = 3
    values: Callable[[LengthCurve], Mapping[int, float]]
    intervals: Callable[[LengthCurve], Intervals] = lambda curve: {}


def _bits(curve: LengthCurve) -> Mapping[int, float]:
    return curve.bits_per_byte or {}


def _bits_intervals(curve: LengthCurve) -> Intervals:
    """The interval of nats per token, which scales as its mean does."""
    scales = {length: bits / curve.nll[length] for length, bits in _bits(curve).items() if curve.nll[length]}
    return {
        length: None if (ends := curve.interval[length]) is None else (ends[0] * scale, ends[1] * scale)
        for length, scale in scales.items()
    }


def _ratio(curve: LengthCurve) -> Mapping[int, float]:
    """Nothing where no length in range was measured that the others could be compared with."""
    known = {} if curve.in_range_length is None else curve.ratio
    return {length: value for length, value in known.items() if value > 1 / _MOST}


PERPLEXITY = Quantity(
    name="perplexity",
    axis="perplexity (lower is better)",
    log=True,
    decimals=2,
    values=lambda curve: curve.ppl,
    intervals=lambda curve: curve.ppl_interval,
)
BITS_PER_BYTE = Quantity(
    name="bits per byte",
    axis="bits per byte of text (lower is better)",
    log=False,
    values=_bits,
    intervals=_bits_intervals,
)
RATIO = Quantity(
    name="ratio",
    axis="perplexity relative to that at the trained length (1 = nothing lost)",
    log=True,
    values=_ratio,
)
GAIN = Quantity(
    name="gain from context",
    axis="nats per token that context saves (higher is better)",
    log=False,
    values=lambda curve: curve.gain,
)
ACCURACY = Quantity(
    name="accuracy",
    axis="share of tokens filled in right (higher is better)",
    log=False,
    values=lambda curve: curve.accuracy,
)


def finite(values: Mapping[int, float]) -> dict[int, float]:
    """Return the numbers that an axis can show: the perplexity of a model that is sure and wrong has no end."""
    return {length: value for length, value in sorted(values.items()) if abs(value) < _MOST}


def bands(curve: LengthCurve, quantity: Quantity) -> list[tuple[int, float, float]]:
    """Return (length, low, high) for each interval that an axis can show, where the value itself can be shown."""
    values, intervals = finite(quantity.values(curve)), quantity.intervals(curve)
    found = [(length, *ends) for length in values if (ends := intervals.get(length)) is not None]
    return [(length, low, high) for length, low, high in found if max(abs(low), abs(high)) < _MOST]
