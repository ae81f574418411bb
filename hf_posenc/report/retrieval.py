"""Retrieval for readers: a table of models and tasks by length, and the map of lengths by depths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation import RetrievalGrid
from hf_posenc.evaluation.result import check_alike
from hf_posenc.evaluation.retrieval_tasks import TASKS
from hf_posenc.plots import GREY, STYLE, save
from hf_posenc.plots.ticks import cut_short
from hf_posenc.report.files import check_output, write_results, write_table

PLOT_NAME = "retrieval"
_PER_INCH = 9.5  # characters of a title
TITLE = "Retrieval against length"


def retrieval_table(grids: Sequence[RetrievalGrid], *, title: str = TITLE) -> Group:
    """Return, for rich to print, how much of the answers each model found, and below it what the numbers say.

    Raises:
        DataError: there are no grids, or those of a task were not measured alike.
    """
    check_alike(grids, ("seed", "digits", "n_others", "text_hash"), apart=("name", "task"))
    lengths = sorted({length for grid in grids for length in grid.lengths})
    table = Table(title=escape(title), title_justify="left")
    table.add_column("model", no_wrap=True)
    table.add_column("task", no_wrap=True)
    for length in lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    for grid in grids:
        table.add_row(escape(grid.name), escape(grid.task), *(_share(grid.score, length) for length in lengths))
        if grid.preferred:
            table.add_row("", "  most probable", *(_share(grid.preferred, length) for length in lengths))
            table.add_row("", "  margin in nats", *(_margin(grid.margin, length) for length in lengths))
    return Group(table, *(Text(line) for line in _notes(grids)))


def _share(values: Mapping[int, float], length: int) -> str:
    return f"{values[length]:.0%}" if length in values else "none"


def _margin(values: Mapping[int, float], length: int) -> str:
    return f"{values[length]:+.1f}" if length in values else "none"


def _notes(grids: Sequence[RetrievalGrid]) -> list[str]:
    first = grids[0]
    counts = sorted({count for grid in grids for count in grid.n_trials.values()})
    spread = " to ".join(f"{count:,}" for count in dict.fromkeys(counts[:1] + counts[-1:])) or "no"
    notes = [
        f"share of the answer that the model writes, taking the most probable token each time; {spread} prompts a "
        f"length, seed {first.seed}, {'given texts' if first.text_hash else 'a simple filler'} around the answer"
    ]
    if any(grid.preferred for grid in grids):
        notes.append(
            f"most probable: right answer against {first.n_others} wrong ones, {1 / (1 + first.n_others):.0%} by chance"
        )
    notes += [f"{name}: {TASKS[name].says}" for name in dict.fromkeys(grid.task for grid in grids) if name in TASKS]
    notes += [f"{grid.name} at {n:,}: {why}" for grid in _first_of_each(grids) for n, why in grid.refused.items()]
    return notes


def _first_of_each(grids: Sequence[RetrievalGrid]) -> list[RetrievalGrid]:
    """Return one grid a model: what refuses a length is the model, not the task."""
    found: dict[str, RetrievalGrid] = {}
    for grid in grids:
        found.setdefault(grid.name, grid)
    return list(found.values())


def plot_retrieval(grids: Sequence[RetrievalGrid], path: Path | str, *, title: str = TITLE) -> list[Path]:
    """Draw one map a model (down) and task (across); return the PNG and the SVG, `path` with these endings.

    Across a map the lengths, down it the depths at which the answer stands, where the task has one; a cell holds the
    share of the answer that was found, or "none" where the model cannot go.
    """
    models = list(dict.fromkeys(grid.name for grid in grids))
    tasks = list(dict.fromkeys(grid.task for grid in grids))
    with rc_context(STYLE | {"axes.titlesize": 10.5}):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        wide = max(2.2, 0.62 * max(len(grid.lengths) for grid in grids) + 0.6)
        figure = Figure(figsize=(wide * len(tasks) + 1, 2.8 * len(models) + 0.8), dpi=160, layout=layout)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=13)
        for grid in grids:
            row, column = models.index(grid.name), tasks.index(grid.task)
            axes = figure.add_subplot(len(models), len(tasks), row * len(tasks) + column + 1)
            _draw(axes, grid)
            axes.set_title(f"{cut_short(grid.name, int(wide * _PER_INCH))}\n{grid.task}")
        return save(figure, path)


def _draw(axes: Axes, grid: RetrievalGrid) -> None:
    depths: list[float | None] = [*grid.depths] or [None]
    values = np.array([[grid.cells.get((length, depth), np.nan) for length in grid.lengths] for depth in depths])
    axes.imshow(values, aspect="auto", cmap="cividis", vmin=0, vmax=1)
    for (row, column), value in np.ndenumerate(values):
        # Light on the dark end of the colours, dark on the light one: readable in grey, too.
        colour = GREY if np.isnan(value) else "black" if value > 0.6 else "white"
        text = "none" if np.isnan(value) else f"{value:.0%}"
        axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(grid.lengths)), [f"{length:,}" for length in grid.lengths])
    axes.set_yticks(range(len(depths)), ["" if depth is None else f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth of the answer" if grid.depths else "")
    axes.tick_params(length=0)
    if grid.trained_length is not None:
        within = sum(length <= grid.trained_length for length in grid.lengths)
        if 0 < within < len(grid.lengths):
            axes.axvline(within - 0.5, color=GREY, linewidth=1.6, linestyle=(0, (4, 3)))
            axes.set_xlabel("tokens (dashed: trained length)")


def write_retrieval(
    grids: Sequence[RetrievalGrid],
    folder: Path | str,
    *,
    corpus: Mapping[str, Any] | None = None,
    title: str = TITLE,
) -> Path:
    """Write `result.json`, `table.txt` and the plot `retrieval`, as PNG and SVG, into `folder` and return it.

    Raises:
        OutputExistsError: the folder already holds a result.
        DataError: there are no grids, or they were not measured alike.
    """
    folder = check_output(folder)
    table = retrieval_table(grids, title=title)
    write_table(folder, table)
    plot_retrieval(grids, folder / PLOT_NAME, title=title)
    content = {"retrieval": [grid.to_dict() for grid in grids]}
    return write_results(folder, seed=grids[0].seed, corpus=corpus, content=content)
