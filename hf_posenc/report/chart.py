"""A plot as plain numbers for the template of the page: places in an SVG, and the words that pointing shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_posenc.evaluation import LengthCurve
from hf_posenc.plots.canvas import COLOURS, apart
from hf_posenc.plots.lengths import named, stops
from hf_posenc.plots.quantities import ACCURACY, BITS_PER_BYTE, GAIN, PERPLEXITY, RATIO, Quantity, bands, finite
from hf_posenc.plots.ticks import cut_short, in_short, readable, value_ticks
from hf_posenc.report.comparability import tokenizers_differ
from hf_posenc.report.table import in_figures

WIDTH, HEIGHT = 920, 430
LEFT, RIGHT, TOP, BOTTOM = 66, 190, 14, 46  # room around the lines, the right one for names
_LABEL_HEIGHT = 16.0
_NAME = 24  # characters that there is room for


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve in the SVG: `path` and `band` are path data, `dots` and `end` places, `cross` where it had to stop."""

    model: int
    protocol: int
    colour: int
    path: str
    band: str
    dots: list[tuple[float, float]]
    end: tuple[float, float, str] | None
    cross: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One quantity of one panel.

    Attributes:
        quantity: what is drawn.
        lines: one a curve that has values.
        x_ticks, y_ticks: (place, text).
        trained: (place, length in words) of the trained lengths.
        columns: for each length, what pointing at it shows, as plain JSON data.
    """

    quantity: Quantity
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    trained: list[tuple[float, str]]
    columns: list[dict[str, object]]


def charts(curves: Sequence[LengthCurve]) -> list[Chart]:
    """Return one chart for each quantity that these curves share an axis in; none where nothing has a value.

    Perplexity and what rests on it is left out where tokenizers differ, since it does not compare across them.
    """
    per_token = [] if tokenizers_differ(curves) else [PERPLEXITY]
    wanted = [*per_token, BITS_PER_BYTE, RATIO, GAIN, ACCURACY]
    return [_chart(curves, quantity) for quantity in wanted if any(finite(quantity.values(curve)) for curve in curves)]


def _chart(curves: Sequence[LengthCurve], quantity: Quantity) -> Chart:
    lengths = sorted({length for curve in curves for length in curve.lengths})
    low, high = _around(_shown(curves, quantity), log=quantity.log)
    x = _scale(lengths[0] / 1.08, lengths[-1] * 1.08, LEFT, WIDTH - RIGHT, log=True)
    y = _scale(low, high, HEIGHT - BOTTOM, TOP, log=quantity.log)
    models = list(dict.fromkeys(curve.name for curve in curves))
    protocols = _protocols(curves)
    numbers = [(curve, models.index(curve.name), protocols.index(curve.protocol)) for curve in curves]
    ends = _ends(named(curves, quantity), quantity, lengths[-1], x, y)
    trained = sorted({curve.trained_length for curve in curves if curve.trained_length})
    return Chart(
        quantity=quantity,
        lines=[_line(curve, quantity, model, protocol, ends, x, y) for curve, model, protocol in numbers],
        x_ticks=[(x(length), f"{length:,}") for length in readable(lengths)],
        y_ticks=[(y(tick), in_short(tick)) for tick in value_ticks(low, high, log=quantity.log)],
        trained=[(x(length), f"{length:,}") for length in trained if lengths[0] <= length <= lengths[-1]],
        columns=[_column(curves, quantity, length, x(length)) for length in lengths],
    )


def _shown(curves: Sequence[LengthCurve], quantity: Quantity) -> list[float]:
    """Return all numbers that the axis has to show: values, and the bands of the protocol that is drawn with them."""
    values = [value for curve in curves for value in finite(quantity.values(curve)).values()]
    solid = [curve for curve in curves if curve.protocol == _protocols(curves)[0]]
    return values + [end for curve in solid for _, *ends in bands(curve, quantity) for end in ends]


def _protocols(curves: Sequence[LengthCurve]) -> list[str]:
    """Return the protocols in the order of their dashes: the last one measured is drawn solid."""
    return list(dict.fromkeys(curve.protocol for curve in curves))[::-1]


def _around(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    """Return the ends of the axis, a little outside the values."""
    low, high = min(values), max(values)
    if log:
        room = max((high / low) ** 0.06, 1.02)
        return low / room, high * room
    room = max((high - low) * 0.06, abs(high) * 0.01, 1e-3)
    return low - room, high + room


def _scale(low: float, high: float, start: float, stop: float, *, log: bool) -> Callable[[float], float]:
    """Return value -> place in the SVG, to a tenth of a pixel."""
    bend: Callable[[float], float] = math.log if log else float
    first, span = bend(low), bend(high) - bend(low)
    return lambda value: round(start + (stop - start) * (bend(value) - first) / span, 1)


def _line(
    curve: LengthCurve,
    quantity: Quantity,
    model: int,
    protocol: int,
    ends: dict[tuple[str, str], tuple[float, float, str]],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> Line:
    values = finite(quantity.values(curve))
    dots = [(x(length), y(value)) for length, value in values.items()]
    shaded = bands(curve, quantity) if protocol == 0 else []
    outline = [(x(length), y(low)) for length, low, _ in shaded] + [(x(at), y(high)) for at, _, high in shaded[::-1]]
    return Line(
        model=model,
        protocol=protocol,
        colour=model % len(COLOURS),
        path=_path(dots),
        band=_path(outline) + "Z" if len(shaded) > 1 else "",
        dots=dots,
        end=ends.get((curve.name, curve.protocol)),
        cross=dots[-1] if dots and stops(curve) else None,
    )


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in places) if places else ""


def _ends(
    curves: Sequence[LengthCurve],
    quantity: Quantity,
    longest: int,
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> dict[tuple[str, str], tuple[float, float, str]]:
    """Return where each name stands, beside the end of the curve's line, and what it says, by name and protocol."""
    found: dict[tuple[str, str], tuple[float, float, str]] = {}
    lasts = [(curve, *max(finite(quantity.values(curve)).items())) for curve in curves]
    for at_edge in (True, False):
        group = sorted(((y(value), at, curve) for curve, at, value in lasts if (at == longest) is at_edge), key=_height)
        # A line that stops has others going on beside it: its name stands below, where there is room.
        drop = 0.0 if at_edge else _LABEL_HEIGHT
        heights = apart([height + drop for height, *_ in group], _LABEL_HEIGHT)
        for (_, at, curve), height in zip(group, heights, strict=True):
            name = cut_short(curve.name, _NAME)
            text = f"{name}: stops at {at:,}" if stops(curve) else name
            found[curve.name, curve.protocol] = (x(at) + 10, round(height, 1), text)
    return found


def _height(end: tuple[float, int, LengthCurve]) -> float:
    return end[0]


def _column(curves: Sequence[LengthCurve], quantity: Quantity, length: int, place: float) -> dict[str, object]:
    """Return what pointing at a length shows: a row a model, a cell a protocol, and why a value is missing."""
    models = list(dict.fromkeys(curve.name for curve in curves))
    protocols = _protocols(curves)
    texts = {(curve.name, curve.protocol): _text(curve, quantity, length) for curve in curves}
    rows = [
        {"model": index, "name": name, "cells": [texts.get((name, protocol), "") for protocol in protocols]}
        for index, name in enumerate(models)
    ]
    reasons = [f"{curve.name}: {curve.refused[length]}" for curve in curves if length in curve.refused]
    return {"x": place, "title": f"{length:,} tokens", "rows": rows, "reasons": list(dict.fromkeys(reasons))}


def _text(curve: LengthCurve, quantity: Quantity, length: int) -> str:
    value = quantity.values(curve).get(length)
    if value is None:
        return "none" if length in curve.refused else ""
    return in_figures(value, quantity.decimals)
