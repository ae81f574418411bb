"""One number against the length of the window: a line for each model and protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context, ticker
from matplotlib.axes import Axes

from hf_posenc.evaluation import LengthCurve
from hf_posenc.plots.canvas import (
    COLOURS,
    STYLE,
    End,
    canvas,
    head,
    label_lines,
    length_axis,
    look,
    mark_trained,
    rule,
    save,
)
from hf_posenc.plots.quantities import PERPLEXITY, Quantity, bands, finite
from hf_posenc.plots.ticks import counted, in_short, value_ticks

_DASHES: Any = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
_DASH_NAMES = ("solid", "dashed", "dotted", "dash-dotted")


def plot_lengths(
    curves: Sequence[LengthCurve],
    path: Path | str,
    *,
    title: str = "Perplexity against length",
    quantity: Quantity = PERPLEXITY,
) -> list[Path]:
    """Draw a quantity against window length; return the PNG and the SVG, `path` with these endings.

    One line a model with its 95 % band over documents; the trained lengths are marked; a model that cannot go further
    ends in a cross that says where. Of several protocols the last is drawn solid, the others broken, in the model's
    colour.
    """
    colours = {name: index for index, name in enumerate(dict.fromkeys(curve.name for curve in curves))}
    protocols = list(dict.fromkeys(curve.protocol for curve in curves))[::-1]
    with rc_context(STYLE):
        figure, axes = canvas()
        axes.set_yscale("log" if quantity.log else "linear")
        for curve in curves:
            dashes = _DASHES[protocols.index(curve.protocol) % len(_DASHES)]
            _draw(axes, curve, quantity, colours[curve.name], dashes)
        length_axis(axes, sorted({length for curve in curves for length in curve.lengths}))
        _value_axis(axes, quantity)
        mark_trained(axes, sorted({curve.trained_length for curve in curves if curve.trained_length}))
        head(axes, title, _note(curves, protocols, quantity))
        axes.set_xlabel("window length in tokens")
        axes.set_ylabel(quantity.axis)
        label_lines(figure, axes, _ends(named(curves, quantity), quantity, colours))
        return save(figure, path)


def stops(curve: LengthCurve) -> bool:
    """Whether the model has values, and was refused at a length beyond the last of them."""
    return bool(curve.ppl) and max(curve.refused, default=0) > max(curve.ppl)


def named(curves: Sequence[LengthCurve], quantity: Quantity) -> list[LengthCurve]:
    """Return the curve of each model at whose end its name stands: that of the last protocol in which it has values."""
    order = list(dict.fromkeys(curve.protocol for curve in curves))
    known = [curve for curve in curves if finite(quantity.values(curve))]
    return list({curve.name: curve for curve in sorted(known, key=lambda one: order.index(one.protocol))}.values())


def _draw(axes: Axes, curve: LengthCurve, quantity: Quantity, index: int, dashes: Any) -> None:
    values = finite(quantity.values(curve))
    if not values:
        return
    colour = COLOURS[index % len(COLOURS)]
    axes.plot(
        list(values),
        list(values.values()),
        **look(index),  # type: ignore[arg-type]  # matplotlib types the keywords one by one
        linestyle=dashes,
        markeredgecolor="white",
        markersize=5.5,
        linewidth=2,
    )
    if dashes == _DASHES[0] and (shaded := bands(curve, quantity)):
        places, low, high = zip(*shaded, strict=True)
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    if stops(curve):
        end, value = max(values.items())
        axes.plot([end], [value], color=colour, marker="x", markersize=11, markeredgewidth=2.6, zorder=4)


def _ends(curves: Sequence[LengthCurve], quantity: Quantity, colours: Mapping[str, int]) -> list[End]:
    last = max((length for curve in curves for length in curve.lengths), default=0)
    ends: list[End] = []
    for curve in curves:
        at, value = max(finite(quantity.values(curve)).items())
        text = f"{curve.name}: stops at {at:,}" if stops(curve) else curve.name
        ends.append((at, value, text, COLOURS[colours[curve.name] % len(COLOURS)], at == last))
    return ends


def _note(curves: Sequence[LengthCurve], protocols: Sequence[str], quantity: Quantity) -> str:
    first = curves[0]
    lines = zip(protocols, _DASH_NAMES * len(protocols), strict=False)
    parts = [f"{dashes}: {protocol}" for protocol, dashes in lines] if len(protocols) > 1 else list(protocols)
    counts = [count for curve in curves for count in curve.n_tokens.values()]
    banded = any(bands(curve, quantity) for curve in curves)
    parts += [f"{max(counts, default=0):,} tokens in {counted(first.n_documents, 'document')}"]
    parts += ["bands: 95 % over documents"] if banded else []
    none = dict.fromkeys(curve.name for curve in curves if not quantity.values(curve))
    parts += [f"no value: {', '.join(none)}"] if none else []
    return " · ".join(parts)


def _value_axis(axes: Axes, quantity: Quantity) -> None:
    if not axes.lines:  # every model was refused everywhere: the note says so
        axes.set_ylim(1.0, 10.0)
    axes.yaxis.set_major_locator(ticker.FixedLocator(value_ticks(*axes.get_ylim(), log=quantity.log)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: in_short(value)))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    rule(axes)
