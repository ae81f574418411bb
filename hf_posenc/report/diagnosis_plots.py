"""Plots of a diagnosis: one page for a model, and one on which several stand together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from hf_posenc.evaluation.diagnosis import Diagnosis
from hf_posenc.evaluation.score_terms import TERMS
from hf_posenc.plots import COLOURS, GREY, STYLE, save
from hf_posenc.plots.ticks import cut_short

_WORDS = ("words with words", "words with places", "places with words", "places with places")
_BESIDE = {"fontsize": 8.5, "frameon": False}
_LAYERS_SHOWN = 6


def plot_diagnosis(diagnosis: Diagnosis, path: Path | str) -> list[Path]:
    """Draw what was found in one model; return the PNG and the SVG, `path` with these endings."""
    panels = [panel for panel, wanted in _PANELS if wanted(diagnosis)]
    with rc_context(STYLE | {"axes.titlesize": 10.5}):
        wide = min(-(-len(panels) // 2), 4)
        deep = -(-len(panels) // wide)
        figure = _page(4.7 * wide, 4.4 * deep)
        for index, panel in enumerate(panels):
            panel(figure.add_subplot(deep, wide, index + 1), diagnosis)
        figure.suptitle(
            f"{cut_short(diagnosis.name, 80)}: {diagnosis.kind}", x=0.01, ha="left", fontweight="bold", fontsize=13
        )
        return save(figure, path)


def plot_comparison(found: Sequence[Diagnosis], path: Path | str) -> list[Path]:
    """Draw several models over each other: loss when moved, share of scores, likeness; return the PNG and the SVG."""
    with rc_context(STYLE | {"axes.titlesize": 10.5}):
        figure = _page(14, 4.8)
        moved, shares, alike = (figure.add_subplot(1, 3, place) for place in (1, 2, 3))
        for index, d in enumerate(found):
            line: Any = {"color": COLOURS[index % len(COLOURS)], "label": cut_short(d.name, 40)}
            line["linestyle"] = "-" if index // len(COLOURS) % 2 == 0 else "--"
            layers = range(1, len(d.layers) + 1)
            shares.plot(layers, np.multiply(d.position_share, 100), **line, marker="o", markersize=4)
            if d.shift is not None:
                moved.plot(list(d.shift.nll), list(d.shift.nll.values()), **line)
            similarity = _similarity(d)
            if similarity is not None:
                alike.plot(range(1, len(similarity)), similarity[1:], **line)
        _dress(moved, "The same text at later positions", "positions moved by", "loss in nats a token")
        _dress(shares, "Scores that positions explain", "layer", "% of their variance")
        shares.set_ylim(bottom=0)
        shares.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        _dress(alike, "How alike places are", "distance in tokens", "cosine")
        _count_in_twos(alike)
        for axes in (moved, shares, alike):
            if axes.lines:
                axes.legend(**_BESIDE)
        return save(figure, path)


def _page(wide: float, high: float) -> Figure:
    """Return an empty figure, in inches."""
    return Figure(figsize=(wide, high), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))


def _cycle(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _count_in_twos(axes: Axes) -> None:
    """Put the distances 1, 2, 4, ... at equal steps, in plain numbers."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_terms(axes: Axes, d: Diagnosis) -> None:
    if d.terms is None:
        return
    shares = np.array([d.terms.share[name].numpy() for name in TERMS]) * 100  # (4, h)
    heads = np.arange(1, shares.shape[1] + 1)
    above, below = np.zeros(len(heads)), np.zeros(len(heads))
    for share, words, colour in zip(shares, _WORDS, ("#BBBBBB", COLOURS[4], COLOURS[0], COLOURS[1]), strict=True):
        axes.bar(heads, share, bottom=np.where(share >= 0, above, below), color=colour, label=words, width=0.75)
        above, below = above + share.clip(min=0), below + share.clip(max=0)
    _dress(axes, "First layer: what its scores are made of", "head", "% of the variance of scores")
    axes.set_xticks(heads[:: -(-len(heads) // 16)])
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_ylim(below.min() * 1.05, above.max() * 1.35)
    axes.set_yticks([tick for tick in axes.get_yticks() if below.min() * 1.05 <= tick <= above.max() + 1])
    axes.legend(ncols=2, loc="upper left", **_BESIDE)


def _draw_layers(axes: Axes, d: Diagnosis) -> None:
    layers = np.arange(1, len(d.layers) + 1)
    position = np.array(d.position_share) * 100
    distance = np.array([_part(e.distance, e.variance) for e in d.layers]) * 100
    distance = np.minimum(distance, position)
    axes.bar(layers, distance, color=COLOURS[0], label="by distance alone", width=0.75)
    axes.bar(layers, position - distance, bottom=distance, color=COLOURS[1], label="by absolute place", width=0.75)
    _dress(axes, "Every layer: scores that positions explain", "layer", "% of the variance, random tokens")
    axes.set_xticks(layers[:: -(-len(layers) // 16)])
    axes.set_ylim(0, max(position.max() * 1.3, 5))
    axes.set_yticks([tick for tick in axes.get_yticks() if tick <= 100])
    axes.legend(ncols=2, loc="upper left", **_BESIDE)


def _part(part: torch.Tensor, whole: torch.Tensor) -> float:
    return float((part.sum() / whole.sum().clamp(min=1e-300)).clamp(0, 1))


def _draw_profiles(axes: Axes, d: Diagnosis) -> None:
    chosen = range(0, len(d.layers), -(-len(d.layers) // _LAYERS_SHOWN))
    for layer, colour in zip(chosen, _cycle(len(chosen)), strict=True):
        effect = d.layers[layer]
        head = int((effect.distance / effect.variance.clamp(min=1e-300)).argmax())
        label = f"layer {layer + 1}, head {head + 1}"
        axes.plot(effect.distances, effect.profile[head], color=colour, linewidth=1.6, label=label)
    _dress(axes, "Preference by distance, most positional heads", "query minus key position", "score (nats)")
    if int(d.layers[0].distances.min()) > 0:
        _count_in_twos(axes)
        axes.set_xlabel("tokens back")
    axes.legend(**_BESIDE)


def _draw_norms(axes: Axes, d: Diagnosis) -> None:
    if d.table is None:
        return
    rows = len(d.table.norms)
    axes.plot(range(1, rows + 1), d.table.norms, color=COLOURS[0], linewidth=1.2)
    _dress(axes, "Length of every row of the table", "position", "norm of its row")
    axes.set_ylim(0, float(d.table.norms.max()) * 1.2)
    if d.table.initial is not None and not d.table.fixed:
        axes.axhline(d.table.initial, color=COLOURS[1], linewidth=1.4, linestyle="--", label="an untrained row")
    trained = d.table.trained
    if trained is not None and trained < rows:
        axes.axvspan(
            trained + 0.5, rows + 0.5, color=COLOURS[1], alpha=0.25, label=f"never trained, from {trained + 1:,}"
        )
    if d.table.strong < (trained or rows):
        axes.axvline(d.table.strong, color=GREY, linestyle=":", label=f"weaker after {d.table.strong:,}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**_BESIDE)


def _similarity(d: Diagnosis) -> torch.Tensor | None:
    if d.table is not None:
        return d.table.similarity[: max(len(d.table.similarity) * 3 // 4, 2)]  # few pairs are further apart
    return None if d.rotation is None else d.rotation.similarity


def _draw_similarity(axes: Axes, d: Diagnosis) -> None:
    similarity = _similarity(d)
    if similarity is None:
        return
    axes.plot(range(1, len(similarity)), similarity[1:], color=COLOURS[2], linewidth=1.4)
    axes.axhline(0, color=GREY, linewidth=0.8)
    _count_in_twos(axes)
    _dress(axes, "How alike places are (1 = the same)", "distance in tokens", "mean cosine")


def _draw_columns(axes: Axes, d: Diagnosis) -> None:
    """Draw two columns over growing positions: of the table, or the cosine of the fastest and of a slow rotation."""
    if d.table is not None:
        values, names = d.table.columns, [f"column {column}" for column in d.table.pairs]
    elif d.rotation is not None:
        waves = d.rotation.wavelengths
        places = torch.arange(len(d.rotation.similarity), dtype=torch.float64)[:, None]
        ends = waves[[0, len(waves) * 2 // 3]]
        values = (places * 2 * torch.pi / ends).cos()
        names = [f"pair of wavelength {wave:,.0f}" for wave in ends.tolist()]
    else:
        return
    for column, name, colour in zip(values.T, names, COLOURS[:2], strict=True):
        axes.plot(range(1, len(column) + 1), column, color=colour, linewidth=1.2, label=name)
    _dress(axes, "Two dimensions over growing positions", "position", "value")
    axes.legend(loc="upper right", **_BESIDE)
    axes.set_ylim(top=float(values.max()) + 0.25 * float(values.max() - values.min()))


def _draw_shift(axes: Axes, d: Diagnosis) -> None:
    if d.shift is None:
        return
    axes.plot(list(d.shift.nll), list(d.shift.nll.values()), color=COLOURS[1], marker="o", markersize=4)
    _dress(axes, "The same text, all positions moved", "positions moved by", "loss in nats a token")
    low, high = min(d.shift.nll.values()), max(d.shift.nll.values())
    room = max((high - low) * 0.15, 0.05)
    axes.set_ylim(low - room, high + room)


_Panel = tuple[Callable[[Axes, Diagnosis], None], Callable[[Diagnosis], bool]]
_PANELS: list[_Panel] = [
    (_draw_terms, lambda d: d.terms is not None),
    (_draw_layers, lambda d: True),
    (_draw_profiles, lambda d: True),
    (_draw_norms, lambda d: d.table is not None),
    (_draw_similarity, lambda d: _similarity(d) is not None),
    (_draw_columns, lambda d: d.table is not None or d.rotation is not None),
    (_draw_shift, lambda d: d.shift is not None),
]
