"""Single queries that leave far keys out, against the form that looks at all of them; and the norms that allow it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import hf_posenc as posenc
from hf_posenc import forms, reach
from hf_posenc.caching import update_measured
from hf_posenc.positions import Positions
from hf_posenc.scores import Scores
from tests.models import SUBJECTS, assert_same, logits, tokens

LONG = 1500


def built(heads: int) -> Any:
    geometry = posenc.Geometry(
        hidden_size=8 * heads,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        causal=True,
    )
    return posenc.build(posenc.Alibi(bias_max=6.0), geometry)


def single(loudness: float, heads: int = 8, rows: int = 2, keys: int = 4000) -> Any:
    """Scores, query, keys and values of one token after many; a key far back is far louder than all others."""
    generator = torch.Generator().manual_seed(1)
    query = loudness * torch.randn(rows, heads, 1, 8, generator=generator)
    key, value = torch.randn(2, rows, 2, keys, 8, generator=generator)
    places = torch.arange(keys)[None]
    positions = Positions(query=places[:, -1:], key=places)
    known = {"mask": None, "causal": True, "dtype": torch.float32, "scaling": 8**-0.5}
    return Scores(built(heads), positions, longest=key.norm(dim=-1).amax((0, 2)), **known), query, key, value


def by_the_book(scores: Scores, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All keys, in float64: (b, 1, h, d)."""
    query, key, value = query.double(), *(x.double().repeat_interleave(4, dim=1) for x in (key, value))
    bias = scores.encoding.double().bias(query, key, scores.positions)
    return ((query @ key.mT * scores.scaling + bias).softmax(-1) @ value).transpose(1, 2)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys, times heads, the kernel was shown in every call."""
    calls: list[int] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        calls.append(key.shape[1] * key.shape[2])
        return kernel(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    return calls


@torch.no_grad()
@pytest.mark.parametrize(("loudness", "spared"), [(1.0, True), (4.0, True), (1000.0, False)])
def test_only_keys_that_cannot_change_a_result_are_left_out(loudness: float, spared: bool, read: list[int]) -> None:
    scores, *states = single(loudness)
    found = forms.attend_along(scores, *states)
    assert found is not None
    assert_same(found.double(), by_the_book(scores, *states), 2e-6)
    assert (sum(read) < 8000) == spared


@torch.no_grad()
def test_a_far_key_that_is_loud_enough_to_be_heard_is_heard() -> None:
    scores, query, key, value = single(1.0, rows=1)
    key[:, 1, 1500] = 600 * query[:, 7, 0] / query[:, 7].norm()  # beats the bias of the head that sees farthest
    value[:, 1, 1500] = 50
    scores.longest = key.norm(dim=-1).amax((0, 2))
    truth = by_the_book(scores, query, key, value)
    assert truth[0, 0, 7].max() > 20
    assert_same(reach.attend_once(scores, query, key, value, slot=3999, firsts=[0]).double(), truth, 2e-6)
    scores.longest = scores.longest / 100
    found = reach.attend_once(scores, query, key, value, slot=3999, firsts=[0])
    assert (found - truth).abs().max() > 1, "else the key was within reach anyway"


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return posenc.patch(SUBJECTS[request.param].fresh(), posenc.Alibi(bias_max=4.0), verify=False)


def empty(kind: str, model: PreTrainedModel) -> Any:
    return DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=LONG + 20)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generation_goes_on_as_if_all_keys_were_looked_at(kind: str, model: PreTrainedModel, read: list[int]) -> None:
    ids, mask, cache = tokens(2, LONG), torch.ones(2, LONG, dtype=torch.long), empty(kind, model)
    mask[0, :700] = 0
    whole = logits(model, ids, attention_mask=mask)
    model(ids[:, :-4], attention_mask=mask[:, :-4], past_key_values=cache)
    read.clear()
    for end in range(LONG - 3, LONG + 1):
        step = model(ids[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=cache)
        assert_same(step.logits[:, 0], whole[:, end - 1], 2e-5)
    heads = 4 if model.config.model_type == "gpt2" else 2
    assert sum(read) < 4 * 2 * heads * (LONG - 3) * 0.75, "steps, layers, heads of keys"


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "done"),
    [(kind, done) for kind in ("dynamic", "static") for done in ("nothing", "filled", "reordered", "reset", "copied")]
    + [("dynamic", "cropped")],
)
def test_norms_stand_for_all_keys_whatever_was_done_to_a_cache(kind: str, done: str) -> None:
    config = SUBJECTS["gpt2"].fresh().config
    cache: Any = DynamicCache() if kind == "dynamic" else StaticCache(config=config, max_cache_len=40)
    generator = torch.Generator().manual_seed(2)

    def some(count: int, loudness: float) -> list[Tensor]:
        return [loudness * torch.randn(2, 4, count, 8, generator=generator) for _ in range(2)]

    update_measured(cache, *some(9, 1.0), 0)
    if done == "filled":
        cache.update(*some(3, 50.0), 0)
    elif done == "reordered":
        cache.reorder_cache(torch.tensor([1, 1]))
    elif done == "reset":
        cache.reset()
        cache.update(*some(9, 50.0), 0)
    elif done == "copied":
        cache = copy.deepcopy(cache)
        cache.layers[0].keys.mul_(50)
    elif done == "cropped":
        cache.crop(-4)
        cache.update(*some(4, 50.0), 0)
    keys, _, longest = update_measured(cache, *some(1, 1.0), 0)
    assert longest is not None
    assert_same(longest, keys.norm(dim=-1).amax((0, 2)))
    keys, _, longest = update_measured(cache, *some(1, 9.0), 0)
    assert longest is not None
    assert_same(longest, keys.norm(dim=-1).amax((0, 2)))


def test_old_keys_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    norm = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda x, **k: [seen.append(x.shape[2]), norm(x, **k)][1])
    for cache in (DynamicCache(), StaticCache(config=SUBJECTS["gpt2"].fresh().config, max_cache_len=40)):
        seen.clear()
        for count in (9, 1, 3):
            update_measured(cache, *torch.randn(2, 2, 4, count, 8), 0)
        assert seen[1:] == [1, 3]


def test_nothing_is_said_of_tensors_whose_changes_are_not_counted() -> None:
    with torch.inference_mode():
        cache = DynamicCache()
        for count in (9, 1):
            assert update_measured(cache, *torch.randn(2, 2, 4, count, 8), 0)[2] is None
