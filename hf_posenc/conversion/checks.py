"""What a conversion asks of its model, recipe and numbers: all of it is checked before anything is touched."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hf_posenc.config import EncodingConfig
from hf_posenc.conversion.absorption import can_absorb
from hf_posenc.conversion.annealing import old_positions
from hf_posenc.conversion.defaults import calibrates
from hf_posenc.conversion.layerwise import layer_paths
from hf_posenc.conversion.recipe import Recipe
from hf_posenc.errors import ConfigError
from hf_posenc.length import max_length
from hf_posenc.patching import plan as make_plan
from hf_posenc.planning import PatchPlan

SEEDS = 2**32
"""Seeds lie below; numpy has no others."""


def checked_plan(model: PreTrainedModel, encoding: EncodingConfig, recipe: Recipe) -> PatchPlan:
    """Return the plan of the patch, or raise where the recipe does not fit it.

    Raises:
        ConfigError: no recipe, a model that `convert` does not take, or a stage that has nothing to do.
        UnsupportedFamilyError, UnsupportedEncodingError: a stage that the model or the encoding is not built for.
        PosencError: what `plan` raises.
    """
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"expected a Recipe such as posenc.Recipe(tokens=250_000), got: {recipe!r}")
    plan, name = make_plan(model, encoding), type(model).__name__
    if plan.stacks or plan.family.stacks:
        raise ConfigError(f"{name} has several stacks; convert takes models of one. Use patch.")
    if model.get_output_embeddings() is None:
        raise ConfigError(f"{name} has no language-modelling head, and so no loss to bring back.")
    if recipe.layerwise is not None:
        layer_paths(model, plan)
    if recipe.absorb is not None and not can_absorb(model, plan):
        raise ConfigError(f"{name} loses no table of positions with a mean to keep; leave absorb out.")
    if recipe.calibrate is not None and not calibrates(model, encoding, plan, lora_rank=recipe.lora_rank):
        below = " below adapters" if recipe.lora_rank else ""
        raise ConfigError(
            f"{type(plan.config).__name__} has nothing that could be fitted to scores{below}; leave calibrate out."
        )
    if recipe.anneal is not None:
        old_positions(model, plan)
    _check_weights(model, plan, recipe)
    return plan


def _check_weights(model: PreTrainedModel, plan: PatchPlan, recipe: Recipe) -> None:
    """Raise ConfigError where there is nothing to train, or where small steps would be lost to rounding."""
    own = any(True for _ in plan.config.build_layers(plan.geometry, len(plan.attention)).parameters())
    fits = recipe.tokens > 0 or recipe.calibrate is not None
    if fits and model.dtype not in (torch.float32, torch.float64) and (own or not recipe.lora_rank):
        raise ConfigError(
            f"the model is in {str(model.dtype).removeprefix('torch.')}, in which small steps of training are lost; "
            "load it with dtype=torch.float32."
        )
    trains = own or recipe.lora_rank or any(weight.requires_grad for weight in model.parameters())
    if recipe.tokens and not trains:
        raise ConfigError(
            f"every weight of {type(model).__name__} is frozen, and {plan.config.label} has none of its own: there is "
            "nothing to train. Let weights require gradients, or take lora_rank."
        )


def checked_length(model: PreTrainedModel, plan: PatchPlan, recipe: Recipe, length: int | None) -> int:
    """Return how many tokens a row has, which the unpatched model and the planned one must both have positions for.

    Raises:
        ConfigError: no whole number of at least 2, or positions past the end of a table of the model or the encoding.
    """
    length = plan.geometry.max_position_embeddings if length is None else length
    if not isinstance(length, int) or length < 2:
        raise ConfigError(f"length={length!r} must be an integer of at least 2, the tokens of a row.")
    reach = reached(recipe, length) or length
    own = max_length(model)
    then = plan.config.build_layers(plan.geometry, len(plan.attention)).max_positions()
    fades = recipe.anneal is not None and plan.family.table is not None
    for end, positions, what in (
        (own, length, f"{type(model).__name__} as it is"),
        (own if fades else None, reach, "the old table, which anneal fades,"),
        (then, reach, plan.config.label),
    ):
        if end is not None and positions > end:
            raise ConfigError(
                f"{positions} positions would be read, and {what} has {end}; take a length of fewer than {length} "
                f"tokens{'' if recipe.reach is None else ', or leave reach out'}."
            )
    return length


def reached(recipe: Recipe, length: int) -> int | None:
    """Return the number of positions over which rows are spread, None where they stay at their own."""
    return None if recipe.reach is None else max(length, int(recipe.reach.factor * length))


def check_seed(seed: int) -> None:
    """Raise ConfigError for what is no seed."""
    if not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise ConfigError(f"seed={seed!r} must be an integer from 0 to {SEEDS - 1}.")
