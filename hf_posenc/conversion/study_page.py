"""The page of the study: its summary as tables, and in words only what the numbers beside them carry."""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

ORIGINAL, NAIVE, ABSORBED, START = "original", "naive", "absorb", "start"
HALF = 0.5
Row = dict[str, Any]

_HEAD = """# What brings quality back after a conversion

Made by `python scripts/study.py` from the results in [runs](runs); do not edit. The bundled tiny GPT-2 (1.07 M
parameters, trained at {length} tokens on 12.3 M) is converted with a share of these tokens, on one CPU thread.
Perplexity is of 64 held-out rows of {length} tokens, spread over all held-out texts, and **ratio** is over the original
trained on just as many tokens, in whichever of the ways below ends lowest. Every run counts at the best of the learning
rates and batches that were tried for it, in brackets as rate x rows; they were chosen on 64 other held-out rows, those
of runs on seen text on the ones that are reported. Sets of stages are compared at equal rates.

The grid is of every set of stages for ALiBi, KERPLE, none, RoPE and T5 at every budget, some four hours of training on
a core; without positions there is nothing to calibrate, and `start` is `absorb`. **Not run** is what lies beside it.

The original knows its training text by heart: it is 0.6 nats better there than on held-out text. **Seen text** is that
text; all other runs are trained on Python that the original never saw, the sources of the packages that this one needs.
`start` is what comes before training: the mean of the table absorbed and, for ALiBi (slopes trained), KERPLE, T5 and
FIRE (a bias for every layer), the bias calibrated; for RoPE and `yarn` (RoPE with YaRN x 8), queries and keys fitted to
the attention of the original on 64 rows. `reach` trains at positions up to 8 x 128. All rates and runs:
[summary.json](summary.json).

![Recovery against tokens](recovery.png)
"""


def page_of(summary: dict[str, Any]) -> str:
    """Return the page, in Markdown, of what `study_report.write_report` has summarised."""
    rows = [row for row in summary["runs"] if row["best"]]
    parts = [_HEAD.format(length=summary["length"]), _seeds(rows), _references(rows), _starts(rows)]
    parts += [_budget(rows, percent) for percent in sorted({row["percent"] for row in rows}, reverse=True)]
    parts += [_frugality(rows), _lengths(rows), _heads(summary["heads"])]
    return "\n".join(part for part in parts if part)


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is text and whose others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def _seeds(rows: Sequence[Row]) -> str:
    """Return what is called a difference."""
    spreads = _spreads(rows)
    if not spreads:
        return "One seed each: small differences mean nothing.\n"
    said = (
        "A cell is of one seed unless it says how many. Spread over seeds is the highest perplexity over the lowest; "
        "what is smaller than that of the two that are compared, at any budget, or than the largest of all, "
        f"{max(spreads.values()):.1%}, where neither has several seeds, is called no difference."
    )
    return textwrap.fill(said, 120) + "\n"


def _references(rows: Sequence[Row]) -> str:
    originals = [row for row in rows if row["target"] == ORIGINAL]
    if not originals:
        return ""
    lines = [
        (f"{r['percent']:g} %, {r['rung']}", _settings(r), _ppl(r["end"]), f"{r['of_original']:.3f}") for r in originals
    ]
    header = ("tokens, how", "rate x rows", "perplexity", "over untrained")
    return f"## The original, trained on as many tokens\n\n{table(header, lines)}"


def _starts(rows: Sequence[Row]) -> str:
    """Return what calibration and absorption do before any training, as distances from the original in nats."""
    lines, halved = [], []
    for target in _targets(rows):
        own = [row for row in rows if row["target"] == target]
        started = next((row for row in own if row["rung"].startswith(START)), None)
        if started is None:
            continue
        zeroed = started["replaced"] - started["untrained"]
        absorbed, left = ((started[name] - started["untrained"]) / zeroed for name in ("absorbed", "start"))
        lines.append((target, f"{zeroed:.3f}", f"{absorbed:.2f}", f"{left:.2f}"))
        halved += [target] if left <= HALF else []
    if not lines:
        return ""
    header = ("target", "replaced, nats from the original", "absorbed, share of it left", "absorbed and calibrated")
    said = f"At most half is left for {len(halved)} of {len(lines)} targets{_listed(halved)}."
    return f"## Before training\n\n{table(header, lines)}\n{said}\n"


def _budget(rows: Sequence[Row], percent: float) -> str:
    """Return the ratios of one budget, and what each stage changed where several targets have it."""
    own = [row for row in rows if row["percent"] == percent and row["target"] != ORIGINAL]
    targets, rungs = _targets(own), list(dict.fromkeys(row["rung"] for row in own))
    if not own or any(row["ratio"] is None for row in own):
        return ""
    found = {(row["target"], row["rung"]): row for row in own}
    lines = [(rung, *(_cell(found.get((target, rung))) for target in targets)) for rung in rungs]
    title = f"## {percent:g} % of the tokens: perplexity over that of the original trained alike"
    return f"{title}\n\n{table(('stages', *targets), lines)}\n{_effects(found, _spreads(rows))}"


def _spreads(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Return the largest spread over seeds, at any budget, of every target and set of stages that had several."""
    found: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["seeds"] > 1 and row["target"] != ORIGINAL:
            key = row["target"], row["rung"]
            found[key] = max(row["spread"], found.get(key, 0.0))
    return found


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    seeds = f", {row['seeds']} seeds ± {row['spread'] / 2:.3f}" if row["seeds"] > 1 else ""
    return f"{row['ratio']:.3f} ({_settings(row)}{seeds})"


def _settings(row: Row) -> str:
    return f"{row['learning_rate']:g} x {row['batch_size']}"


def _effects(found: dict[tuple[str, str], Row], spreads: dict[tuple[str, str], float]) -> str:
    """Return one sentence for every set of stages, against the one that has a stage less."""
    pairs = (
        *((NAIVE, ABSORBED), (ABSORBED, START), (START, "start+anneal"), (START, "start+layerwise")),
        *((START, "start+distill"), ("start+distill", "start+layerwise+distill")),
    )
    largest, lines = max(spreads.values(), default=None), []
    for less, more in [(less + text, more + text) for less, more in pairs for text in ("", ", seen text")]:
        each = []
        for target in [target for target, rung in found if rung == more and _alike(found, target, less, more)]:
            own = [spreads[target, rung] for rung in (less, more) if (target, rung) in spreads]
            change = found[target, more]["ratio"] / found[target, less]["ratio"] - 1
            each.append(f"{target} {_change(change, max(own, default=largest))}")
        if each:
            lines.append(f"- `{more}` against `{less}`: {', '.join(each)}.")
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def _alike(found: dict[tuple[str, str], Row], target: str, less: str, more: str) -> bool:
    """Tell whether two sets of stages did best at the same rate and batch, so that stages alone tell them apart."""
    other = found.get((target, less))
    own = found[target, more]
    return other is not None and all(other[name] == own[name] for name in ("learning_rate", "batch_size"))


def _change(change: float, spread: float | None) -> str:
    small = spread is not None and abs(change) <= spread
    return "no difference" if small else f"{change:+.1%}"


def _frugality(rows: Sequence[Row]) -> str:
    """Return what the best stages reach at a small budget beside the naive road at a larger one, text by text."""
    own = [row for row in rows if row["target"] != ORIGINAL]
    largest = max((row["percent"] for row in own if row["rung"].startswith(NAIVE)), default=0)
    lines, said = [], []
    least: dict[str, tuple[float, float]] = {}  # target -> lowest loss of the naive road, and of fewer tokens
    roads = [row for row in own if row["percent"] == largest and row["rung"].startswith(NAIVE)]
    for rung in sorted({row["rung"] for row in roads}):
        ahead, met = [], 0
        for road in (row for row in roads if row["rung"] == rung):
            mine = [row for row in own if row["target"] == road["target"]]
            found = _frugal(mine, road)
            if found is None:
                continue
            target, lower, met = road["target"], found["end"] < road["end"], met + 1
            numbers = (_ppl(road["end"]), f"{found['percent']:g} %", found["rung"], _ppl(found["end"]))
            lines.append((target, rung, *numbers, "yes" if lower else "no"))
            ahead += [target] if lower else []
            naive, _ = least.get(target, (math.inf, math.inf))
            least[target] = min(naive, road["end"]), min(row["end"] for row in mine if row["percent"] < largest)
        said.append(f"`{rung}`, {largest:g} %: fewer tokens are better for {len(ahead)} of {met}{_listed(ahead)}.")
    if not lines:
        return ""
    header = ("target", f"{largest:g} %", "perplexity", "best of", "stages", "perplexity", "lower")
    whatever = [target for target, (naive, less) in least.items() if less < naive]
    said.append(f"Whatever the text: for {len(whatever)} of {len(least)}{_listed(whatever)}.")
    return f"## Against the naive road with more tokens, on the same text\n\n{table(header, lines)}\n{' '.join(said)}\n"


def _frugal(rows: Sequence[Row], road: Row) -> Row | None:
    """Return the cheapest of a target's runs with fewer tokens of the same text that ends below a naive one.

    Where none does, the best of those with most tokens; None where there is no such run.
    """
    less = [row for row in rows if row["percent"] < road["percent"] and _text(row) == _text(road)]
    enough = [row for row in less if row["end"] < road["end"]]
    if enough:
        return min(enough, key=lambda row: (row["percent"], row["end"]))
    return min(less, key=lambda row: (-row["percent"], row["end"]), default=None)


def _text(row: Row) -> str:
    """Return what the name of a run says of its text: nothing, where the original never saw it."""
    return str(row["rung"]).partition(",")[2]


def _is(row: Row, target: str, percent: float) -> bool:
    return bool(row["target"] == target and row["percent"] == percent)


def _lengths(rows: Sequence[Row]) -> str:
    """Return perplexity past the trained length over that at it, of the best stages without `reach` and with it."""
    own = [
        row
        for row in rows
        if not row["rung"].startswith(NAIVE) and any(name.startswith("nonoverlapping") for name in row)
    ]
    columns = [name for name in (own[0] if own else {}) if name.startswith(("nonoverlapping", "sliding"))]
    lines = []
    for target, reach in itertools.product(_targets(own), (False, True)):
        alike = [row for row in own if row["target"] == target and ("reach" in row["rung"]) is reach]
        for best in sorted(alike, key=lambda row: float(row["end"]))[:1]:
            numbers = [f"{best[name]:.3f}" if name in best else "" for name in columns]
            lines.append((target, f"{best['rung']}, {best['percent']:g} %", *numbers))
    header = ("target", "run", *(name.replace("_", " ") for name in columns))
    said = (
        "Non-overlapping windows give a longer window more context, which alone makes it better; sliding ones advance "
        "by half their length.\n"
    )
    return f"## Past the trained length: perplexity over that at it\n\n{table(header, lines)}\n{said}" if lines else ""


def _heads(heads: Sequence[Row]) -> str:
    """Return whether what distance explains of a head foretells how well the head comes back."""
    lines = []
    for target in _targets(heads):
        own = [row for row in heads if row["target"] == target]
        means = [statistics.fmean(row[name] for row in own) for name in ("calibrated", "trained")]
        lines.append((target, str(len(own)), *(f"{mean:+.2f}" for mean in means)))
    if not lines:
        return ""
    header = ("target", "runs", "share calibrated back", "share back after training")
    said = (
        "Toeplitz R2 of a head: what share of the scores that it lost, averaged over rows, distance explains. Coming "
        "back is the share of its attention's divergence from the original's that is gone. Rank correlations over all "
        "heads:\n"
    )
    return f"## Which heads come back\n\n{said}\n{table(header, lines)}"


def _targets(rows: Iterable[Row]) -> list[str]:
    return [target for target in dict.fromkeys(str(row["target"]) for row in rows) if target != ORIGINAL]


def _listed(names: Sequence[str]) -> str:
    return f": {', '.join(names)}" if names else ""


def _ppl(nats: float) -> str:
    return f"{math.exp(nats):.2f}"
