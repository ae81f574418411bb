"""Encodings that add to the scores inside models: with caches, behind padding, by either backend, layer by layer."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel, StaticCache

import hf_posenc as posenc
from tests.encodings import test_additive
from tests.encodings.test_additive import CAUSAL_ONLY
from tests.models import SUBJECTS, assert_same, in_steps, logits, padding_of, tokens

SPECS = {
    **test_additive.SPECS,
    "shaw-values": posenc.encoding("shaw", left=5, right=3, relative="keys_and_values"),
}
CHOSEN = ["alibi-trainable", "t5", "kerple-power", "sandwich", "fire", "shaw", "bert-key-query", "transformer-xl"]
CHOSEN += ["fox", "cable", "cope", "shaw-values"]
LENGTH = 20


@functools.cache
def trained(subject: str, spec: str, per_layer: bool | None = None) -> PreTrainedModel:
    """A patched model whose encoding has left its start: at random, and in every layer otherwise."""
    config: Any = SPECS[spec]
    if per_layer is not None:
        config = dataclasses.replace(config, per_layer=per_layer)
    model = posenc.patch(SUBJECTS[subject].fresh(), config, verify=False)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in tables(model):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tables(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if "posenc." in name]


@pytest.mark.parametrize("spec", CHOSEN)
@pytest.mark.parametrize("subject", ["gpt2", "llama"])
def test_cached_decode_equals_the_full_pass(subject: str, spec: str) -> None:
    model, ids = trained(subject, spec), tokens(2, LENGTH)
    whole = logits(model, ids)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)):
        assert_same(in_steps(model, ids, [7, 1, 1, 5, 6], cache), whole)


@pytest.mark.parametrize(
    ("subject", "spec"),
    [
        (name, spec)
        for name in ("gpt2", "llama", "bert")
        for spec in CHOSEN
        if name != "bert" or spec not in CAUSAL_ONLY
    ],
)
def test_padding_and_backend_change_nothing(subject: str, spec: str) -> None:
    model, ids = trained(subject, spec), tokens(2, LENGTH)
    whole = logits(model, ids)
    for sides, cut in (((3, 0), slice(3, None)), ((0, 3), slice(0, -3))):
        padded = nn.functional.pad(ids, sides, value=padding_of(model))
        mask = nn.functional.pad(torch.ones_like(ids), sides)
        assert_same(logits(model, padded, attention_mask=mask)[:, cut], whole)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    assert_same(logits(eager, ids), whole)


@pytest.mark.parametrize("spec", [spec for spec in CHOSEN if hasattr(SPECS[spec], "per_layer")])
def test_layers_can_differ_and_all_of_them_learn(spec: str) -> None:
    model = copy.deepcopy(trained("gpt2", spec, per_layer=True))
    ids = tokens(2, LENGTH)
    assert len(tables(model)) == 2 * len(tables(trained("gpt2", spec, per_layer=False)))
    model(input_ids=ids, labels=ids).loss.backward()
    for parameter in tables(model):
        assert parameter.grad is not None
        assert parameter.grad.any()
    whole = logits(model, ids)
    assert_same(in_steps(model, ids, [9, 1, 10], DynamicCache(config=model.config)), whole)
    half = len(tables(model)) // 2
    with torch.no_grad():
        for one, other in zip(tables(model)[:half], tables(model)[half:], strict=True):
            other.copy_(one)
    assert (logits(model, ids) - whole).abs().max() > 1e-3


@pytest.mark.parametrize("spec", ["fox", "cable", "cope"])
def test_blocks_of_queries_know_their_place(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the text padding repeats the last position; documents packed into a row repeat all of them."""
    model, ids = trained("gpt2", spec), tokens(2, LENGTH)
    padded, mask = nn.functional.pad(ids, (0, 3)), nn.functional.pad(torch.ones_like(ids), (0, 3))
    starts = torch.tensor([[*range(6), *range(9), *range(5)]])
    number = (starts == 0).cumsum(-1)
    apart = (number[:, :, None] != number[:, None]) | torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    packed = {"position_ids": starts, "attention_mask": torch.zeros(apart.shape).masked_fill(apart, -1e30)[:, None]}
    whole = logits(model, ids)
    one_by_one = torch.cat([logits(model, part) for part in ids[:1].split([6, 9, 5], dim=1)], dim=1)
    assert_same(logits(model, ids[:1], **packed), one_by_one)
    monkeypatch.setattr("hf_posenc.scores.SCORES_AT_ONCE", 2 * 4 * LENGTH * 3)
    assert_same(logits(model, ids), whole)
    assert_same(logits(model, padded, attention_mask=mask)[:, :LENGTH], whole)
    assert_same(logits(model, ids[:1], **packed), one_by_one)
