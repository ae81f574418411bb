"""Model cards, written from `result.json` and the config of the model, and from nothing else."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_posenc.config import ENCODINGS
from hf_posenc.errors import DataError
from hf_posenc.evaluation import LengthCurve
from hf_posenc.report import PLOT_NAME, RESULT_NAME, by_protocol, describe_protocol, length_grid

TEMPLATE = Path(__file__).with_name("card.md.jinja")
AUTO = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
}
FLAT = (
    "Perplexity that stays flat past the trained length says that a model does not break there, not that it uses the "
    "longer context. {scope}"
)
MANY = "A small model on one kind of text; other sizes and texts differ."
ONE = (
    "Measured on the texts named below only; other texts differ. Nothing was done about what else the base model does."
)


def model_card(
    result: Mapping[str, Any],
    *,
    name: str,
    licence: str | None,
    base_model: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Return the README.md of a published run or model, metadata included.

    Args:
        result: the content of a `result.json`: `curves` where something was measured, `recovery` where models were
            compared, and what fine-tuning notes of its run.
        name: what the card calls it; for a model, its name on the Hub.
        licence: SPDX identifier of the weights' licence, in lower case; None where it is not known.
        base_model: Hub name of the checkpoint that was patched, where it has one.
        config: the content of the model's `config.json`, for the card of one model.
    """
    curves = [LengthCurve.from_dict(curve) for curve in result.get("curves", ())]
    data = ModelCardData(
        license=licence or "unknown",
        library_name="transformers",
        base_model=base_model,
        base_model_relation="finetune" if base_model else None,
        pipeline_tag=_pipeline(config),
        model_name=name,
        tags=["hf-posenc", "position-encoding", "length-extrapolation"],
        eval_results=[_evaluation(curve, length, result) for curve in curves for length in _telling(curve)],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=name,
        base_text=f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "A pretrained model",
        encoding=_encoding(config, result),
        loading=_loading(config, name),
        curves=curves,
        plot=PLOT_NAME,
        table=_curve_table(curves),
        protocols=[f"`{name}`: {describe_protocol(group)}" for name, group in by_protocol(curves).items()],
        trained_length=curves[0].trained_length if curves else None,
        recovery=_recovery_table(result),
        budget=result.get("budget"),
        training=_training(result),
        certificate=result.get("certificate"),
        limits=FLAT.format(scope=ONE if config else MANY),
        provenance=_provenance(result),
    )
    return str(card.content).strip() + "\n"


def write_card(folder: Path, *, name: str, licence: str, base_model: str | None = None) -> Path:
    """Write README.md from the `result.json` of a folder, and its `config.json` where it has one; return its path.

    Raises:
        DataError: there is no `result.json`, or none that can be read.
    """
    try:
        result = json.loads((folder / RESULT_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} has no {RESULT_NAME} to write a card from: {error}") from error
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    card = model_card(result, name=name, licence=licence, base_model=base_model, config=config)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return folder / "README.md"


def _pipeline(config: Mapping[str, Any] | None) -> str | None:
    auto = _auto_class(config) if config else None
    return {"AutoModelForCausalLM": "text-generation", "AutoModelForMaskedLM": "fill-mask"}.get(auto or "")


def _auto_class(config: Mapping[str, Any]) -> str:
    name = (config.get("architectures") or [""])[0]
    return next((auto for ending, auto in AUTO.items() if name.endswith(ending)), "AutoModel")


def _encoding(config: Mapping[str, Any] | None, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what stands about an encoding where it is defined, and the parameters that a model has of it."""
    if config is None:
        return None
    spec = config.get("posenc")
    if spec is None:  # computed by transformers itself, or never replaced
        asked = result.get("config", {}).get("encoding")
        rope = config.get("rope_parameters")
        if asked not in ENCODINGS:
            return None
        spec = {"name": asked, **(rope or {})}
    cls = ENCODINGS[spec["name"]]
    words, _, source = (inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")).partition("\n\n")
    formula = (inspect.getdoc(cls.module) or "").partition("\n\n")[0]
    return {
        "words": " ".join(words.split()),
        "formula": " ".join(formula.split()),
        "source": " ".join(source.split()),
        "parameters": {key: f"`{value}`" for key, value in spec.items()},
    }


def _loading(config: Mapping[str, Any] | None, name: str) -> str | None:
    """Return how the model is loaded: natively, with the code beside it, or by this package."""
    if config is None:
        return None
    auto = _auto_class(config)
    if not str(config.get("model_type", "")).startswith("posenc_"):
        return _code("Transformers itself computes this model:", f'{auto}.from_pretrained("{name}")')
    package = _code(
        "With hf-posenc installed, no code of this folder runs:",
        f'import hf_posenc as posenc\n\nposenc.from_pretrained("{name}")',
    )
    if "auto_map" not in config:
        return package
    code = _code(
        "Without hf-posenc, transformers runs the Python files of this folder:",
        f'{auto}.from_pretrained("{name}", trust_remote_code=True)',
    )
    return f"{code}\n\n{package}"


def _code(words: str, code: str) -> str:
    return f"{words}\n\n```python\n{code}\n```"


def _training(result: Mapping[str, Any]) -> str:
    if "tokens_seen" not in result:
        return ""
    run = result["config"]
    return (
        f"{result['tokens_seen']:,} tokens in {result['steps']:,} steps at length {result['packing']['length']:,}, "
        f"learning rate {run['learning_rate']:g}, seed {run['seed']}"
        + (f", LoRA of rank {run['lora_rank']}" if run["lora_rank"] else "")
        + f"; last loss {result['final_loss']:.4f} nats per token."
    )


def _provenance(result: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(sorted(result.get("versions", {}).items()))
    found["seed"] = result.get("seed", result.get("config", {}).get("seed"))
    found["text"] = result.get("corpus")
    if "command" in result:
        found["command"] = f"`{result['command']}`"
    return {key: value for key, value in found.items() if value is not None}


def _telling(curve: LengthCurve) -> list[int]:
    """Return the lengths that go into the metadata: the trained one and the longest."""
    telling = {length for length in (curve.reference_length, max(curve.ppl, default=None)) if length}
    return sorted(length for length in telling if math.isfinite(curve.ppl[length]))


def _evaluation(curve: LengthCurve, length: int, result: Mapping[str, Any]) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=str(result.get("corpus", {}).get("source", "text")),
        dataset_name="held-out text",
        metric_type="perplexity",
        metric_name=f"perplexity at {length} tokens, {curve.name}, {curve.protocol}",
        metric_value=round(curve.ppl[length], 4),
    )


def _curve_table(curves: list[LengthCurve]) -> str:
    if not curves:
        return ""
    grid = length_grid(curves)
    rule = ["---"] * grid.words + ["---:"] * (len(grid.headings) - grid.words)
    table = [f"| {' | '.join(row)} |" for row in (grid.headings, rule, *grid.rows)]
    return "\n".join([*table, *(line for note in grid.notes for line in ("", note))])


def _recovery_table(result: Mapping[str, Any]) -> str:
    if "recovery" not in result:
        return ""
    lines = [
        "| model | before | after | of the original | recovered |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in result["recovery"]:
        recovered = "" if row["recovered"] is None else f"{row['recovered']:.1%}"
        numbers = f"{row['before']:,.2f} | {row['after']:,.2f} | {row['ratio']:.3f} | {recovered}"
        lines.append(f"| {row['name']} | {numbers} |")
    return "\n".join(lines)
