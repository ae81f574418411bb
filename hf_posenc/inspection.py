"""What `hf-posenc inspect` says of a model: its positions, how far they really reach, and what could replace them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from hf_posenc.anatomy import attention_modules
from hf_posenc.config import ENCODINGS
from hf_posenc.errors import PosencError, UnsupportedFamilyError
from hf_posenc.evaluation import packing
from hf_posenc.evaluation.diagnosis import text_when_moved
from hf_posenc.evaluation.position_table import table_report
from hf_posenc.export.route import targets
from hf_posenc.family import Family, find_family
from hf_posenc.length import max_length
from hf_posenc.patching import discover, is_patched, plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def inspection(
    model: PreTrainedModel, texts: Sequence[str] = (), *, tokenizer: PreTrainedTokenizerBase | None = None
) -> dict[str, str]:
    """Return what there is to know of a model before a patch: heading -> words, in the order to be read.

    Args:
        model: patched or not; nothing of it changes.
        texts: to measure on up to which position text stays good; with none, or no tokenizer, that line is left out.
        tokenizer: of the model.
    """
    limit = max_length(model)
    taken = _taken(model)
    rows = {
        "class": type(model).__name__,
        "model type": model.config.model_type,
        "encoding": str(getattr(model.config, "posenc", None) or _own_positions(model)),
        "attention": _attention(model),
        "last position": "none: no table ends" if limit is None else f"{limit:,}",
        "trained rows": _trained(model),
        "good on text": _on_text(model, texts, tokenizer),
        "packed rows": _packed(model),
        "can take": _can_take(model, taken),
        "then exports as": _exports(model, taken),
    }
    return {heading: words for heading, words in rows.items() if words}


def _own_positions(model: PreTrainedModel) -> str:
    """Describe where a stock model holds its positions; for a family without a record, propose one."""
    try:
        family = find_family(model.config.model_type)
    except UnsupportedFamilyError:
        return f"no family record; it looks like {discover(model)}"
    held = {name: _positions_of(stack, record) for name, (stack, record) in family.stacks_of(model).items()}
    return "; ".join(f"{name}: {words}" if name else words for name, words in held.items())


def _positions_of(model: PreTrainedModel, family: Family) -> str:
    """Describe where a stock model of one body holds its positions."""
    if family.rotary:
        return f"rotary, {getattr(model.config, 'rope_parameters', None) or f'by {family.rotary}'}"
    if family.table is None:
        return "inside the scores of its attention"
    return f"{type(family.body_of(model).get_submodule(family.table)).__name__} at {family.table}"


def _attention(model: PreTrainedModel) -> str:
    try:
        family = find_family(model.config.model_type)
    except UnsupportedFamilyError:
        return ""
    counted = []
    for name, (stack, record) in family.stacks_of(model).items():
        found = attention_modules(record.body_of(stack), record)
        for path, module in list(found.items())[:1]:
            where = f"{len(found)} times {type(module).__name__}, the first at {path}"
            counted.append(f"{name}: {where}" if name else where)
    return "; ".join(counted)


def _trained(model: PreTrainedModel) -> str:
    report = table_report(model)
    if report is None:
        return ""
    if report.fixed:
        return "a formula, with nothing to train"
    if report.trained is None:
        return "not known: the config does not say how rows were drawn"
    if report.trained == 0:
        return "none: all are as long as they were drawn"
    said = f"up to position {report.trained:,}"
    return f"{said}; less after {report.strong:,}" if report.strong < report.trained else said


def _on_text(model: PreTrainedModel, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> str:
    if not texts or tokenizer is None:
        return ""
    try:
        curve = text_when_moved(model, texts, tokenizer=tokenizer)
    except PosencError as error:
        return f"not measured: {error}"
    worst, cost = max(curve.cost.items(), key=lambda item: item[1])
    return f"up to position {curve.usable:,}; moved by {worst:,}, the same text costs {cost:.2f} nats a token more"


def _packed(model: PreTrainedModel) -> str:
    try:
        leak = packing.packing_leak(model)
    except UnsupportedFamilyError as error:
        return f"not safe: {error}"
    if leak <= packing.TOLERATED:
        return "safe: position_ids that start again keep documents apart"
    return f"not safe: documents in one row hear each other (outputs change by {leak:.0%})"


def _taken(model: PreTrainedModel) -> list[str]:
    """Return the names of the encodings that a patch accepts with their default fields, or of the one in place."""
    if is_patched(model):
        return [model.config.posenc["name"]]
    taken = []
    for encoding in ENCODINGS.values():
        try:
            plan(model, encoding())
        except (PosencError, TypeError):  # refused; or made of other encodings, which have to be given
            continue
        taken.append(encoding.name)
    return taken


def _can_take(model: PreTrainedModel, taken: list[str]) -> str:
    if is_patched(model):
        return "another encoding after posenc.unpatch(model)"
    return ", ".join(taken) or "nothing: hf-posenc inspect MODEL --encoding alibi says why"


def _exports(model: PreTrainedModel, taken: list[str]) -> str:
    """Name the stock architectures that compute exactly what the model would, encoding by encoding."""
    found = {name: targets(model.config.model_type, name) for name in taken}
    return "; ".join(f"{name}: {', '.join(routes)}" for name, routes in found.items() if routes)
