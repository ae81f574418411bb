"""The fast form of a bias by distance against the general form, which writes the bias out: forward and backward."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel, StaticCache

import hf_posenc as posenc
from hf_posenc import forms, stretches, toeplitz
from hf_posenc.positions import Positions
from hf_posenc.scores import Scores
from tests.models import SUBJECTS, assert_same, in_steps, logits, tokens

CONFIGS = {
    "alibi": posenc.Alibi(),
    "alibi-trainable": posenc.Alibi(trainable=True),
    "t5": posenc.encoding("t5"),
    "kerple": posenc.encoding("kerple"),
    "sandwich": posenc.encoding("sandwich"),
    "tempered": posenc.Alibi(temperature={"kind": "log_n"}),
    "bloom": posenc.Alibi(form="bloom"),
    "shaw": posenc.encoding("shaw", left=5, right=3),
    "bert_relative": posenc.encoding("bert_relative", max_position_embeddings=20),
    "transformer_xl": posenc.encoding("transformer_xl"),
    "fire": posenc.encoding("fire"),
    "cope": posenc.encoding("cope"),
}
CAUSAL_ONLY = ("bloom", "fire", "cope")
ACCURACY = {torch.float64: 1e-9, torch.float32: 5e-6, torch.bfloat16: 0.05}


def built(name: str, *, causal: bool = True, heads: int = 4) -> Any:
    torch.manual_seed(3)
    geometry = posenc.Geometry(
        hidden_size=32,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=8,
        max_position_embeddings=64,
        causal=causal,
    )
    encoding = posenc.build(CONFIGS.get(name) or posenc.encoding(name), geometry)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return encoding


def call(name: str, queries: int, keys: int, *, causal: bool, dtype: torch.dtype = torch.float32) -> Any:
    """Scores, queries, keys and values of a call whose queries are the last of the keys; two heads share a key."""
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(2, h, n, 8, generator=generator) for h, n in ((4, queries), (2, keys), (2, keys))]
    places = torch.arange(keys)[None]
    scores = Scores(
        built(name, causal=causal).to(torch.float64 if dtype == torch.float64 else torch.float32),
        Positions(query=places[:, keys - queries :], key=places),
        mask=None,
        causal=causal,
        dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        scaling=0.7,
    )
    return scores, *(x.to(dtype).requires_grad_() for x in states)


def dense(scores: Scores, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same by the book, (b, q, h, d) in float64."""
    query, key, value = query.double(), *(x.double().repeat_interleave(2, dim=1) for x in (key, value))
    added = Scores(
        copy.deepcopy(scores.encoding).double(),
        scores.positions,
        mask=scores.mask,
        causal=scores.triangle,
        dtype=torch.float64,
        scaling=scores.scaling,
    )
    total = query @ key.mT * scores.scaling + added.added(query, key, torch.arange(query.shape[2]))
    return (total.softmax(-1) @ value).transpose(1, 2), added.encoding  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "causal", "dtype"),
    [
        (name, causal, dtype)
        for name in CONFIGS
        for causal in (True, False)
        for dtype in ACCURACY
        # what CoPE counts in float32 is right to a few units of the last place of the count
        if (causal or name not in CAUSAL_ONLY) and (name != "cope" or dtype == torch.float64)
    ],
)
def test_output_and_gradients_are_those_of_the_dense_bias(
    name: str, causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "WINDOWED", 500)
    monkeypatch.setattr(toeplitz, "CACHED", 2**17)  # one to four heads at a time
    sizes = ((7, 7), (300, 300), (40, 300), (270, 600)) if causal else ((7, 7), (300, 300))
    for queries, keys in sizes:
        scores, *states = call(name, queries, keys, causal=causal, dtype=dtype)
        found = forms.attend_along(scores, *states)
        expected, encoding = dense(scores, *states)
        assert found is not None
        assert found.dtype == dtype
        assert_same(found.double(), expected, ACCURACY[dtype])
        draw = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        ours = torch.autograd.grad((found * draw.to(dtype)).sum(), [*states, *scores.encoding.parameters()])
        truth = torch.autograd.grad((expected * draw).sum(), [*states, *encoding.parameters()])
        for one, other in zip(ours, truth, strict=True):
            assert_same(one.double(), other.double(), 10 * ACCURACY[dtype])


@pytest.mark.slow
def test_far_keys_are_left_out_only_where_they_cannot_be_told_from_rounding() -> None:
    """Exact to 2e-6 for long texts, with windows in use; loud scores widen the windows until there are none."""
    for loudness, narrow in ((1.0, True), (30.0, False)):
        scores, query, key, value = call("alibi", 3000, 3000, causal=True)
        query = (query * loudness).detach()
        band, heads = toeplitz.Band(queries=3000, keys=3000, first=0, causal=True), key.repeat_interleave(2, 1)
        distance = band.distances(query.device)
        table = scores.encoding.distance_bias(distance.clamp(min=0).float())
        cut = table.masked_fill(stretches._too_far(query, heads, table, band, scores.scaling), -torch.inf)
        assert (min(stretches._windows(cut, distance)) <= 1024) == narrow
        with torch.no_grad():
            found = forms.attend_along(scores, query, key, value)
            assert found is not None
            assert float((found - dense(scores, query, key, value)[0]).abs().max()) < 2e-6 * loudness


@pytest.mark.parametrize("causal", [True, False])
def test_heads_are_told_apart_by_how_far_they_see_on_either_side(causal: bool) -> None:
    scores, query, key, _ = call("alibi", 4000, 4000, causal=causal)
    band, heads = toeplitz.Band(queries=4000, keys=4000, first=0, causal=causal), key.repeat_interleave(2, 1)
    distance = band.distances(query.device)
    table, bands = stretches.within_reach(scores.encoding.distance_bias(distance.float()), query, heads, band, 0.7)
    far = table.isinf()
    assert bool(far[:2, distance.abs() > 1000].all())  # slopes of 1/4 and 1/16
    assert not bool(far[:, (distance >= 0) & (distance < 100)].any())
    assert not bool(far[3, distance >= 0].any())  # of 1/256
    seen = [(part.start, part.stop, lie.window) for part, lie in bands]
    assert seen == ([(0, 1, 256), (1, 2, 1024), (2, 4, sys.maxsize)] if causal else [(0, 4, sys.maxsize)])


@pytest.fixture(params=["gpt2", "llama", "bert"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return posenc.patch(SUBJECTS[request.param].fresh(), posenc.encoding("kerple"), verify=False)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For every attention call, whether the fast form took it."""
    calls: list[bool] = []
    fast = forms.attend_along

    def noted(*states: Any) -> Tensor | None:
        output = fast(*states)
        calls.append(output is not None)
        return output

    monkeypatch.setattr(forms, "attend_along", noted)
    return calls


def generally(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    """What the model says by the general form."""
    with monkeypatch.context() as patch:
        patch.setattr(forms, "attend_along", lambda *_: None)
        return logits(model, ids, **inputs)


def test_models_take_the_fast_form_for_plain_padded_and_cached_texts(
    model: PreTrainedModel, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = tokens(3, 40), torch.ones(3, 40, dtype=torch.long)
    mask[0, :9], mask[1, -5:] = 0, 0
    assert_same(logits(model, ids), generally(monkeypatch, model, ids))
    real = mask.bool()
    assert_same(
        logits(model, ids, attention_mask=mask)[real], generally(monkeypatch, model, ids, attention_mask=mask)[real]
    )
    assert taken == [True] * 4
    if model.config.model_type.endswith("bert"):
        return
    whole = generally(monkeypatch, model, ids)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=50)):
        taken.clear()
        assert_same(in_steps(model, ids, [20, 1, 19], cache), whole)
        assert taken == [True, True, False, False, True, True], "one token alone needs no form"


@pytest.mark.parametrize("name", ["fire", "shaw", "fox", "t5"])
def test_models_learn_alike_in_the_fast_and_the_general_form(
    name: str, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded texts, gates that come out of hidden states, and memory that is given up and computed again."""
    config = posenc.encoding(name, **({"left": 4} if name == "shaw" else {}))
    model = posenc.patch(SUBJECTS["gpt2"].fresh(), config, verify=False)
    for weight in model.base_model.posenc.parameters():
        weight.data.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, :9] = 0

    def learned() -> list[Tensor]:
        output = model(ids, attention_mask=mask).logits[mask.bool()]
        return list(torch.autograd.grad(output.square().mean(), list(model.parameters())))

    ours = learned()
    assert taken == [True] * 2
    model.gradient_checkpointing_enable()
    model.train()
    for one, other in zip(learned(), ours, strict=True):
        assert_same(one, other, 1e-6)
    monkeypatch.setattr(forms, "attend_along", lambda *_: None)
    for one, other in zip(learned(), ours, strict=True):
        assert_same(one, other)


def test_what_has_no_plain_form_goes_the_general_way(
    model: PreTrainedModel, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokens(2, 30)
    gaps = torch.arange(30)[None] * 2
    holes = torch.ones(2, 30, dtype=torch.long)
    holes[:, 7] = 0
    window = (torch.arange(30)[:, None] - torch.arange(30)).abs().lt(9).tril()[None, None].expand(2, 1, 30, 30)
    for inputs in ({"position_ids": gaps}, {"attention_mask": holes}, {"attention_mask": window}):
        assert_same(logits(model, ids, **inputs), generally(monkeypatch, model, ids, **inputs))
    assert taken == [False] * 6
    taken.clear()
    monkeypatch.setattr(forms, "trusted", lambda _: False)
    logits(model, ids)
    assert taken == [False] * 2
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert model(ids, output_attentions=True).attentions[0].shape == (2, 4, 30, 30)


def test_a_kernel_that_does_not_what_it_seems_to_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert toeplitz.trusted(dtype)
        toeplitz._tried.cache_clear()
        with monkeypatch.context() as patch:  # as a kernel would that rounds its mask
            mask = toeplitz.Band.mask
            patch.setattr(toeplitz.Band, "mask", lambda *a, mask=mask: mask(*a).bfloat16().to(a[1].dtype))
            assert not toeplitz.trusted(dtype)
        toeplitz._tried.cache_clear()
    assert not toeplitz.trusted(torch.int64)


@pytest.mark.parametrize(
    ("subject", "name", "backend", "form"),
    [
        (
            "gpt2",
            "alibi",
            "sdpa",
            "a row of biases by distance; one query at a time over the keys that it can reach",
        ),
        ("bert", "alibi", "sdpa", "a row of biases by distance"),
        ("gpt2", "alibi", "eager", "a bias written out, in blocks of queries"),
        ("gpt2", "fire", "sdpa", "a bias written out, in blocks of queries"),
        ("gpt2", "shaw", "sdpa", "a bias of near keys, in blocks of queries"),
        ("gpt2", "rope", "sdpa", "the stock attention function"),
        ("gpt2", "rerope", "sdpa", "scores of its own, in blocks of queries"),
    ],
)
def test_plan_and_certificate_name_the_form(subject: str, name: str, backend: str, form: str) -> None:
    model = SUBJECTS[subject].fresh(attn_implementation=backend)
    decided = posenc.plan(model, posenc.encoding(name))
    assert decided.form == form
    assert f"attending by {form}:" in str(decided)
    posenc.patch(model, posenc.encoding(name), verify=False)
    assert posenc.verify(model).findings["attends by"] == form


class Largest(TorchDispatchMode):
    """Notes the largest storage that any operation returns, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for item in found if isinstance(found, tuple | list) else [found]:
            if isinstance(item, Tensor):
                self.bytes = max(self.bytes, item.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "sandwich", "shaw"])
def test_no_tensor_grows_with_the_square_of_the_length(name: str) -> None:
    model = posenc.patch(SUBJECTS["gpt2"].fresh(), posenc.encoding(name), verify=False)
    with torch.no_grad(), Largest() as largest:
        model.base_model(tokens(1, 2048))
    assert largest.bytes < 2048 * 2048, "not even a boolean mask"
