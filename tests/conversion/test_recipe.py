"""A recipe says what it was told, reads back what it wrote, and refuses what no conversion could follow."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hf_posenc.conversion.recipe import STAGES, Anneal, Distill, Recipe
from hf_posenc.errors import ConfigError


def test_a_recipe_reads_back_from_json() -> None:
    recipe = Recipe(tokens=5, anneal=Anneal(share=0.25), distill=None, **{"absorb": None})
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert Recipe.from_dict({"distill": {"weight": 0.5}}) == Recipe(distill=Distill(weight=0.5))


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_is_off_until_it_is_named(name: str) -> None:
    assert getattr(Recipe(), name) is None
    assert getattr(Recipe.from_dict({name: {}}), name) == STAGES[name]()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tokens": -1}, "Recipe.tokens must be an integer of at least 0"),
        ({"tokens": 1e6}, "Recipe.tokens must be an integer"),
        ({"learning_rate": float("nan")}, "Recipe.learning_rate"),
        ({"batch_size": True}, "Recipe.batch_size"),
        ({"distil": None}, "did you mean 'distill'"),
        ({"distill": {"weigth": 1}}, "did you mean 'weight'"),
        ({"distill": {"weight": 1.5}}, "Distill.weight must be a number of at least 0.01 and at most 1"),
        ({"anneal": 0.5}, "anneal must be a mapping"),
        ({"version": 2}, "Recipe.version"),
        ({"lora_rank": 4, "anneal": {}}, "need lora_rank=0"),
    ],
)
def test_what_no_conversion_could_follow_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Recipe.from_dict(values)


def test_a_recipe_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().tokens = 1  # type: ignore[misc]
