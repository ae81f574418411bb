"""Flash attention with ALiBi in extra head dimensions gives what eager gives.

Its kernels run on GPUs alone. What stands in for them here, below the functions of transformers that call them, does
what they are documented to do: it takes no bias and no mask, multiplies what it is given with sums in float32, rounds
weights to the dtype of the values, and sees the last queries and the last keys as those of one token.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers import modeling_flash_attention_utils as stock

import hf_posenc as posenc
from hf_posenc.errors import BackendError
from hf_posenc.flash import attend_flash
from hf_posenc.positions import Positions
from hf_posenc.scores import Scores
from tests.checkpoints import stories260k
from tests.models import SUBJECTS, TRAINED, assert_same, in_steps, largest, logits, tokens

FLASH = "flash_attention_2"
LENGTH = TRAINED + 9


@torch.autocast("cpu", enabled=False)
def kernel(query: Tensor, key: Tensor, value: Tensor, *, softmax_scale: float, causal: bool, **_: Any) -> Tensor:
    """One text: (b, q, h, d), (b, k, h_kv, d) twice -> (b, q, h, d), gradients of scores rounded as well."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
    assert query.shape[-1] % 8 == 0
    assert query.dtype == key.dtype == value.dtype
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[2] // key.shape[2]
    q, k, v = (x.transpose(1, 2).to(wide) for x in (query, key, value))
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.mT * softmax_scale
    if scores.requires_grad:
        scores.register_hook(lambda gradient: gradient.to(query.dtype).to(wide))
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min)).exp()
    output = weights.to(query.dtype).to(wide) @ v / weights.sum(-1, keepdim=True)
    return output.transpose(1, 2).to(query.dtype)


def packed_kernel(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **kwargs: Any):
    """Texts behind each other: (tokens, h, d) -> (tokens, h, d)."""
    of_queries, of_keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    texts = zip(
        query[None].split(of_queries, 1), key[None].split(of_keys, 1), value[None].split(of_keys, 1), strict=True
    )
    return torch.cat([kernel(*text, **kwargs)[0] for text in texts])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(implementation: str, *_: Any, **__: Any) -> tuple[Any, ...]:
        assert implementation == FLASH
        return kernel, packed_kernel, None, stock._pad_input, stock._unpad_input

    monkeypatch.setattr(stock, "_lazy_imports", found)
    monkeypatch.setattr(stock, "_loaded_implementation", None)


def on_flash(model: PreTrainedModel) -> PreTrainedModel:
    """The model with flash attention, as if on a GPU: asked aloud, transformers looks for the package."""
    model.config._attn_implementation_internal = FLASH
    return model


def both(subject: str, config: posenc.EncodingConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """One patched model on flash attention and its twin on eager."""
    eager = posenc.patch(SUBJECTS[subject].fresh(attn_implementation="eager"), config, verify=False)
    return on_flash(copy.deepcopy(eager)), eager


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask of two rows, one of which is padded."""
    ids = tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, slice(0, 11) if side == "left" else slice(-11, None)] = 0
    return ids, mask


CONFIGS: dict[str, posenc.EncodingConfig] = {
    "alibi": posenc.Alibi(),
    "bloom": posenc.Alibi(form="bloom"),
    "trained": posenc.Alibi(trainable=True, per_layer=True),
    "tempered": posenc.Alibi(temperature={"kind": "log_n"}),
    "layered": posenc.encoding("layered", pattern=[posenc.Alibi(), posenc.RoPE()]),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("subject", "config"),
    [
        *(pytest.param("llama", config, id=name) for name, config in CONFIGS.items()),
        *(pytest.param(subject, posenc.Alibi(), id=subject) for subject in ("opt", "gpt_neox")),
        pytest.param("opt", posenc.RoPE(theta=500.0), id="rope"),  # which needs no columns
    ],
)
def test_equals_eager_under_padding(subject: str, config: posenc.EncodingConfig) -> None:
    flash, eager = both(subject, config)
    for ids, mask in [padded("left"), padded("right")]:
        found, expected = (logits(model, ids, attention_mask=mask) for model in (flash, eager))
        assert_same(found[mask > 0], expected[mask > 0])
    assert_same(logits(flash, ids), logits(eager, ids))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("static", [False, True])
def test_decodes_from_a_cache(static: bool) -> None:
    flash, eager = both("llama", posenc.Alibi())
    ids, mask = padded("left")
    for given in ({}, {"attention_mask": mask}):
        cache = StaticCache(config=flash.config, max_cache_len=LENGTH + 5) if static else DynamicCache()
        found = in_steps(flash, ids, [40, 1, LENGTH - 42, 1], cache, **given)
        assert_same(found[mask > 0], logits(eager, ids, **given)[mask > 0])


@pytest.mark.usefixtures("installed")
def test_generates_what_eager_generates() -> None:
    flash, eager = both("llama", posenc.Alibi())
    ids, mask = padded("left")
    given = {"attention_mask": mask, "max_new_tokens": 5, "num_beams": 2, "do_sample": False}
    assert torch.equal(flash.generate(ids, **given), eager.generate(ids, **given))


@pytest.mark.usefixtures("installed")
def test_packed_texts_see_themselves_alone() -> None:
    """As `DataCollatorWithFlattening` gives them, with the ends of the texts."""
    flash, eager = both("llama", posenc.Alibi())
    texts = [tokens(1, length, seed=length) for length in (20, 9, 31)]
    ids, places = torch.cat(texts, dim=1), torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    ends = torch.tensor([0, 20, 29, 60], dtype=torch.int32)
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 31, "max_length_k": 31}
    found = logits(flash, ids, position_ids=places, use_cache=False, **packed)
    assert_same(found, torch.cat([logits(eager, text) for text in texts], dim=1))
    for given in ({}, {**packed, "cu_seq_lens_k": torch.tensor([0, 20, 60], dtype=torch.int32)}):
        with pytest.raises(BackendError, match="positions go back along a row"):
            logits(flash, ids, position_ids=places, use_cache=False, **given)
    with pytest.raises(BackendError, match="no way to carry document_ids"):
        logits(flash, ids, document_ids=torch.arange(60)[None] // 20)


@pytest.mark.usefixtures("installed")
def test_positions_and_not_slots_make_the_distance() -> None:
    ids, apart = tokens(2, 20), torch.stack([torch.arange(7, 67, 3), torch.arange(20)])
    for config in (posenc.Alibi(), posenc.RoPE(theta=500.0)):
        flash, eager = both("opt", config)
        for rows in (slice(0, 1), slice(None)):  # transformers takes gaps in a single row for ends of texts
            given = {"position_ids": apart[rows]}
            assert_same(logits(flash, ids[rows], **given), logits(eager, ids[rows], **given))


@pytest.mark.usefixtures("installed")
def test_gradients_are_those_of_eager() -> None:
    flash, eager = both("llama", posenc.Alibi(trainable=True))
    ids, mask = padded("left")
    for model in (flash, eager):
        said = model(input_ids=ids, attention_mask=mask).logits[mask > 0]
        said.log_softmax(-1).square().mean().backward()
    ours, theirs = (dict(model.named_parameters()) for model in (flash, eager))
    assert float(theirs["model.posenc.slopes"].grad.abs().max()) > 1e-4
    for name, parameter in theirs.items():
        assert_same(ours[name].grad / largest(parameter.grad), parameter.grad / largest(parameter.grad), 1e-4)


def call(places: Tensor, queries: int, dtype: torch.dtype) -> tuple[Scores, list[Tensor]]:
    """A call of four heads over two, with keys at these positions, (k,), the last of which are the queries'."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256}
    geometry = posenc.Geometry(**sizes, max_position_embeddings=TRAINED, causal=True)
    encoding = posenc.Alibi(trainable=True, interpolation_factor=0.7).build(geometry)  # slopes of many digits
    positions, keys = Positions(query=places[None, -queries:], key=places[None]), len(places)
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(1, h, n, 64, generator=generator).to(dtype) for h, n in ((4, queries), (2, keys), (2, keys))]
    return Scores(encoding, positions, mask=None, causal=True, dtype=dtype, scaling=0.1), states


def attended(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    states = (x.transpose(1, 2) for x in (query, key, value))
    return kernel(*states, softmax_scale=0.1, causal=True), None


def by_the_book(states: list[Tensor], bias: Tensor | float) -> Tensor:
    """(b, q, h, d) in float64."""
    query, key, value = states[0].double(), *(x.double().repeat_interleave(2, dim=1) for x in states[1:])
    scores = query @ key.mT * 0.1 + bias
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def error(found: Tensor, truth: Tensor) -> Tensor:
    """Root mean square of the error of every head, as a share of what is right."""
    return torch.linalg.vector_norm(found - truth, dim=(0, 1, 3)) / torch.linalg.vector_norm(truth, dim=(0, 1, 3))


def then_far(length: int) -> Tensor:
    """Positions of a text whose last token stands far away, as that of a longer text does to its beginning."""
    return torch.cat([torch.arange(length), torch.tensor([8192])])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("places", "queries"),
    [
        (torch.arange(500), 500),
        (then_far(500), 501),
        (torch.arange(8192), 5),
        pytest.param(torch.arange(2048), 2048, marks=pytest.mark.slow),
        pytest.param(torch.arange(65_536), 4, marks=pytest.mark.slow),
    ],
)
def test_half_precision_loses_no_more_than_without_positions(places: Tensor, queries: int, dtype: torch.dtype) -> None:
    scores, states = call(places, queries, dtype)
    found, _ = attend_flash(scores, attended, *states, is_causal=True)
    slopes, apart = scores.encoding.separable_slopes(), scores.positions.distance()
    assert found.dtype == dtype
    truth = by_the_book(states, -slopes.double()[:, None, None] * apart)
    floor = error(attended(*states)[0], by_the_book(states, 0.0))
    assert bool((error(found, truth) <= 1.5 * floor).all())
    later, _ = call(places + 10**7, queries, dtype)
    assert torch.equal(attend_flash(later, attended, *states, is_causal=True)[0], found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_slope_gets_its_gradient_from_scores_whose_gradients_are_rounded(dtype: torch.dtype) -> None:
    """The farther the last key, the more rounding there is for the position of the query to take out again."""
    scores, states = call(then_far(500), 501, dtype)
    slopes: Any = scores.encoding.slopes
    draw = torch.randn(1, 501, 4, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    found, _ = attend_flash(scores, attended, *states, is_causal=True)
    (ours,) = torch.autograd.grad((found * draw).sum(), slopes)
    exact = slopes.detach().double().requires_grad_()
    truth = by_the_book(states, -exact[:, None, None] * scores.positions.distance())
    (theirs,) = torch.autograd.grad((truth * draw).sum(), exact)
    assert largest(ours / theirs - 1) <= 0.05


@pytest.mark.parametrize(
    ("subject", "config"),
    [
        *(("llama", posenc.encoding(name)) for name in ("t5", "kerple", "fire")),
        ("llama", posenc.Alibi(form="falcon")),
        ("llama", posenc.encoding("layered", pattern=[posenc.Alibi(), posenc.encoding("kerple")])),
        ("bert", posenc.Alibi()),  # whose queries see what is ahead
    ],
)
def test_other_biases_are_refused(subject: str, config: posenc.EncodingConfig) -> None:
    model = on_flash(SUBJECTS[subject].fresh())
    with pytest.raises(BackendError, match=r"'flash_attention_2' has no way to carry the scores of .*'sdpa'"):
        posenc.patch(model, config)
    assert not posenc.is_patched(model)


def test_what_the_kernel_cannot_do_beside_is_refused() -> None:
    scores, states = call(torch.arange(4), 4, torch.bfloat16)
    cases = {"cap scores": {"softcap": 30.0}, "have attention sinks": {"s_aux": torch.zeros(4)}}
    for what, given in {**cases, "attend to later keys": {"is_causal": False}}.items():
        with pytest.raises(BackendError, match=f"flash attention cannot {what}"):
            attend_flash(scores, attended, *states, **{"is_causal": True, **given})
    with pytest.raises(BackendError, match="more than 248 dimensions"):
        attend_flash(scores, attended, *(x.repeat(1, 1, 1, 4) for x in states), is_causal=True)


@pytest.mark.usefixtures("installed")
def test_a_mask_of_pairs_is_refused() -> None:
    flash, _ = both("llama", posenc.Alibi())
    with pytest.raises(BackendError, match="cannot take a mask of pairs"):
        logits(flash, tokens(1, 9), attention_mask=torch.ones(1, 1, 9, 9).tril().bool())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_verified_and_named(dtype: torch.dtype) -> None:
    model, form = on_flash(SUBJECTS["llama"].fresh().to(dtype)), "a bias by distance, in extra head dimensions"
    assert posenc.plan(model, posenc.Alibi()).form == form
    posenc.patch(model, posenc.Alibi())
    assert posenc.verify(model).findings["attends by"] == form
    posenc.unpatch(model)
    assert model.config._attn_implementation == FLASH


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@torch.no_grad()
def test_a_trained_model_says_in_half_precision_what_it_says_in_full() -> None:
    model, tokenizer = stories260k()
    posenc.patch(model, posenc.Alibi(), verify=False)
    ids = torch.tensor([tokenizer("Once upon a time there was a girl who had a red ball.").input_ids * 100])
    losses = [float(m(input_ids=ids, labels=ids).loss) for m in (model, on_flash(copy.deepcopy(model).bfloat16()))]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
