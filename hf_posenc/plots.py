"""Plots of length and position curves, legible in print, in grey and to the colour-blind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import patheffects, rc_context, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from hf_posenc.evaluation import LengthCurve, PositionCurve

# Okabe and Ito's palette, without the yellow that vanishes on white; markers tell the lines apart in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D")
_MARKERS = ("o", "s", "D", "^", "v", "P", "h")
_DASHES: Any = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
_DASH_NAMES = ("solid", "dashed", "dotted", "dash-dotted")
STYLE: Any = {  # matplotlib types the keys one by one
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.titleweight": "bold",
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}
GREY = "#666666"
_HALO = [patheffects.withStroke(linewidth=3, foreground="white")]
_LABEL_POINTS = 13.0  # height of a line of label text


def plot_lengths(
    curves: Sequence[LengthCurve],
    path: Path | str,
    *,
    title: str = "Perplexity against length",
) -> Path:
    """Draw perplexity against window length on log axes into a PNG and return its path.

    One line a model with its 95 % band over documents; the trained lengths are marked; a model that cannot go further
    ends in a cross that says where. Of several protocols the last is drawn solid, the others broken, in the model's
    colour.
    """
    colours = {name: index for index, name in enumerate(dict.fromkeys(curve.name for curve in curves))}
    protocols = list(dict.fromkeys(curve.protocol for curve in curves))[::-1]
    with rc_context(STYLE):
        figure, axes = _canvas()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for curve in curves:
            _draw_lengths(axes, curve, colours[curve.name], _DASHES[protocols.index(curve.protocol) % len(_DASHES)])
        _length_axis(axes, sorted({length for curve in curves for length in curve.lengths}))
        _value_axis(axes)
        _mark_trained(axes, sorted({curve.trained_length for curve in curves if curve.trained_length}))
        axes.set_title(title, pad=24)
        axes.text(0, 1.03, _subtitle(curves, protocols), transform=axes.transAxes, color=GREY, fontsize=9)
        axes.set_xlabel("window length in tokens")
        axes.set_ylabel("perplexity (lower is better)")
        _label_lines(figure, axes, _ends([curve for curve in curves if curve.protocol == protocols[0]], colours))
        return _save(figure, path)


def plot_positions(
    curves: Sequence[PositionCurve],
    path: Path | str,
    *,
    title: str = "Loss by position in the window",
) -> Path:
    """Draw mean nats per token against position, positions on a log axis, into a PNG and return its path."""
    with rc_context(STYLE):
        figure, axes = _canvas()
        axes.set_xscale("log", base=2)
        ends = []
        for index, curve in enumerate(curves):
            # Position p has p tokens before its input; counting from 1 keeps the first one on a log axis.
            middles = [math.sqrt((a + 1) * b) for a, b in pairwise(curve.edges)]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(middles, curve.nll, color=colour, linewidth=2)
            if curve.low is not None and curve.high is not None:
                axes.fill_between(middles, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
            ends.append((middles[-1], curve.nll[-1], curve.name, colour, True))
        longest = max(curve.length for curve in curves)
        _length_axis(axes, [2**power for power in range(math.ceil(math.log2(longest)) + 1)])
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
        _mark_trained(axes, sorted({curve.trained_length for curve in curves if curve.trained_length}))
        axes.set_title(title, pad=24)
        documents = " to ".join(f"{n:,}" for n in sorted({curve.n_documents for curve in curves}))
        note = f"{documents} documents; bands: 95 % over documents"
        axes.text(0, 1.03, note, transform=axes.transAxes, color=GREY, fontsize=9)
        axes.set_xlabel("position in the window (first token = 1)")
        axes.set_ylabel("mean loss in nats per token (lower is better)")
        _label_lines(figure, axes, ends)
        return _save(figure, path)


def _canvas() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, 5.2), dpi=160, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    axes = figure.add_subplot()
    axes.margins(y=0.1)
    return figure, axes


# x, y, text, colour, and whether the line reaches the right edge
_End = tuple[float, float, str, str, bool]


def _draw_lengths(axes: Axes, curve: LengthCurve, index: int, dashes: Any) -> None:
    lengths = sorted(curve.ppl)
    colour = COLOURS[index % len(COLOURS)]
    marker = _MARKERS[index % len(_MARKERS)]
    values = [curve.ppl[length] for length in lengths]
    if not values:
        return
    look: Any = {"color": colour, "marker": marker, "markeredgecolor": "white", "linestyle": dashes}
    axes.plot(lengths, values, **look, markersize=5.5, linewidth=2, zorder=3)
    bands = [(length, *band) for length in lengths if (band := curve.ppl_interval[length]) is not None]
    if bands and dashes == _DASHES[0]:
        at, low, high = zip(*bands, strict=True)
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0, zorder=2)
    if _stops(curve):
        axes.plot(lengths[-1:], values[-1:], color=colour, marker="x", markersize=11, markeredgewidth=2.6, zorder=4)


def _stops(curve: LengthCurve) -> bool:
    """Whether the model has values, and was refused at a length beyond the last of them."""
    return bool(curve.ppl) and max(curve.refused, default=0) > max(curve.ppl)


def _ends(curves: Sequence[LengthCurve], colours: Mapping[str, int]) -> list[_End]:
    last = max(length for curve in curves for length in curve.lengths)
    ends: list[_End] = []
    for curve in curves:
        if not curve.ppl:
            continue
        at = max(curve.ppl)
        text = f"{curve.name}: stops at {at:,}" if _stops(curve) else curve.name
        ends.append((at, curve.ppl[at], text, COLOURS[colours[curve.name] % len(COLOURS)], at == last))
    return ends


def _subtitle(curves: Sequence[LengthCurve], protocols: Sequence[str]) -> str:
    first = curves[0]
    lines = zip(protocols, _DASH_NAMES * len(protocols), strict=False)
    parts = [f"{dashes}: {protocol}" for protocol, dashes in lines] if len(protocols) > 1 else list(protocols)
    counts = [count for curve in curves for count in curve.n_tokens.values()]
    banded = any(error is not None for curve in curves for error in curve.stderr.values())
    parts += [f"{max(counts, default=0):,} tokens in {first.n_documents:,} documents"]
    parts += ["bands: 95 % over documents"] if banded else []
    none = dict.fromkeys(curve.name for curve in curves if not curve.ppl)
    parts += [f"no value: {', '.join(none)}"] if none else []
    return " · ".join(parts)


def _length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """Put a tick at each length and keep all of them in view, also those that have no value."""
    margin = max((lengths[-1] / lengths[0]) ** 0.05, 1.1)
    axes.set_xlim(lengths[0] / margin, lengths[-1] * margin)
    axes.xaxis.set_major_locator(ticker.FixedLocator([float(length) for length in lengths]))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{int(value):,}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def _value_axis(axes: Axes) -> None:
    if not axes.lines:  # every model was refused everywhere: the subtitle says so
        axes.set_ylim(1.0, 10.0)
    low, high = axes.get_ylim()
    steps = (1, 2, 5) if high / low > 12 else (1, 1.5, 2, 3, 4, 5, 7)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) < 3:
        inside = [float(tick) for tick in ticker.MaxNLocator(6).tick_values(low, high) if low <= tick <= high]
    if len(inside) > 10:
        inside = [10.0**decade for decade in decades if low <= 10.0**decade <= high]
    axes.yaxis.set_major_locator(ticker.FixedLocator(inside))
    axes.yaxis.set_major_formatter(
        ticker.FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}")
    )
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)


def _mark_trained(axes: Axes, lengths: Sequence[int]) -> None:
    left, right = axes.get_xlim()
    for length in lengths:
        if left <= length <= right:
            axes.axvline(length, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
            axes.annotate(
                f"trained length {length:,}",
                (length, 1),
                xycoords=("data", "axes fraction"),
                xytext=(5, -3),
                textcoords="offset points",
                va="top",
                fontsize=9,
                color=GREY,
                path_effects=_HALO,
            )


def _label_lines(figure: Figure, axes: Axes, ends: Sequence[_End]) -> None:
    """Write each name beside the end of its line, moved apart where they would cover each other."""
    figure.draw_without_rendering()  # fixes the axes, so that data can be turned into points
    for reaches_edge in (True, False):
        members = sorted((end for end in ends if end[4] is reaches_edge), key=lambda end: end[1])
        heights = [float(axes.transData.transform((x, y))[1]) * 72 / figure.dpi for x, y, *_ in members]
        # A line that stops has others going on beside it: its name stands below, where there is room.
        drop = 0.0 if reaches_edge else -_LABEL_POINTS
        placed = _apart([height + drop for height in heights], _LABEL_POINTS)
        for (x, y, text, colour, _), height, place in zip(members, heights, placed, strict=True):
            moved = reaches_edge and abs(place - height) > 4
            axes.annotate(
                text,
                (x, y),
                xytext=(18.0 if reaches_edge else 10.0, place - height),
                textcoords="offset points",
                va="center",
                color=colour,
                fontweight="bold",
                fontsize=9.5,
                annotation_clip=False,
                path_effects=_HALO,
                arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkB": 3} if moved else None,
                zorder=5,
            )


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Return ascending places at least `gap` apart, as near as can be (least squares) to the ascending `wanted`."""
    # Without the gaps the places need only ascend: neighbours in the wrong order share their mean.
    blocks: list[list[float]] = []
    for index, place in enumerate(wanted):
        blocks.append([place - index * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            last = blocks.pop()
            blocks[-1].extend(last)
    level = [fmean(block) for block in blocks for _ in block]
    return [place + index * gap for index, place in enumerate(level)]


def _save(figure: Figure, path: Path | str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path
