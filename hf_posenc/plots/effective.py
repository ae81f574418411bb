"""How far more context goes on helping, model by model, beside the length each was trained for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context

from hf_posenc.errors import DataError
from hf_posenc.evaluation import LengthCurve
from hf_posenc.plots.canvas import COLOURS, STYLE, canvas, head, length_axis, save
from hf_posenc.plots.ticks import cut_short


def plot_effective_lengths(
    curves: Sequence[LengthCurve], path: Path | str, *, title: str = "Effective context length"
) -> list[Path]:
    """Draw one bar a curve, from the shortest length to the effective one; return the PNG and the SVG.

    A tick marks the trained length. A bar that reaches the longest length that was measured could go on, and says so.

    Raises:
        DataError: none of the curves has an effective length.
    """
    shown = [curve for curve in curves if curve.effective_length is not None]
    if not shown:
        raise DataError("None of these curves has an effective length: nothing could be measured.")
    lengths = sorted({length for curve in shown for length in curve.lengths})
    with rc_context(STYLE):
        figure, axes = canvas(high=1.9 + 0.42 * len(shown))
        length_axis(axes, lengths)
        for row, curve in enumerate(shown):
            colour = COLOURS[row % len(COLOURS)]
            effective = curve.effective_length or 0
            axes.plot([lengths[0], effective], [row, row], color=colour, linewidth=12, solid_capstyle="butt")
            beyond = " or more" if effective == max(curve.ppl) and effective == lengths[-1] else ""
            axes.annotate(
                f"{effective:,}{beyond}", (effective, row), xytext=(6, 0), textcoords="offset points", va="center"
            )
            if curve.trained_length:
                axes.plot([curve.trained_length], [row], color="black", marker="|", markersize=20, markeredgewidth=2)
        axes.set_yticks(range(len(shown)), [cut_short(curve.name, 40) for curve in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)  # the first on top, and none at the edge
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("context in tokens")
        head(axes, title, "up to here the loss stays within 1 % of that at the trained length, which the tick marks")
        return save(figure, path)
