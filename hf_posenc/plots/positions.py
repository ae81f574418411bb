"""Loss by position in the window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib import rc_context

from hf_posenc.errors import DataError
from hf_posenc.evaluation import PositionCurve
from hf_posenc.evaluation.result import check_alike
from hf_posenc.plots.canvas import COLOURS, STYLE, canvas, head, label_lines, length_axis, mark_trained, rule, save


def plot_positions(
    curves: Sequence[PositionCurve],
    path: Path | str,
    *,
    title: str = "Loss by position in the window",
) -> list[Path]:
    """Draw mean nats per token against position, positions on a log axis; return the PNG and the SVG.

    Raises:
        DataError: there are no curves, or they were measured on other texts or with another BOS policy.
    """
    if not curves:
        raise DataError("There are no curves to draw. Measure at least one model.")
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
        documents = " to ".join(f"{n:,}" for n in sorted({curve.n_documents for curve in curves}))
        head(axes, title, f"{documents} documents; bands: 95 % over documents")
        axes.set_xlabel("position in the window (first token = 1)")
        axes.set_ylabel("mean loss in nats per token (lower is better)")
        label_lines(figure, axes, ends)
        return save(figure, path)
