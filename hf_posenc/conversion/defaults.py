"""The recipe for one model and one encoding: the stages that helped in `model_cards/study`, where they apply."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hf_posenc.config import EncodingConfig
from hf_posenc.conversion.absorption import can_absorb
from hf_posenc.conversion.attention_fit import gains_rotation
from hf_posenc.conversion.calibration import can_calibrate
from hf_posenc.conversion.recipe import Absorb, Calibrate, Distill, Reach, Recipe
from hf_posenc.conversion.rotation_choice import rotations
from hf_posenc.encodings.rope import RoPE
from hf_posenc.patching import plan as make_plan
from hf_posenc.planning import PatchPlan

WIDTH = 128
"""Of the model on which `Recipe.learning_rate` was chosen. Others learn at rates in inverse proportion to their width:
muP has it so for Adam (Yang et al. 2022, arXiv:2203.03466), and so the best ones at widths of 64 and 256 were found."""
FAR = 2.0
"""Learning rate of what starts unfitted, over that of the others: NoPE ends lower at it."""


def recipe_for(model: PreTrainedModel, encoding: EncodingConfig, **fields: Any) -> Recipe:
    """Return the recipe that is recommended for converting a model to an encoding.

    The mean of a table that is added to the token embedding is absorbed; an encoding whose parameters make a bias that
    looks at positions alone is calibrated; queries and keys are fitted to a rotation that the model lacked; one that is
    scaled by a factor is trained at positions as far as that; the original teaches all. Wider models learn at lower
    rates; what starts unfitted has further to go and learns faster.

    Args:
        model: not patched.
        encoding: to convert to.
        **fields: of `Recipe`, in place of what is recommended; stages as objects or as mappings of their fields.

    Raises:
        ConfigError: an unknown field, or a value out of range.
        PosencError: what `plan` raises.
    """
    plan = make_plan(model, encoding)
    rate = Recipe.learning_rate * WIDTH / (plan.geometry.num_attention_heads * plan.geometry.head_dim)
    stages: dict[str, Any] = {"distill": Distill(), "learning_rate": FAR * rate}
    if can_absorb(model, plan):
        stages["absorb"] = Absorb()
    if calibrates(model, encoding, plan, lora_rank=fields.get("lora_rank", 0)):
        stages |= {"calibrate": Calibrate(), "learning_rate": rate}
    if isinstance(encoding, RoPE) and encoding.scaling is not None and "factor" in encoding.scaling:
        stages["reach"] = Reach(factor=encoding.scaling["factor"])
    return Recipe.from_dict(stages | fields)


def calibrates(model: PreTrainedModel, encoding: EncodingConfig, plan: PatchPlan, *, lora_rank: int) -> bool:
    """Tell whether calibration has anything to do for an encoding as it was asked for.

    That is parameters to fit, or a rotation that the model lacked: queries and keys are fitted to it, or below
    adapters, which leave these alone, what was left open of it is chosen.
    """
    if can_calibrate(plan.config.build_layers(plan.geometry, len(plan.attention))):
        return True
    return gains_rotation(model, plan) and (not lora_rank or len(rotations(model, encoding, plan)) > 0)
