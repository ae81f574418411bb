"""What all plots of curves share: the look, the axis of lengths, names beside lines, and the two files of a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from matplotlib import patheffects, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from hf_posenc.plots.ticks import cut_short, readable

# Okabe and Ito's palette, without the yellow that vanishes on white; markers tell the lines apart in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D")
MARKERS = ("o", "s", "D", "^", "v", "P", "h")
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
    "text.parse_math": False,  # a name may hold a dollar sign
    "svg.fonttype": "none",  # text stays text, to be searched and read aloud
    "svg.hashsalt": "hf-posenc",  # so that the same numbers make the same file
}
GREY = "#666666"
_HALO = [patheffects.withStroke(linewidth=3, foreground="white")]
_LABEL_CHARACTERS = 40
_LABEL_POINTS = 13.0  # height of a line of label text

# x, y, text, colour, and whether the line reaches the right edge
End: TypeAlias = tuple[float, float, str, str, bool]


def look(index: int) -> dict[str, str]:
    """Return colour and marker of the line with this number; those that share a colour differ in their marker."""
    marker = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
    return {"color": COLOURS[index % len(COLOURS)], "marker": marker}


def canvas(high: float = 5.2) -> tuple[Figure, Axes]:
    """Return an empty figure, 9 inches wide and this high, and its axes. Call it inside `rc_context(STYLE)`."""
    figure = Figure(figsize=(9, high), dpi=160, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    axes = figure.add_subplot()
    axes.margins(y=0.1)
    return figure, axes


def head(axes: Axes, title: str, note: str) -> None:
    """Write the title and, smaller, below it what the numbers rest on."""
    axes.set_title(title, pad=24)
    axes.text(0, 1.03, note, transform=axes.transAxes, color=GREY, fontsize=9)


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """Put a tick at each length that there is room for and keep all in view, also those that have no value."""
    axes.set_xscale("log", base=2)
    margin = max((lengths[-1] / lengths[0]) ** 0.05, 1.1)
    axes.set_xlim(lengths[0] / margin, lengths[-1] * margin)
    axes.xaxis.set_major_locator(ticker.FixedLocator([float(length) for length in readable(lengths)]))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{int(value):,}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def rule(axes: Axes) -> None:
    """Draw the grid that values are read by."""
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)


def mark_trained(axes: Axes, lengths: Sequence[int]) -> None:
    """Mark the lengths that models were trained for."""
    left, right = axes.get_xlim()
    for row, length in enumerate(length for length in lengths if left <= length <= right):
        axes.axvline(length, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"trained length {length:,}",
            (length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(5, -3 - row * _LABEL_POINTS),  # each below the one before, which may be near
            textcoords="offset points",
            va="top",
            fontsize=9,
            color=GREY,
            path_effects=_HALO,
        )


def label_lines(figure: Figure, axes: Axes, ends: Sequence[End]) -> None:
    """Write each name beside the end of its line, moved apart where they would cover each other."""
    figure.draw_without_rendering()  # fixes the axes, so that data can be turned into points
    for reaches_edge in (True, False):
        members = sorted((end for end in ends if end[4] is reaches_edge), key=lambda end: end[1])
        heights = [float(axes.transData.transform((x, y))[1]) * 72 / figure.dpi for x, y, *_ in members]
        # A line that stops has others going on beside it: its name stands below, where there is room.
        drop = 0.0 if reaches_edge else -_LABEL_POINTS
        placed = apart([height + drop for height in heights], _LABEL_POINTS)
        for (x, y, text, colour, _), height, place in zip(members, heights, placed, strict=True):
            moved = reaches_edge and abs(place - height) > 4
            axes.annotate(
                cut_short(text, _LABEL_CHARACTERS),
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


def apart(wanted: Sequence[float], gap: float) -> list[float]:
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


def save(figure: Figure, path: Path | str) -> list[Path]:
    """Write the figure as PNG and as SVG; return both, `path` with these endings. Folders are made as needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    for target, stamp in zip(paths, ("Software", "Date"), strict=True):  # the same numbers make the same bytes
        figure.savefig(target, metadata={stamp: None})
    return paths
