"""Queries and keys that are fitted to a rotation: what moves, what stays, and that it helps a real model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_posenc as posenc
from hf_posenc.conversion import attention_fit, stages
from hf_posenc.conversion.attention_fit import fit_attention, gains_rotation
from hf_posenc.conversion.batches import rows_of
from hf_posenc.conversion.calibration import attention_divergence
from hf_posenc.conversion.convert import convert
from hf_posenc.conversion.recipe import Absorb, Calibrate, Recipe
from hf_posenc.conversion.study import BASE
from hf_posenc.conversion.study_text import unseen_documents
from hf_posenc.conversion.training import original_of
from tests.conversion.small_models import SMALL, difference, gpt2, ids, quick, texts
from tests.families.models import FAMILIES, MODEL_TYPES, fresh

ROPE = posenc.RoPE(theta=100.0, partial_rotary_factor=1.0)


def mean(divergence: list[list[float]]) -> float:
    return sum(map(sum, divergence)) / sum(map(len, divergence))


def fitted(model: Any, encoding: posenc.EncodingConfig = ROPE) -> tuple[Any, float, float]:
    """Patch and fit; return the model before, and its divergence from it before and after the fit."""
    original, plan = original_of(model, shared=False), posenc.plan(model, encoding)
    posenc.patch(model, encoding, verify=False)
    before = mean(attention_divergence(model, original, ids()))
    fit_attention(model, original, ids(), plan)
    return original, before, mean(attention_divergence(model, original, ids()))


def test_attention_comes_close_to_that_of_the_original_and_nothing_else_moves() -> None:
    model = gpt2()
    torch.nn.init.normal_(model.transformer.h[0].attn.c_attn.weight, std=0.5)
    own = copy.deepcopy(model)
    original, before, after = fitted(model)
    assert after < before / 2
    assert difference(original, own) == 0
    moved = {
        name for name, weight in original.named_parameters()
        if "wpe" not in name and not torch.equal(weight, model.get_parameter(name))
    }  # fmt: skip
    assert moved == {f"transformer.h.{layer}.attn.c_attn.{kind}" for layer in (0, 1) for kind in ("weight", "bias")}
    values = [each.transformer.h[0].attn.c_attn.weight[:, 32:] for each in (model, original)]
    assert torch.equal(*values)


def test_frozen_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_fit, "STEPS", 4)
    model = gpt2()
    model.transformer.h[0].attn.requires_grad_(False)
    original, *_ = fitted(model)
    assert model.transformer.h[0].attn.c_attn.weight is original.transformer.h[0].attn.c_attn.weight
    assert not torch.equal(model.transformer.h[1].attn.c_attn.weight, original.transformer.h[1].attn.c_attn.weight)


def test_only_a_rotation_that_was_not_there_is_fitted_to() -> None:
    llama = LlamaForCausalLM(LlamaConfig(**SMALL, eos_token_id=0))
    gains = {
        name: gains_rotation(gpt2(), posenc.plan(gpt2(), posenc.encoding(name))) for name in ("rope", "t5", "nope")
    }
    assert gains == {"rope": True, "t5": False, "nope": False}
    assert not gains_rotation(llama, posenc.plan(llama, ROPE))


@pytest.mark.parametrize("worse", [True, False])
def test_the_fit_is_kept_only_where_it_makes_the_loss_lower(worse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_fit, "STEPS", 4)
    losses = iter([2.0, 3.0 if worse else 1.0])
    stock = stages.Stages.loss
    monkeypatch.setattr(stages.Stages, "loss", lambda self, rows=None: stock(self) if rows is None else next(losses))
    recipe = quick(tokens=0, absorb=None, calibrate=Calibrate(rows=4))
    done = convert(gpt2(), ROPE, texts(), recipe)
    weights = [each.transformer.h[0].attn.c_attn.weight for each in (done.model, gpt2())]
    assert torch.equal(*weights) is worse
    assert done.record["calibration"] == {"kept": not worse}


def test_adapters_leave_the_weights_of_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("the weights below adapters were to be fitted")

    monkeypatch.setattr("hf_posenc.conversion.stages.fit_attention", never)
    convert(gpt2(), posenc.RoPE(), texts(), quick(lora_rank=2, calibrate=Calibrate(rows=4)))


def test_all_layers_count_that_share_an_attention_module(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[int] = []
    monkeypatch.setattr(attention_fit, "_fit", lambda module, path, calls, goals: fits.extend((len(calls), len(goals))))
    fitted(fresh("albert"))
    assert fits == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if FAMILIES[name].table])
def test_every_kind_of_attention_below_a_table_can_be_fitted(model_type: str) -> None:
    model = fresh(model_type, "eager")
    assert gains_rotation(model, posenc.plan(model, ROPE))
    _, before, after = fitted(model)
    assert after < before


@pytest.mark.slow
def test_a_real_model_with_rotations_starts_a_quarter_as_far_away() -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(BASE), AutoTokenizer.from_pretrained(BASE)
    sources = [document.text for document in unseen_documents()[:300]]
    text = rows_of(sources, tokenizer, model, length=128, causal=True, seed=0).dataset
    rows = [text[index]["input_ids"] for index in range(128)]
    done = convert(model, posenc.encoding("rope"), rows, Recipe(tokens=0, absorb=Absorb(), calibrate=Calibrate()))
    stages = done.record["stages"]
    original, replaced, start = stages[0]["before"], stages[0]["after"], stages[-1]["after"]
    assert start - original < (replaced - original) / 4
