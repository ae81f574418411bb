"""The study of conversions: which stages bring how much back, on the bundled model, whose pretraining is known.

Every run is a folder with `config.json` and, when it is done, `result.json`; a run that failed has `cancelled.txt` with
the reason, and one without either was stopped and is run again. The report is written anew after every run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc.config import EncodingConfig, encoding
from hf_posenc.conversion.convert import convert
from hf_posenc.conversion.recipe import Absorb, Anneal, Calibrate, Distill, Layerwise, Reach, Recipe
from hf_posenc.conversion.study_page import ORIGINAL
from hf_posenc.conversion.study_report import LENGTH, LENGTHS, RESULT, SLIDING, UNSEEN, write_report
from hf_posenc.conversion.study_text import selection_rows, unseen_documents
from hf_posenc.conversion.training import packed_perplexity
from hf_posenc.data import HELD_OUT, Document, describe, load_documents, tokenize
from hf_posenc.errors import PosencError
from hf_posenc.evaluation import perplexity_by_length

BASE = str(files("hf_posenc") / "assets" / "tiny-gpt2")
DOCUMENTS, CHARACTERS = 4, 16_000
CONFIG, CANCELLED = "config.json", "cancelled.txt"

TARGETS: dict[str, EncodingConfig] = {
    "alibi": encoding("alibi", trainable=True, per_layer=True),
    "kerple": encoding("kerple", per_layer=True),
    "t5": encoding("t5", per_layer=True),
    "rope": encoding("rope"),
    "yarn": encoding("rope", scaling={"rope_type": "yarn", "factor": 8.0}),
    "fire": encoding("fire", per_layer=True),
    "nope": encoding("nope"),
    ORIGINAL: encoding("learned"),
}
FITTED = ("alibi", "kerple", "t5", "rope", "yarn", "fire")
"""Targets with something to calibrate."""
START: dict[str, Any] = {"absorb": Absorb(), "calibrate": Calibrate()}
RUNGS: dict[str, dict[str, Any]] = {
    "naive": {},
    "distill": {"distill": Distill()},
    "absorb": {"absorb": Absorb()},
    "start": START,
    "start+anneal": START | {"anneal": Anneal()},
    "start+layerwise": START | {"layerwise": Layerwise()},
    "start+distill": START | {"distill": Distill()},
    "start+reach+distill": START | {"reach": Reach(factor=8.0), "distill": Distill()},
    "start+layerwise+distill": START | {"layerwise": Layerwise(), "distill": Distill()},
}
"""Sets of stages; `start` is everything that comes before training."""
OF_ORIGINAL = ("naive", "distill")
"""Sets of stages by which the original is trained, to compare with: it needs no start."""
TEXTS: dict[str, Callable[[], list[Document]]] = {
    "seen": lambda: load_documents("embedded"),
    UNSEEN: unseen_documents,
}
"""What is trained on: the text that the original was trained on, and text that it never saw."""


@dataclass(frozen=True, order=True)
class Cell:
    """One run: `percent` of the tokens of the pretraining, spent on one target by one set of stages."""

    percent: float
    seed: int
    target: str
    rung: str
    learning_rate: float = Recipe.learning_rate
    text: str = UNSEEN
    batch_size: int = Recipe.batch_size

    @property
    def name(self) -> str:
        """The name of its folder."""
        return (
            f"{self.target}_{self.rung}_{self.percent:g}pct_lr{self.learning_rate:g}_batch{self.batch_size}"
            f"_seed{self.seed}_{self.text}"
        )

    def recipe(self, pretrained: int) -> Recipe:
        """Return its recipe; stages that the target has no use for are off."""
        stages = dict(RUNGS[self.rung])
        if self.target not in FITTED:
            stages.pop("calibrate", None)
        tokens = round(self.percent / 100 * pretrained)
        return Recipe(tokens=tokens, batch_size=self.batch_size, learning_rate=self.learning_rate, **stages)


def cells(
    targets: Sequence[str],
    rungs: Sequence[str],
    percents: Sequence[float],
    rates: Sequence[float],
    seeds: Sequence[int],
    *,
    text: str = UNSEEN,
    batch_size: int = Recipe.batch_size,
) -> Iterator[Cell]:
    """Yield the runs, the cheapest first; the original has only what needs no start (`OF_ORIGINAL`)."""
    for percent in sorted(percents):
        for seed in seeds:
            for rate in rates:
                for target in targets:
                    for rung in rungs:
                        if target != ORIGINAL or rung in OF_ORIGINAL:
                            yield Cell(percent, seed, target, rung, rate, text, batch_size)


def study(output: str | Path, todo: Sequence[Cell]) -> Path:
    """Carry out the runs that are not done yet and return the path of the report.

    Args:
        output: folder of the study, new or begun.
        todo: the runs, in order.
    """
    folder = Path(output)
    pretrained = int(json.loads((Path(BASE) / "training_log.json").read_text(encoding="utf-8"))["tokens_seen"])
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    documents = {name: TEXTS[name]() for name in dict.fromkeys(cell.text for cell in todo)}
    train = {name: tokenize(texts, tokenizer) for name, texts in documents.items()}
    held_out = tokenize(load_documents("embedded", split=HELD_OUT), tokenizer)
    long = tokenize(load_documents("embedded", split=HELD_OUT, min_characters=CHARACTERS)[:DOCUMENTS], tokenizer)
    long = [text[: LENGTHS[-1]] for text in long]
    for cell in todo:
        run = folder / "runs" / cell.name
        if (run / RESULT).exists() or (run / CANCELLED).exists():
            continue
        recipe = cell.recipe(pretrained)
        run.mkdir(parents=True, exist_ok=True)
        (run / CONFIG).write_text(_json({**asdict(cell), "recipe": recipe.to_dict()}), encoding="utf-8")
        model = AutoModelForCausalLM.from_pretrained(BASE)
        try:
            done = convert(model, TARGETS[cell.target], train[cell.text], recipe, held_out=held_out, seed=cell.seed)
        except PosencError as error:
            (run / CANCELLED).write_text(f"{error}\n", encoding="utf-8")
            continue
        selection = selection_rows(done.model, tokenizer, length=LENGTH)
        found = {"selection_loss": math.log(packed_perplexity(done.model, selection))}
        found |= {} if cell.target == ORIGINAL else _curves(done.model, long)
        record = {**asdict(cell), **done.record, "documents": describe(documents[cell.text]), **found}
        (run / RESULT).write_text(_json(record), encoding="utf-8")
        write_report(folder)
    return write_report(folder)


def _curves(model: Any, documents: list[list[int]]) -> dict[str, Any]:
    """Return perplexity by length, window by window and with half a window of context before every target."""
    plain = perplexity_by_length(model, documents, LENGTHS, batch_size=8).ppl
    found = {"nonoverlapping": {str(length): round(value, 4) for length, value in plain.items()}, "sliding": {}}
    for length in SLIDING:
        curve = perplexity_by_length(model, documents, [length], protocol="sliding", stride=length // 2, batch_size=8)
        found["sliding"][str(length)] = round(curve.ppl[length], 4)
    return found


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"
