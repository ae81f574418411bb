"""The study of conversions: which stages bring how much back, on the bundled model, whose pretraining is known.

Every run is a folder with `config.json` and, when it is done, `result.json`; a run that failed has `cancelled.txt` with
the reason, and one without either was stopped and is run again. The summary is written anew after every run.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc.config import EncodingConfig, encoding
from hf_posenc.conversion.convert import convert
from hf_posenc.conversion.recipe import Absorb, Anneal, Calibrate, Distill, Layerwise, Recipe
from hf_posenc.data import HELD_OUT, load_documents, tokenize
from hf_posenc.errors import PosencError
from hf_posenc.evaluation import perplexity_by_length

BASE = str(files("hf_posenc") / "assets" / "tiny-gpt2")
LENGTH = 128
LENGTHS = tuple(LENGTH * 2**step for step in range(5))
DOCUMENTS, DOCUMENT_TOKENS, CHARACTERS = 4, 4096, 16_000
ORIGINAL = "original"
RESULT, CONFIG, CANCELLED, SUMMARY, PLOT = "result.json", "config.json", "cancelled.txt", "summary.json", "recovery.png"

TARGETS: dict[str, EncodingConfig] = {
    "alibi": encoding("alibi", trainable=True, per_layer=True),
    "kerple": encoding("kerple", per_layer=True),
    "t5": encoding("t5", per_layer=True),
    "rope": encoding("rope"),
    "nope": encoding("nope"),
    ORIGINAL: encoding("learned"),
}
OFF: dict[str, Any] = dict.fromkeys(("absorb", "calibrate", "anneal", "layerwise", "distill", "reach"))
RUNGS: dict[str, dict[str, Any]] = {
    "naive": OFF,
    "absorb": OFF | {"absorb": Absorb()},
    "anneal": OFF | {"absorb": Absorb(), "anneal": Anneal()},
    "calibrate": OFF | {"absorb": Absorb(), "calibrate": Calibrate()},
    "calibrate+anneal": OFF | {"absorb": Absorb(), "calibrate": Calibrate(), "anneal": Anneal()},
    "calibrate+distill": OFF | {"absorb": Absorb(), "calibrate": Calibrate(), "distill": Distill()},
    "calibrate+layerwise+distill": OFF
    | {"absorb": Absorb(), "calibrate": Calibrate(), "layerwise": Layerwise(), "distill": Distill()},
}


@dataclass(frozen=True, order=True)
class Cell:
    """One run: `percent` of the tokens of the pretraining, spent on one target by one set of stages."""

    percent: float
    seed: int
    target: str
    rung: str

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.target}_{self.rung}_{self.percent:g}pct_seed{self.seed}"

    def recipe(self, pretrained: int, **fields: Any) -> Recipe:
        """Return its recipe; `fields` are those of all runs alike."""
        return Recipe(tokens=round(self.percent / 100 * pretrained), **RUNGS[self.rung], **fields)


def cells(
    targets: Sequence[str], rungs: Sequence[str], percents: Sequence[float], seeds: Sequence[int]
) -> Iterator[Cell]:
    """Yield the runs, the cheapest first; the original is trained as it is, once a budget and seed."""
    for percent in sorted(percents):
        for seed in seeds:
            yield Cell(percent, seed, ORIGINAL, "naive")
            yield from (Cell(percent, seed, target, rung) for target in targets for rung in rungs)


def study(output: str | Path, todo: Sequence[Cell], **fields: Any) -> Path:
    """Carry out the runs that are not done yet and return the path of the summary.

    Args:
        output: folder of the study, new or begun.
        todo: the runs.
        **fields: of every recipe, such as `learning_rate`.
    """
    folder = Path(output)
    pretrained = int(json.loads((Path(BASE) / "training_log.json").read_text(encoding="utf-8"))["tokens_seen"])
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    train = tokenize(load_documents("embedded"), tokenizer)
    held_out = tokenize(load_documents("embedded", split=HELD_OUT), tokenizer)
    long = tokenize(load_documents("embedded", split=HELD_OUT, min_characters=CHARACTERS)[:DOCUMENTS], tokenizer)
    long = [text[:DOCUMENT_TOKENS] for text in long]
    for cell in todo:
        run = folder / "runs" / cell.name
        if (run / RESULT).exists() or (run / CANCELLED).exists():
            continue
        recipe = cell.recipe(pretrained, **fields)
        run.mkdir(parents=True, exist_ok=True)
        (run / CONFIG).write_text(_json({**asdict(cell), "recipe": recipe.to_dict()}), encoding="utf-8")
        model = AutoModelForCausalLM.from_pretrained(BASE)
        try:
            done = convert(model, TARGETS[cell.target], train, recipe, held_out=held_out, seed=cell.seed)
        except PosencError as error:
            (run / CANCELLED).write_text(f"{error}\n", encoding="utf-8")
            continue
        curves = _curves(done.model, long, past=cell.target != ORIGINAL)
        (run / RESULT).write_text(_json({**asdict(cell), **done.record, **curves}), encoding="utf-8")
        summarize(folder)
    return summarize(folder)


def _curves(model: Any, documents: list[list[int]], *, past: bool) -> dict[str, Any]:
    """Return perplexity by length, window by window and with half a window of context before every target."""
    lengths = LENGTHS if past else LENGTHS[:1]
    found: dict[str, Any] = {}
    for protocol in ("nonoverlapping", "sliding"):
        curve = perplexity_by_length(model, documents, lengths, protocol=protocol, batch_size=8)
        found[protocol] = {str(length): round(value, 4) for length, value in curve.ppl.items()}
    return found


def summarize(folder: Path) -> Path:
    """Write the summary and the plot of all runs that are done; return the path of the summary."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"runs/*/{RESULT}"))]
    originals = {(run["percent"], run["seed"]): run for run in runs if run["target"] == ORIGINAL}
    rows = [_row(run, originals.get((run["percent"], run["seed"]))) for run in runs]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["target"], row["rung"], row["percent"]), []).append(row)
    summary = [_mean(group) for _, group in sorted(groups.items())]
    path = folder / SUMMARY
    path.write_text(_json({"length": LENGTH, "runs": summary}), encoding="utf-8")
    plot([row for row in summary if row["target"] != ORIGINAL], folder / PLOT)
    return path


def _row(run: dict[str, Any], original: dict[str, Any] | None) -> dict[str, Any]:
    """Return what is compared of a run, against the original trained on the same tokens where there is that run."""
    stages = {stage["stage"]: math.exp(stage["after"]) for stage in run["stages"]}
    last = math.exp(run["stages"][-1]["after"])
    untrained = math.exp(run["stages"][0]["before"])
    goal = untrained if original is None else math.exp(original["stages"][-1]["after"])
    lost = stages["replace"] - goal
    inside = run["nonoverlapping"][str(LENGTH)]
    return {
        **{name: run[name] for name in ("target", "rung", "percent", "seed", "seconds")},
        "replaced": stages["replace"],
        "start": stages.get("calibrate", stages.get("absorb", stages["replace"])),
        "end": last,
        "of_original_trained": last / goal,
        "of_original": last / untrained,
        "recovery": (stages["replace"] - last) / lost if lost > 0 else None,
        "at_8x": run["nonoverlapping"].get(str(8 * LENGTH), math.nan) / inside,
        "at_8x_sliding": run["sliding"].get(str(8 * LENGTH), math.nan) / run["sliding"][str(LENGTH)],
    }


def _mean(group: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean over seeds, and the spread of the end from the lowest to the highest."""
    first = group[0]
    mean: dict[str, Any] = {name: first[name] for name in ("target", "rung", "percent")} | {"seeds": len(group)}
    for name in first:
        if name not in mean and name != "seed":
            values = [row[name] for row in group if row[name] is not None and math.isfinite(row[name])]
            mean[name] = round(statistics.fmean(values), 4) if values else None
    ends = [row["end"] for row in group]
    return mean | {"spread": round(max(ends) - min(ends), 4)}


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw recovery against the share of tokens, one panel a target and one line a set of stages."""
    targets = list(dict.fromkeys(row["target"] for row in rows)) or [""]
    figure = Figure(figsize=(3.2 * len(targets), 3.6), layout="constrained")
    panels = figure.subplots(1, len(targets), sharey=True, squeeze=False)[0]
    for panel, target in zip(panels, targets, strict=True):
        for rung in RUNGS:
            line = [row for row in rows if row["target"] == target and row["rung"] == rung]
            if line:
                panel.plot([row["percent"] for row in line], [row["recovery"] for row in line], marker=".", label=rung)
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set(title=target, xlabel="tokens, % of pretraining", xscale="log")
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="recovery, 1: the original trained alike")
    if rows:
        panels[-1].legend(fontsize=6)
    figure.savefig(path, dpi=110)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"
