"""The recipe for one model and one encoding: the stages that helped in `model_cards/study`, where they apply."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hf_posenc.config import EncodingConfig
from hf_posenc.conversion.absorption import can_absorb
from hf_posenc.conversion.calibration import can_calibrate
from hf_posenc.conversion.recipe import Absorb, Calibrate, Distill, Recipe
from hf_posenc.conversion.rotation_choice import rotations
from hf_posenc.patching import plan as make_plan
from hf_posenc.planning import PatchPlan


def recipe_for(model: PreTrainedModel, encoding: EncodingConfig, **fields: Any) -> Recipe:
    """Return the recipe that is recommended for converting a model to an encoding.

    The mean of a table that is added to the token embedding is absorbed; an encoding whose parameters make a bias that
    looks at positions alone is calibrated; the original teaches all.

    Args:
        model: not patched.
        encoding: to convert to.
        **fields: of `Recipe`, in place of what is recommended; stages as objects or as mappings of their fields.

    Raises:
        ConfigError: an unknown field, or a value out of range.
        PosencError: what `plan` raises.
    """
    plan = make_plan(model, encoding)
    stages: dict[str, Any] = {"distill": Distill()}
    if can_absorb(model, plan):
        stages["absorb"] = Absorb()
    if calibrates(model, encoding, plan):
        stages["calibrate"] = Calibrate()
    return Recipe.from_dict(stages | fields)


def calibrates(model: PreTrainedModel, encoding: EncodingConfig, plan: PatchPlan) -> bool:
    """Tell whether an encoding, as it was asked for, has parameters to fit or leaves a rotation open."""
    fitted = can_calibrate(plan.config.build_layers(plan.geometry, len(plan.attention)))
    return fitted or bool(rotations(model, encoding, plan))
