"""The main job on the embedded default: patch, fine-tune, measure past the trained length, save, write it all down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_posenc.config import EncodingConfig
from hf_posenc.conversion.finetune import finetune
from hf_posenc.conversion.finetune_config import FinetuneConfig
from hf_posenc.data import HELD_OUT, Document, describe, load_documents
from hf_posenc.encodings.alibi import Alibi
from hf_posenc.encodings.learned import Learned
from hf_posenc.encodings.nope import NoPE
from hf_posenc.encodings.rope import RoPE
from hf_posenc.errors import ExportError
from hf_posenc.evaluation import LengthCurve, perplexity_by_length
from hf_posenc.evaluation.protocols import NONOVERLAPPING, SLIDING
from hf_posenc.export import export_native
from hf_posenc.hub.card import write_card
from hf_posenc.patching import is_patched, patch, unpatch
from hf_posenc.plots import plot_lengths
from hf_posenc.report import PLOT_NAME, RESULT_NAME, check_output, length_table, write_report, write_result

BASE = str(files("hf_posenc") / "assets" / "tiny-gpt2")
LENGTH = 128
LENGTHS = tuple(LENGTH * 2**step for step in range(5))
TOKENS_A_STEP = 4096
CHARACTERS = 16_000
"""Of each held-out file the first so many are measured, and shorter files are left out: each fills the longest window,
and none outweighs the others."""
TITLE = "Perplexity past the trained length, before and after the positions are replaced"
LICENCE = "apache-2.0"


@dataclass(frozen=True)
class Variant:
    """One model of the comparison.

    Attributes:
        label: its name in table and plot.
        encoding: what replaces the learned positions before fine-tuning; None leaves them.
        afterwards: label -> encoding put into the fine-tuned model for measuring, without further training.
    """

    label: str
    encoding: EncodingConfig | None
    afterwards: dict[str, EncodingConfig] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """What its folders are called."""
        return self.label.lower()


VARIANTS = (
    Variant(
        "original",
        None,
        {
            "original, table tiled": Learned(max_position_embeddings=LENGTHS[-1], extension="tile"),
            "original, table interpolated": Learned(max_position_embeddings=LENGTHS[-1], extension="interpolate"),
        },
    ),
    Variant("NoPE", NoPE()),
    Variant("RoPE", RoPE(), {"RoPE, YaRN x16": RoPE(scaling={"rope_type": "yarn", "factor": 16.0})}),
    Variant("ALiBi", Alibi()),
)


def quickstart(
    output: str | Path, *, steps: int = 300, learning_rate: float = 4e-3, documents: int = 8, seed: int = 0
) -> Path:
    """Run the comparison, print its tables, and return the folder it was written to.

    Args:
        output: new folder for `result.json`, table, plot, card, the fine-tuned models in `models`, and in `exported`
            those that a stock architecture computes.
        steps: optimizer steps of every model, of 4,096 tokens each.
        learning_rate: peak of the cosine schedule.
        documents: number of held-out files that are measured.
        seed: of the order of rows.

    Raises:
        OutputExistsError: the folder holds a result already.
        ConfigError: a number that cannot be used.
    """
    folder, console = check_output(output), Console()
    held_out = _held_out(documents)
    texts = [document.text for document in held_out]
    corpus = describe(held_out) | {"source": "Python standard library, held-out modules"}
    curves: list[LengthCurve] = []
    records: dict[str, Any] = {}
    before: dict[str, float] = {}
    for number, variant in enumerate(VARIANTS, 1):
        console.rule(f"{number} of {len(VARIANTS)}: {variant.label}", align="left")
        before[variant.label] = _before(variant, texts)
        console.print(f"perplexity before training: {before[variant.label]:.2f}")
        run = finetune(_run_config(variant, folder, steps=steps, learning_rate=learning_rate, seed=seed))
        record = records[variant.label] = _portable(run.record, folder)
        record["export"] = _exported(variant, run.model, folder)
        for label, model in _stages(variant, run.model):
            curves += [_measure(model, texts, LENGTHS, label, protocol) for protocol in (NONOVERLAPPING, SLIDING)]
        own = [curve for curve in curves if curve.name == variant.label]
        _describe_models(variant, own, record | {"corpus": corpus}, folder)
    recovery = _recovery(curves, before)
    budget = {"steps": steps, "tokens": steps * TOKENS_A_STEP, "length": LENGTH, "learning_rate": learning_rate}
    extra = {"budget": budget, "recovery": recovery, "runs": records, "command": "make quickstart"}
    write_report(curves, folder, seed=seed, corpus=corpus, title=TITLE, extra=extra)
    models = {variant.label: variant.encoding and variant.encoding.to_dict() for variant in VARIANTS}
    settings = {**budget, "documents": documents, "seed": seed, "lengths": list(LENGTHS), "models": models}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    write_card(folder, name="hf-posenc quickstart", licence=LICENCE)
    for table in (_recovery_table(recovery, steps * TOKENS_A_STEP), length_table(curves, title=TITLE)):
        console.print(table)
    console.print(f"Written to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return folder


def _held_out(documents: int) -> list[Document]:
    found = load_documents("embedded", split=HELD_OUT, min_characters=CHARACTERS)[:documents]
    return [Document(document.name, document.text[:CHARACTERS]) for document in found]


def _load_base() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(BASE, dtype="float32")
    return model


def _portable(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a run's record with the paths of this machine cut down to what they mean elsewhere."""
    config = record["config"]
    paths = {"model": Path(BASE).name, "output_dir": str(Path(config["output_dir"]).relative_to(folder))}
    return {**record, "config": {**config, **paths}}


def _exported(variant: Variant, model: PreTrainedModel, folder: Path) -> str:
    """Write the model as a stock architecture where one computes the same; return what came of it, in words."""
    if variant.encoding is None:
        return "it is a stock model as it stands"
    try:
        done = export_native(model, folder / "exported" / variant.slug, AutoTokenizer.from_pretrained(BASE))
    except ExportError as error:
        return f"none: {error}"
    return f"as {done.target}"


def _describe_models(variant: Variant, own: list[LengthCurve], record: dict[str, Any], folder: Path) -> None:
    """Put result, plot and card beside the fine-tuned model, and beside its export where there is one."""
    result = record | {"curves": [curve.to_dict() for curve in own]}
    for place in (folder / "models" / variant.slug, folder / "exported" / variant.slug):
        if place.exists():
            plot_lengths(own, place / Path(PLOT_NAME).stem, title=f"{variant.label}: perplexity against length")
            write_result(place / RESULT_NAME, result)
            write_card(place, name=f"{Path(BASE).name}-{variant.slug}", licence=LICENCE)


def _before(variant: Variant, texts: list[str]) -> float:
    """Return the perplexity at the trained length right after patching, before any training."""
    model = _load_base()
    if variant.encoding is not None:
        patch(model, variant.encoding)
    return _measure(model, texts, (LENGTH,), variant.label, NONOVERLAPPING).ppl[LENGTH]


def _run_config(variant: Variant, folder: Path, *, steps: int, learning_rate: float, seed: int) -> FinetuneConfig:
    chosen = variant.encoding
    return FinetuneConfig(
        model=BASE,
        output_dir=str(folder / "models" / variant.slug),
        encoding=chosen.name if chosen else None,
        encoding_options=asdict(chosen) if chosen else {},
        length=LENGTH,
        max_steps=steps,
        per_device_train_batch_size=TOKENS_A_STEP // LENGTH,
        learning_rate=learning_rate,
        save_steps=steps,
        seed=seed,
    )


def _stages(variant: Variant, model: PreTrainedModel) -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield the fine-tuned model as it is, then with each encoding that is only put in for measuring."""
    yield variant.label, model
    for label, config in variant.afterwards.items():
        if is_patched(model):
            unpatch(model)
        yield label, patch(model, config)


def _measure(
    model: PreTrainedModel, texts: list[str], lengths: Sequence[int], label: str, protocol: str
) -> LengthCurve:
    settings: dict[str, Any] = {"tokenizer": AutoTokenizer.from_pretrained(BASE), "name": label, "batch_size": 4}
    return perplexity_by_length(model, texts, lengths, protocol=protocol, **settings)


def _recovery(curves: Sequence[LengthCurve], before: dict[str, float]) -> list[dict[str, Any]]:
    """Return, for each fine-tuned model, how far it came back to the original trained on the same tokens.

    In windows that do not overlap: at the trained length both protocols tell models apart alike.
    """
    after = {curve.name: curve.ppl[LENGTH] for curve in curves if curve.protocol == NONOVERLAPPING}
    rows = []
    for label, start in before.items():
        lost = start - after["original"]
        recovered = (start - after[label]) / lost if label != "original" and lost > 0 else None
        rows.append(
            {
                "name": label,
                "before": start,
                "after": after[label],
                "ratio": after[label] / after["original"],
                "recovered": recovered,
            }
        )
    return rows


def _recovery_table(recovery: list[dict[str, Any]], tokens: int) -> Table:
    table = Table(title=f"Recovery at {LENGTH} tokens after {tokens:,} training tokens", title_justify="left")
    for column in ("model", "before", "after", "of the original", "recovered"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in recovery:
        recovered = "" if row["recovered"] is None else f"{row['recovered']:.1%}"
        table.add_row(row["name"], f"{row['before']:.2f}", f"{row['after']:.2f}", f"{row['ratio']:.3f}", recovered)
    return table
