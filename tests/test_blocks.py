"""The fast forms at odd ends: lone and blind queries, strides, and weights that are there for one call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

import hf_posenc as posenc
from hf_posenc import blocks, forms, toeplitz
from tests.models import SUBJECTS, assert_same, largest, logits, tokens
from tests.test_forms import ACCURACY, CONFIGS, call, dense
from tests.test_operators import seen


@pytest.mark.parametrize("left", [0, 5])
@pytest.mark.parametrize(("queries", "keys", "padded"), [(17, 17, None), (16, 16, None), (9, 30, None), (30, 36, 7)])
def test_blocks_of_one_query_and_blocks_behind_the_text(
    left: int, queries: int, keys: int, padded: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every key is far for the first query of a block, or for all of them, as behind the end of a short row."""
    monkeypatch.setattr(blocks, "CHUNK", 8)
    monkeypatch.setitem(CONFIGS, "shaw", posenc.encoding("shaw", left=left, right=2))
    scores, *states = call("shaw", queries, keys, causal=True)
    told = torch.ones(2, queries, 1, 1)
    if padded is not None:
        scores.mask, scores.triangle = seen("all", queries, keys).expand(2, -1, -1, -1).clone(), False
        scores.mask[1, ..., padded:] = False
        told[1, max(0, padded - (keys - queries)) :] = 0
    found = forms.attend_along(scores, *states)
    assert found is not None
    expected, encoding = dense(scores, *states)
    assert_same((found * told).double(), expected * told, ACCURACY[torch.float32])
    draw = told * torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad((found * draw.float()).sum(), [*states, *scores.encoding.parameters()])
    truth = torch.autograd.grad((expected * draw).sum(), [*states, *encoding.parameters()])
    for one, other in zip(ours, truth, strict=True):
        assert_same(one.double(), other.double(), 10 * ACCURACY[torch.float32])


@pytest.mark.parametrize("name", ["kerple", "shaw"])
def test_numbers_of_a_query_need_not_lie_side_by_side(name: str) -> None:
    """The kernel takes it that they do, and reads whatever lies there."""
    scores, *states = call(name, 40, 40, causal=True)
    turned = [x.detach().mT.contiguous().mT.requires_grad_() for x in states]
    found, expected = forms.attend_along(scores, *turned), forms.attend_along(scores, *states)
    assert found is not None
    assert expected is not None
    assert_same(found, expected, 1e-6)
    draw = torch.randn(found.mT.shape, generator=torch.Generator().manual_seed(2)).mT  # strides as of the states
    ours = torch.autograd.grad(found, turned, draw)
    for one, other in zip(ours, torch.autograd.grad(expected, states, draw.contiguous()), strict=True):
        assert_same(one, other, 1e-6)


@pytest.mark.parametrize("name", ["kerple", "fire"])
def test_gradients_row_by_row(name: str) -> None:
    """The transforms of `torch.func` get the general form, and later calls the fast one."""
    model = posenc.patch(SUBJECTS["llama"].fresh(num_hidden_layers=1), posenc.encoding(name), verify=False)
    weights, ids = {name: weight.detach() for name, weight in model.named_parameters()}, tokens(2, 20)

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, weights, row[None], {"use_cache": False}).logits.square().mean()

    toeplitz._tried.cache_clear()
    found = vmap(grad(loss), in_dims=(None, 0))(weights, ids)
    assert toeplitz.trusted(torch.float32)
    for index in range(2):
        said = model(ids[index : index + 1], use_cache=False).logits.square().mean()
        expected = torch.autograd.grad(said, list(model.parameters()))
        for one, other in zip(found.values(), expected, strict=True):
            assert_same(one[index], other)


@pytest.mark.parametrize("name", ["fire", "shaw", "t5"])
def test_weights_that_stand_in_for_one_call_get_their_gradients(name: str) -> None:
    """`functional_call` takes them out again before anybody asks for gradients."""
    model = posenc.patch(SUBJECTS["gpt2"].fresh(n_layer=1), posenc.encoding(name), verify=False)
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(5)
    for weight in other.base_model.posenc.parameters():
        weight.data.add_(torch.randn(weight.shape, generator=generator))
    assert largest(logits(model, tokens(2, 20)) - logits(other, tokens(2, 20))) > 0.1
    weights = {name: weight.detach().requires_grad_() for name, weight in other.named_parameters()}

    def pulled(said: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(said.square().mean(), inputs))

    ours = pulled(functional_call(model, weights, tokens(2, 20)).logits, list(weights.values()))
    for one, wanted in zip(ours, pulled(other(tokens(2, 20)).logits, list(other.parameters())), strict=True):
        assert_same(one, wanted, 1e-6)


def test_weights_too_small_to_count_are_none() -> None:
    """MKL takes many times as long for exponentials that underflow, and products with denormal ones are slow."""
    scores = torch.tensor([0.0, -59.5, -60.5, -88.0, -103.0, -torch.inf, torch.nan])
    found = toeplitz.exponentials(scores.clone())
    assert_same(found[:2], scores[:2].exp(), 1e-6)
    assert found[2:6].count_nonzero() == 0
    assert found[6].isnan()


@pytest.mark.parametrize("name", ["alibi-trainable", "shaw"])
def test_gradients_of_steep_biases(name: str) -> None:
    """Where most weights are too small to count."""
    scores, *states = call(name, 40, 40, causal=True)
    with torch.no_grad():
        for weight in scores.encoding.parameters():
            weight.mul_(100)
    expected, encoding = dense(scores, *states)
    draw = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = forms.attend_along(scores, *states)
    assert found is not None
    ours = torch.autograd.grad((found * draw.float()).sum(), [*states, *scores.encoding.parameters()])
    truth = torch.autograd.grad((expected * draw).sum(), [*states, *encoding.parameters()])
    for one, other in zip(ours, truth, strict=True):
        assert_same(one.double(), other.double(), 10 * ACCURACY[torch.float32])
