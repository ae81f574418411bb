"""Compiled models write the biases out that are more than a row of numbers, for some queries at a time, and learn."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_posenc as posenc
from hf_posenc import written
from tests.models import SUBJECTS, assert_same, tokens
from tests.test_forms import ACCURACY, call, dense
from tests.test_operators import left_padded, seen

NAMES = ["alibi", "bert_relative", "fire", "shaw", "transformer_xl"]


@pytest.mark.parametrize("dtype", ACCURACY)
@pytest.mark.parametrize("name", NAMES)
def test_output_and_gradients_are_those_of_the_dense_bias(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks of queries, whose positions leave some out, with and without a mask."""
    monkeypatch.setattr(written, "SCORES_AT_ONCE", 2 * 4 * 30 * 7)
    for masked in (False, True):
        scores, *states = call(name, 20, 30, causal=True, dtype=dtype)
        places = scores.positions.key + 5 * (scores.positions.key > 12)
        scores.positions = dataclasses.replace(scores.positions, query=places[:, 10:], key=places)
        told = torch.ones(2, 20, 1, 1)
        if masked:
            scores.mask, scores.triangle = seen("padded", 20, 30), False
            told = scores.mask.any(-1).mT[..., None]  # (2, q, 1, 1): the others see no key
        wide = (x.repeat_interleave(2, dim=1) for x in states[1:])
        found = written.attend_written(scores, states[0], *wide)
        expected, encoding = dense(scores, *states)
        assert found.dtype == dtype
        assert_same((found * told).double(), expected * told, ACCURACY[dtype])
        draw = told * torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        ours = torch.autograd.grad((found * draw.to(dtype)).sum(), [*states, *scores.encoding.parameters()])
        truth = torch.autograd.grad((expected * draw).sum(), [*states, *encoding.parameters()])
        for one, other in zip(ours, truth, strict=True):
            assert_same(one.double(), other.double(), 10 * ACCURACY[dtype])


def test_a_graph_attends_with_the_weights_that_it_was_given() -> None:
    """They need not be those that the encoding has when the graph runs: `functional_call` puts others in its place."""
    scores, query, key, value = call("shaw", 9, 12, causal=True)
    other = copy.deepcopy(scores.encoding)
    weights = [torch.randn_like(weight) for weight in scores.encoding.parameters()]
    states = query, *(x.repeat_interleave(2, dim=1) for x in (key, value)), None
    written._note(scores.encoding)
    found = written._attend(*states, weights, written.given(scores), id(scores.encoding), True, 0.7)
    for weight, given in zip(other.parameters(), weights, strict=True):
        weight.data.copy_(given)
    scores.encoding = other
    assert_same(found.double(), dense(scores, query, key, value)[0], ACCURACY[torch.float32])


def prepared(name: str, seed: int = 0) -> PreTrainedModel:
    """A patched model whose bias says something."""
    model = posenc.patch(SUBJECTS["llama"].fresh(), posenc.encoding(name), verify=False).train()
    for weight in model.base_model.posenc.parameters():
        weight.data.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))
    return model


def learned(model: PreTrainedModel, said: Callable[..., Any], **inputs: Any) -> list[Tensor]:
    """What a call says of two rows, and all gradients of it."""
    logits = said(tokens(2, 40), use_cache=False, **inputs).logits
    logits = logits[inputs["attention_mask"] > 0] if "attention_mask" in inputs else logits
    return [logits.detach(), *torch.autograd.grad(logits.square().mean(), list(model.parameters()))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fire", "fox", "shaw", "t5"])
def test_a_compiled_model_says_and_learns_the_same(name: str) -> None:
    """Padded, packed, with positions that leave some out, and checkpointed."""
    torch._dynamo.reset()
    model = prepared(name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    documents, places = torch.arange(40)[None].expand(2, -1) // 25, 3 * torch.arange(40)[None]
    for given in ({"attention_mask": left_padded()}, {"document_ids": documents}, {"position_ids": places}):
        for ours, theirs in zip(learned(model, compiled, **given), learned(model, model, **given), strict=True):
            assert_same(ours, theirs)
    model.gradient_checkpointing_enable()
    for ours, theirs in zip(learned(model, compiled), learned(model, model), strict=True):
        assert_same(ours, theirs)


@pytest.mark.slow
def test_a_graph_serves_the_encoding_that_it_was_made_for() -> None:
    torch._dynamo.reset()
    models = prepared("fire"), prepared("fire", seed=1)
    compiled = torch.compile(lambda model, ids: model(ids).logits, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for model in (*models, *models):
            assert_same(compiled(model, tokens(2, 40)), model(tokens(2, 40)).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "fire"])
def test_an_exported_model_is_made_of_torchs_own_operators(name: str) -> None:
    """Strict export traces with the compiler; what it gives runs where nobody knows of this package, at any length."""
    model, inputs = prepared(name).eval(), {"input_ids": tokens(2, 24), "use_cache": False}
    sizes = {"input_ids": {0: torch.export.Dim("rows", max=64), 1: torch.export.Dim("tokens", max=512)}}
    exported = torch.export.export(model, (), inputs, dynamic_shapes={**sizes, "use_cache": None}, strict=True)
    operators = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert not any("posenc" in name for name in operators)
    said = exported.module()(input_ids=tokens(3, 50), use_cache=False).logits
    assert_same(said, model(tokens(3, 50)).logits)
