"""How exact the fast forms are over long texts, against float64: a few queries at the end of up to 65,536 keys."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import hf_posenc as posenc
from hf_posenc import forms
from hf_posenc.scores import Scores
from tests.test_forms import call

TOLERANCE = {
    **dict.fromkeys(("alibi", "t5", "kerple", "sandwich", "shaw", "bert_relative", "fire"), 2e-6),
    "transformer_xl": 4e-6,  # what it adds is made of products of queries, twice as loud as the scores
}
LENGTHS = (2048, 65_536)


def by_the_book(scores: Scores, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, (b, h, q, k), values, (b, h, k, d), and output, (b, q, h, d), in float64."""
    query, key, value = query.double(), *(x.double().repeat_interleave(2, dim=1) for x in (key, value))
    encoding, apart = copy.deepcopy(scores.encoding).double(), scores.positions.distance()
    bias = encoding.bias(query * scores.scaling, key, scores.positions)
    products = query @ key.mT * scores.scaling + bias
    weights = products.masked_fill(apart[:, None] < 0, -torch.inf).softmax(-1)
    return weights, value, (weights @ value).transpose(1, 2)


def relative(found: Tensor, truth: Tensor) -> float:
    """Root mean square of the error, as a share of what is right."""
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("keys", LENGTHS)
def test_float32_is_exact_to_two_millionths(name: str, keys: int) -> None:
    scores, *states = call(name, 40, keys, causal=True)
    found = forms.attend_along(scores, *states)
    assert found is not None
    assert float((found.double() - by_the_book(scores, *states)[2]).abs().max()) <= TOLERANCE[name]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "sandwich"])
@pytest.mark.parametrize("keys", LENGTHS)
def test_single_queries_are_exact_to_two_millionths(name: str, keys: int) -> None:
    scores, query, key, value = call(name, 1, keys, causal=True)
    scores.longest = key.norm(dim=-1).amax((0, 2))
    found = forms.attend_along(scores, query, key, value)
    assert found is not None
    assert float((found.double() - by_the_book(scores, query, key, value)[2]).abs().max()) <= 2e-6


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("keys", LENGTHS)
def test_bfloat16_adds_half_at_most_to_the_error_that_weights_and_output_in_bfloat16_have(name: str, keys: int) -> None:
    scores, *states = call(name, 40, keys, causal=True, dtype=torch.bfloat16)
    scores.scaling = 0.5  # a power of two, as where heads have 64 dimensions: nothing is lost in scaling queries
    found = forms.attend_along(scores, *states)
    assert found is not None
    weights, value, truth = by_the_book(scores, *states)
    rounded = (weights / weights.amax(-1, keepdim=True)).bfloat16().double()  # as kernels do: the largest one is 1
    floor = (rounded @ value / (weights / weights.amax(-1, keepdim=True)).sum(-1, keepdim=True)).bfloat16()
    assert relative(found, truth) <= 1.5 * relative(floor.transpose(1, 2), truth)


@pytest.mark.slow
@torch.no_grad()
def test_rotations_are_exact_to_two_millionths_up_to_a_million_tokens() -> None:
    geometry = posenc.Geometry(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=64,
        causal=True,
    )
    encoding = posenc.build(posenc.RoPE(), geometry)
    states = torch.randn(1, 4, 50, 8, generator=torch.Generator().manual_seed(0))
    places = torch.randint(2**20, (1, 50), generator=torch.Generator().manual_seed(1))
    exact = encoding.rotate(states.double(), places)
    assert relative(encoding.rotate(states, places), exact) <= 2e-6
