"""Model cards, written from `result.json` and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_posenc.evaluation import LengthCurve
from hf_posenc.report import PLOT_NAME, describe_protocol


def model_card(result: Mapping[str, Any], *, name: str, licence: str, base_model: str | None = None) -> str:
    """Return the README.md of a published run, metadata included.

    Args:
        result: the content of a `result.json` with `curves`, and `recovery` where models were fine-tuned.
        name: what the card calls the run.
        licence: SPDX identifier of the weights' licence, in lower case.
        base_model: Hub name of the checkpoint that was patched, where it has one.
    """
    curves = [LengthCurve.from_dict(curve) for curve in result["curves"]]
    data = ModelCardData(
        license=licence,
        library_name="transformers",
        base_model=base_model,
        model_name=name,
        tags=["hf-posenc", "position-encoding", "length-extrapolation"],
        eval_results=[_evaluation(curve, length, result) for curve in curves for length in _telling(curve)],
    )
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {name}\n",
        "Perplexity of one pretrained model, with its own position encoding and with others put in its place by "
        "hf-posenc. Every number comes from `result.json` in this folder.\n",
        f"![perplexity against length]({PLOT_NAME})\n",
        _curve_table(curves),
        f"Measured with {describe_protocol(curves)}. Trained length: {curves[0].trained_length} tokens.\n",
        _recovery_table(result),
        "## Limits\n",
        "Perplexity that stays flat past the trained length says that a model does not break there, not that it uses "
        "the longer context. A small model on one kind of text; other sizes and texts differ.\n",
        "## Provenance\n",
        *(f"- {key}: {value}" for key, value in sorted(result["versions"].items())),
        f"- seed: {result['seed']}",
        f"- text: {result['corpus']}",
        f"- command: `{result['command']}`" if "command" in result else "",
    ]
    return str(ModelCard("\n".join(parts)).content)


def _telling(curve: LengthCurve) -> list[int]:
    """Return the lengths that go into the metadata: the trained one and the longest."""
    return sorted({length for length in (curve.reference_length, max(curve.ppl, default=None)) if length})


def _evaluation(curve: LengthCurve, length: int, result: Mapping[str, Any]) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=str(result["corpus"].get("source", "text")),
        dataset_name="held-out text",
        metric_type="perplexity",
        metric_name=f"perplexity at {length} tokens, {curve.name}, {curve.protocol}",
        metric_value=round(curve.ppl[length], 4),
    )


def _curve_table(curves: list[LengthCurve]) -> str:
    lengths = sorted({length for curve in curves for length in curve.lengths})
    rows = [["model", *(f"{length:,}" for length in lengths)], ["---", *("---:" for _ in lengths)]]
    reasons: dict[str, None] = {}
    several = len({curve.protocol for curve in curves}) > 1
    for curve in curves:
        cells = []
        for length in lengths:
            if length in curve.refused:
                reasons[f"{curve.name} at {length:,}: {curve.refused[length]}"] = None
            cells.append(f"{curve.ppl[length]:,.2f}" if length in curve.ppl else "none")
        rows.append([f"{curve.name}, {curve.protocol}" if several else curve.name, *cells])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([table, "", *(f"- {reason}" for reason in reasons), ""])


def _recovery_table(result: Mapping[str, Any]) -> str:
    if "recovery" not in result:
        return ""
    lines = [
        "## Recovery\n",
        f"Each model was fine-tuned on the same {result['budget']['tokens']:,} tokens at length "
        f"{result['budget']['length']}; perplexities at that length.\n",
        "| model | before | after | of the original | recovered |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in result["recovery"]:
        recovered = "" if row["recovered"] is None else f"{row['recovered']:.1%}"
        numbers = f"{row['before']:,.2f} | {row['after']:,.2f} | {row['ratio']:.3f} | {recovered}"
        lines.append(f"| {row['name']} | {numbers} |")
    return "\n".join([*lines, ""])
