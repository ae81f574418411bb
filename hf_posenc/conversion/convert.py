"""Convert a pretrained model to another position encoding, and bring its quality back with few tokens.

Stages in order: put the encoding in; keep what all rows of a removed table shared (`absorption`); fit the encoding to
the scores that were lost (`calibration`), or queries and keys to a rotation (`attention_fit`); train, by one Trainer,
with fading old positions (`annealing`), layers taught one by one (`layerwise`) and the original as a second teacher
beside the text (`distillation`), as the recipe says.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from transformers import PreTrainedModel

from hf_posenc.config import EncodingConfig
from hf_posenc.conversion.batches import Batches, rows_of
from hf_posenc.conversion.checks import check_seed, checked_length, checked_plan, reached
from hf_posenc.conversion.defaults import recipe_for
from hf_posenc.conversion.recipe import Recipe
from hf_posenc.conversion.rotation_choice import rotations
from hf_posenc.data import PackedDataset
from hf_posenc.errors import ConfigError, DataError
from hf_posenc.evaluation.documents import Documents
from hf_posenc.evaluation.sharing import launched
from hf_posenc.evaluation.subject import model_hash
from hf_posenc.length import set_model_max_length
from hf_posenc.planning import PatchPlan
from hf_posenc.provenance import versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT_ROWS = 64
"""Rows on which the loss is measured before and after each stage."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A finished conversion.

    Attributes:
        model: the converted model, in eval mode.
        record: what `result.json` says: recipe, text, `stages` with the held-out loss before and after each in nats a
            token and the tokens it spent, and how well the encoding could be calibrated.
    """

    model: PreTrainedModel
    record: dict[str, Any]

    def __str__(self) -> str:
        """Return one line a stage."""
        return "\n".join(
            f"{stage['stage']:<10} {stage['before']:8.4f} -> {stage['after']:8.4f} nats a token, "
            f"{stage['tokens']:,} tokens"
            for stage in self.record["stages"]
        )


def convert(
    model: PreTrainedModel,
    encoding: EncodingConfig,
    documents: Documents,
    recipe: Recipe | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    held_out: Documents | None = None,
    length: int | None = None,
    output_dir: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
) -> Conversion:
    """Replace the position encoding of a model, in place, and train it until the budget of the recipe is spent.

    Args:
        model: a causal or masked language model of one stack, not patched. It moves to the device of the process.
        encoding: the encoding to put in.
        documents: training texts, lists of token ids, or rows with a column `text` or `input_ids`.
        recipe: the stages; None takes `recipe_for(model, encoding)`.
        tokenizer: of the model; needed for texts, and for the mask token of a masked model.
        held_out: texts of the same kind on which stages are measured; None takes the last rows of `documents`, which
            are then not trained on.
        length: tokens of a row, at most where texts have rows of their own; None takes the length trained for.
        output_dir: new folder for model, `config.yaml` and `result.json`; None writes nothing.
        resume: continue the unfinished run in `output_dir`; the weights end up as if it had never been stopped.
        seed: of the order of rows and of all that is drawn.

    Raises:
        ConfigError: the recipe does not fit what it is for, or the run to resume had another one, or other text.
        DataError: documents that cannot be used.
        OutputExistsError, OutputError: `output_dir` holds a run or a model, or cannot be written to.
        TrainingError: the loss is no number any more; by then the model is patched.
        PosencError: what `plan` raises.
    """
    from hf_posenc.conversion.stages import Stages  # here, since the Trainer and peft take seconds to import

    check_seed(seed)
    recipe = recipe_for(model, encoding) if recipe is None else recipe
    plan = checked_plan(model, encoding, recipe)
    length = checked_length(model, plan, recipe, length)
    causal = plan.geometry.causal
    rows = rows_of(documents, tokenizer, model, length=length, causal=causal, seed=seed)
    apart = None if held_out is None else rows_of(held_out, tokenizer, model, length=length, causal=causal, seed=None)
    train, held = _split(rows, apart)
    told = {"encoding": plan.config.to_dict(), "recipe": recipe.to_dict(), "length": length, "seed": seed}
    told |= _identity(model, train, held)
    batches, choice = _batches(plan, tokenizer, recipe, length, seed), rotations(model, encoding, plan)
    stages = Stages(
        model=model, plan=plan, recipe=recipe, batches=batches, rotations=choice, train=train, held_out=held
    )
    folder = None if output_dir is None else Path(output_dir)
    if folder is not None:
        _begin(folder, told, resume=resume)
    stages.run(folder, resume=resume, seed=seed)
    told["encoding"] = stages.plan.config.to_dict()  # calibration may have chosen some of it
    told |= {"stages": stages.record, "calibration": stages.calibration, **stages.training}
    record = {**told, "packing": rows.report.as_dict(), "versions": versions()}
    _save(model, tokenizer, record, folder)
    return Conversion(model=model, record=record)


def _begin(folder: Path, told: dict[str, Any], *, resume: bool) -> None:
    """Check that the folder is free, or holds the run to resume, and write what the run is told."""
    from hf_posenc.conversion.run_folder import require_free, write_config

    require_free(folder, told, resume=resume)
    launched().wait_for_everyone()  # all have looked before one writes
    if launched().is_main_process:
        write_config(folder, yaml.safe_dump(told, sort_keys=False))


def _save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, record: dict[str, Any], folder: Path | None
) -> None:
    """Let the main process write, where there is a folder, and the others wait until it is whole."""
    from hf_posenc.conversion.run_folder import RESULT

    if folder is None:
        return
    if launched().is_main_process:
        model.save_pretrained(folder)
        if tokenizer is not None:
            set_model_max_length(tokenizer, model)
            tokenizer.save_pretrained(folder)
        (folder / RESULT).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    launched().wait_for_everyone()


def _split(rows: PackedDataset, held: PackedDataset | None) -> tuple[Any, Any]:
    """Return the datasets to train on and to measure on."""
    if held is not None:
        every = max(1, len(held.dataset) // HELD_OUT_ROWS)  # rows lie in the order of the texts: take some of each
        return rows.dataset, held.dataset.select(range(0, len(held.dataset), every)[:HELD_OUT_ROWS])
    kept = min(HELD_OUT_ROWS, len(rows.dataset) // 5)
    if kept < 1:
        raise DataError(f"{len(rows.dataset)} rows of text are too few to hold some out; give more, or held_out texts.")
    last = len(rows.dataset) - kept
    return rows.dataset.select(range(last)), rows.dataset.select(range(last, last + kept))


def _batches(plan: PatchPlan, tokenizer: Any, recipe: Recipe, length: int, seed: int) -> Batches:
    mask = getattr(tokenizer, "mask_token_id", None)
    if not plan.geometry.causal and mask is None:
        raise ConfigError("the model is bidirectional, and no tokenizer with a mask token was given to train it with.")
    return Batches(
        causal=plan.geometry.causal,
        mask_token_id=mask,
        special_ids=tuple(getattr(tokenizer, "all_special_ids", ())),
        pad_token_id=getattr(tokenizer, "pad_token_id", None) or 0,
        reach=reached(recipe, length),
        seed=seed,
    )


def _identity(model: PreTrainedModel, train: Any, held: Any) -> dict[str, Any]:
    """Return what a run that is resumed must have in common with the one that was stopped, beside what it is told."""
    digest = hashlib.sha256()
    for rows in (train, held):
        for row in rows.with_format("numpy")["input_ids"]:
            digest.update(row.astype(np.int64).tobytes())
    return {
        "model_hash": model_hash(model),
        "text_hash": digest.hexdigest(),
        "processes": launched().num_processes,
    }
