"""Where an axis has its marks, and how numbers and names are written beside it: the same on paper and on a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib import ticker

_LABEL = 0.06
"""Share of an axis of lengths that the label of one takes."""


def value_ticks(low: float, high: float, *, log: bool) -> list[float]:
    """Return three to ten round numbers from `low` to `high`; on a logarithmic axis both are above 0."""
    round_steps = ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
    even = [float(tick) for tick in round_steps.tick_values(low, high) if low <= tick <= high]
    if not log:
        return even
    steps = (1, 2, 5) if high / low > 12 else (1, 1.5, 2, 3, 4, 5, 7)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [tick for decade in decades for step in steps if low <= (tick := step * 10.0**decade) <= high]
    if len(inside) > 10:
        return [10.0**decade for decade in decades if low <= 10.0**decade <= high]
    return inside if len(inside) >= 3 else even


def in_short(value: float) -> str:
    """Return a mark in plain figures: 1,000 and 0.25, and 1e+12 where figures would run on."""
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:g}"


def readable(lengths: Sequence[int]) -> list[int]:
    """Return those of ascending lengths that can be written below a logarithmic axis without covering each other.

    The longest always, and from there down each that is far enough from the one before.
    """
    room = _LABEL * math.log(lengths[-1] / lengths[0])
    kept = [lengths[-1]]
    for length in lengths[-2::-1]:
        if math.log(kept[-1] / length) >= room:
            kept.append(length)
    return kept[::-1]


def cut_short(name: str, most: int) -> str:
    """Return a name in at most so many characters, its middle left out: what tells models apart is often at an end."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[: most - 1 - half]}…{name[-half:]}"


def counted(count: int, noun: str) -> str:
    """Return "1 document" or "1,000 documents"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
