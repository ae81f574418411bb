"""Loss by position in the window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib import rc_context

from hf_posenc.evaluation import PositionCurve
from hf_posenc.evaluation.result import check_alike
from hf_posenc.plots.canvas import COLOURS, STYLE, canvas, head, label_lines, length_axis, mark_trained, rule, save
from hf_posenc.plots.ticks import counted


def plot_positions(
    curves: Sequence[PositionCurve],
    path: Path | str,
    *,
    title: str = "Loss by position in the window",
) -> list[Path]:
    """Draw mean nats per token against position, positions on a log axis; return the PNG and the SVG.

    Raises:
        DataError: there are no curves, or they cannot stand side by side (`evaluation.result.check_alike`).
    """
    check_alike(curves, ("text_hash", "bos_policy"))
    with rc_context(STYLE):
        figure, axes = canvas()
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
        length_axis(axes, [2**power for power in range(math.ceil(math.log2(longest)) + 1)])
        rule(axes)
        mark_trained(axes, sorted({curve.trained_length for curve in curves if curve.trained_length}))
        banded = any(curve.low is not None for curve in curves)
        bands = "; bands: 95 % over documents" if banded else ""
        head(axes, title, counted(curves[0].n_documents, "document") + bands)
        axes.set_xlabel("position in the window (first token = 1)")
        axes.set_ylabel("mean loss in nats per token (lower is better)")
        label_lines(figure, axes, ends)
        return save(figure, path)
