"""The report of the study: `summary.json`, `recovery.png` and `README.md`, made from the results of the runs alone.

A run with several learning rates counts at the best of them by held-out loss, and so does the original that was trained
on the same tokens. Nothing is called a difference that is not larger than the spread over seeds.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hf_posenc.conversion.study_page import ORIGINAL, page_of

LENGTH = 128
LENGTHS = tuple(LENGTH * 2**step for step in range(5))
SLIDING = (LENGTH, 8 * LENGTH)
SEEN, UNSEEN = "seen", "unseen"
KEY = ("percent", "target", "rung", "learning_rate", "batch_size")
RESULT, SUMMARY, PLOT, README = "result.json", "summary.json", "recovery.png", "README.md"
Row = dict[str, Any]


def write_report(folder: Path) -> Path:
    """Write the report on all runs that are done; return the path of its page."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"runs/*/{RESULT}"))]
    rows = summarize(runs)
    summary = {"length": LENGTH, "runs": rows, "heads": head_recovery(runs)}
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    plot(rows, folder / PLOT)
    page = folder / README
    page.write_text(page_of(summary), encoding="utf-8")
    return page


def summarize(runs: Iterable[Row]) -> list[Row]:
    """Return a row for every target, set of stages, budget, learning rate and batch size, averaged over seeds.

    Losses are in nats a token. `ratio` is perplexity over that of the original trained on as many tokens, by the text,
    loss and rate with which it ends lowest, None where no such run is done; `of_original` over that of the original as
    it is; `spread` is the ratio of the highest to the lowest perplexity over seeds, less 1; `best` whether, of
    the settings with most seeds, no rate and batch came lower on the rows of the selection, which are not those that
    `end` is of (a run without them counts by its `end`).
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for run in runs:
        key = (run["percent"], run["target"], label(run), run["learning_rate"], run["batch_size"])
        groups.setdefault(key, []).append(_measured(run))
    rows = [{**dict(zip(KEY, key, strict=True)), **_mean(group)} for key, group in sorted(groups.items())]
    for row in rows:
        alike = [other for other in rows if _same(other, row, "percent", "target", "rung")]
        row["best"] = row is min(alike, key=lambda other: (-other["seeds"], other["selected"]))
        trained = [o["end"] for o in rows if o["target"] == ORIGINAL and o["percent"] == row["percent"]]
        row["ratio"] = math.exp(row["end"] - min(trained)) if trained else None
        lost = row["replaced"] - min(trained, default=row["untrained"])
        row["recovery"] = (row["replaced"] - row["end"]) / lost if lost > 0 else None
    return rows


def label(run: Row) -> str:
    """Return the set of stages of a run, and that its text was in the pretraining, where it was."""
    return str(run["rung"]) if run.get("text", SEEN) == UNSEEN else f"{run['rung']}, {SEEN} text"


def _measured(run: Row) -> Row:
    stages = {stage["stage"]: stage["after"] for stage in run["stages"]}
    untrained, replaced = run["stages"][0]["before"], stages["replace"]
    absorbed = stages.get("absorb", replaced)
    start, end = stages.get("calibrate", absorbed), run["stages"][-1]["after"]
    found = {"untrained": untrained, "replaced": replaced, "absorbed": absorbed, "start": start, "end": end}
    found |= {"selected": run.get("selection_loss", end), "seconds": run["seconds"]}
    found["of_original"] = math.exp(end - untrained)
    for protocol in ("nonoverlapping", "sliding"):
        curve = run.get(protocol, {})
        for length in curve:
            if int(length) > LENGTH:
                found[f"{protocol}_{int(length) // LENGTH}x"] = curve[length] / curve[str(LENGTH)]
    return found


def _mean(group: Sequence[Row]) -> Row:
    ends = [row["end"] for row in group]
    mean = {name: statistics.fmean(row[name] for row in group if name in row) for name in group[0]}
    return {**mean, "seeds": len(group), "spread": math.exp(max(ends) - min(ends)) - 1}


def _same(one: Row, other: Row, *names: str) -> bool:
    return all(one[name] == other[name] for name in names)


def head_recovery(runs: Iterable[Row]) -> list[Row]:
    """Return, for every calibrated run, how what distance explains of a head goes with how well the head came back.

    `calibrated` and `trained` are rank correlations over all heads between the Toeplitz R2 of the scores that were lost
    and the share of the divergence of attention from the original's that the fit, and fit and training, took away.
    """
    found = []
    for run in runs:
        calibration = run.get("calibration")
        if calibration is None or "trained" not in calibration.get("divergence", {}):
            continue
        r2 = _flat(calibration["toeplitz_r2"])
        divergence = {name: _flat(values) for name, values in calibration["divergence"].items()}
        row = {name: run[name] for name in ("percent", "target", "rung", "learning_rate", "seed")}
        for name, moment in (("calibrated", "after"), ("trained", "trained")):
            gained = [1 - now / then for now, then in zip(divergence[moment], divergence["before"], strict=True)]
            row[name] = rank_correlation(r2, gained)
        found.append(row)
    return found


def _flat(values: Sequence[Sequence[float]]) -> list[float]:
    return [value for layer in values for value in layer]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two lists without ties, of at least two values."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [float(order.index(place)) for place in range(len(values))]

    return statistics.correlation(ranks(one), ranks(other))


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw recovery against the share of tokens: a panel a target, a line a set of stages, dashed on seen text."""
    shown = [row for row in rows if row["target"] != ORIGINAL and row["best"] and row["recovery"] is not None]
    targets, rungs = _names(shown, "target") or [""], _names(shown, "rung")
    columns, lines = min(4, len(targets)), math.ceil(len(targets) / 4)
    figure = Figure(figsize=(3.2 * columns, 0.9 + 2.7 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    panels = list(grid.flat)[: len(targets)]
    for empty in list(grid.flat)[len(targets) :]:
        empty.set_axis_off()
    stages = list(dict.fromkeys(rung.split(",")[0] for rung in rungs))
    for panel, target in zip(panels, targets, strict=True):
        for rung in rungs:
            line = [row for row in shown if row["target"] == target and row["rung"] == rung]
            if line:
                x, y = [row["percent"] for row in line], [row["recovery"] for row in line]
                color, seen = f"C{stages.index(rung.split(',')[0])}", rung not in stages
                style = {"marker": "o", "fillstyle": "none", "linestyle": "--"} if seen else {"marker": "."}
                panel.plot(x, y, label=rung, color=color, **style)
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set(title=target, xlabel="tokens, % of pretraining", xscale="log")
        budgets = sorted({row["percent"] for row in shown})
        panel.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    for first in grid[:, 0]:
        first.set(ylabel="recovery, 1: the original\ntrained alike")
    if shown:
        figure.legend(*_handles(panels), loc="outside lower center", ncols=min(7, len(rungs)), fontsize=7)
    figure.savefig(path, dpi=110)


def _handles(panels: Sequence[Any]) -> tuple[list[Any], list[str]]:
    found = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    return list(found.values()), list(found)


def _names(rows: Iterable[Row], field: str) -> list[str]:
    return list(dict.fromkeys(str(row[field]) for row in rows))
