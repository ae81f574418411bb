"""Convert a pretrained model to another position encoding, and bring its quality back with few tokens.

Stages in order: put the encoding in; keep what all rows of a removed table shared (`absorption`); fit the encoding to
the scores that were lost (`calibration`), or queries and keys to a rotation (`attention_fit`); train, by one Trainer,
with fading old positions (`annealing`), layers taught one by one (`layerwise`) and the original as a second teacher
beside the text (`distillation`), as the recipe says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hf_posenc.config import EncodingConfig
from hf_posenc.conversion.absorption import can_absorb
from hf_posenc.conversion.batches import Batches, Texts, packed_rows
from hf_posenc.conversion.defaults import calibrates, recipe_for
from hf_posenc.conversion.layerwise import layer_paths
from hf_posenc.conversion.recipe import Recipe
from hf_posenc.conversion.rotation_choice import rotations
from hf_posenc.data import PackedDataset
from hf_posenc.errors import ConfigError, DataError
from hf_posenc.evaluation.sharing import launched
from hf_posenc.length import set_model_max_length
from hf_posenc.patching import plan as make_plan
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
    documents: Texts,
    recipe: Recipe | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    held_out: Texts | None = None,
    length: int | None = None,
    output_dir: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
) -> Conversion:
    """Replace the position encoding of a model, in place, and train it until the budget of the recipe is spent.

    Args:
        model: a causal or masked language model of one stack, not patched.
        encoding: the encoding to put in.
        documents: training texts, or lists of token ids.
        recipe: the stages; None takes `recipe_for(model, encoding)`.
        tokenizer: of the model; needed for texts, and for the mask token of a masked model.
        held_out: texts of the same kind on which stages are measured; None takes the last rows of `documents`, which
            are then not trained on.
        length: tokens of a row; None takes the length that the model was trained for.
        output_dir: new folder for model, `config.yaml` and `result.json`; None writes nothing.
        resume: continue the unfinished run in `output_dir`; the weights end up as if it had never been stopped.
        seed: of the order of rows and of all that is drawn.

    Raises:
        ConfigError: the recipe does not fit the model or the encoding, or is not that of the run to resume.
        DataError: documents that cannot be used.
        OutputExistsError: `output_dir` holds something else.
        TrainingError: the loss is no number any more.
        PosencError: what `plan` raises.
    """
    # these here, since with the Trainer and peft they take seconds to import
    from hf_posenc.conversion.run_folder import require_free
    from hf_posenc.conversion.stages import Stages

    recipe = recipe_for(model, encoding) if recipe is None else recipe
    plan = _checked_plan(model, encoding, recipe)
    length = length or plan.geometry.max_position_embeddings
    rows = packed_rows(documents, tokenizer, model, length=length, seed=seed)
    apart = None if held_out is None else packed_rows(held_out, tokenizer, model, length=length, seed=None)
    train, held = _split(rows, apart)
    told = {"encoding": plan.config.to_dict(), "recipe": recipe.to_dict(), "length": length, "seed": seed}
    folder = None if output_dir is None else Path(output_dir)
    if folder is not None:
        require_free(folder, told, resume=resume)
    batches, choice = _batches(plan, tokenizer, recipe, length, seed), rotations(model, encoding, plan)
    stages = Stages(
        model=model, plan=plan, recipe=recipe, batches=batches, rotations=choice, train=train, held_out=held
    )
    stages.run(folder, told, resume=resume, seed=seed)
    told["encoding"] = stages.plan.config.to_dict()  # calibration may have chosen some of it
    found = {"stages": stages.record, "calibration": stages.calibration, **stages.training}
    record = {**told, **found, "packing": rows.report.as_dict(), "versions": versions()}
    _save(model, tokenizer, record, folder)
    return Conversion(model=model, record=record)


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


def _checked_plan(model: PreTrainedModel, encoding: EncodingConfig, recipe: Recipe) -> PatchPlan:
    """Return the plan of the patch, or raise where the recipe does not fit it."""
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"expected a Recipe such as posenc.Recipe(tokens=250_000), got: {recipe!r}")
    plan = make_plan(model, encoding)
    if plan.stacks or plan.family.stacks:
        raise ConfigError(f"{type(model).__name__} has several stacks; convert takes models of one. Use patch.")
    if model.get_output_embeddings() is None:
        raise ConfigError(f"{type(model).__name__} has no language-modelling head, and so no loss to bring back.")
    if recipe.layerwise is not None:
        layer_paths(plan.attention)
    if recipe.absorb is not None and not can_absorb(model, plan):
        raise ConfigError(f"{type(model).__name__} loses no table of positions with a mean to keep; leave absorb out.")
    if recipe.calibrate is not None and not calibrates(model, encoding, plan):
        raise ConfigError(
            f"{type(plan.config).__name__} has nothing that could be fitted to scores; leave calibrate out."
        )
    return plan


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
    reach = None if recipe.reach is None else max(length, int(recipe.reach.factor * length))
    return Batches(causal=plan.geometry.causal, mask_token_id=mask, reach=reach, seed=seed)
