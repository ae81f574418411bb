"""Attention that looks up no attention function, run as a record declares it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import pickle
import types
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

import hf_posenc as posenc
from hf_posenc.errors import BackendError, ConfigError, UnsupportedFamilyError
from hf_posenc.family import FAMILIES, find_family
from hf_posenc.planning import attention_modules
from hf_posenc.positions import carried, carrying
from hf_posenc.surgery import record_of
from tests.families.models import causal, stock
from tests.models import TRAINED, assert_same, in_steps, logits, sharpened, tokens

DECLARED = [name for name in FAMILIES if FAMILIES[name].declared]
LENGTH = 5 * TRAINED // 2
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": TRAINED}
"""Equal to no scaling up to the trained length, and never native."""
INTERLEAVED = posenc.RoPE(theta=10000.0, pairing="interleaved", scaling={"rope_type": "default"})
IDENTITY: dict[str, posenc.EncodingConfig] = {
    "bloom": posenc.Alibi(form="bloom"),
    "mpt": posenc.Alibi(form="mpt"),
    "falcon": posenc.RoPE(scaling=_DYNAMIC),
    "gpt_neox_japanese": posenc.RoPE(scaling=_DYNAMIC),
    "roformer": INTERLEAVED,
}
"""What a type has by itself, for those that have it inside attention."""
FALCONS = {
    "multi-query": {"multi_query": True, "new_decoder_architecture": False},
    "multi-head": {"multi_query": False, "new_decoder_architecture": False, "parallel_attn": False},
    "grouped": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


def falcon(layout: str, alibi: bool, backend: str = "sdpa") -> PreTrainedModel:
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "falcon", **sizes, **FALCONS[layout], alibi=alibi, bias=True, max_position_embeddings=TRAINED, eos_token_id=None
    )
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=backend)
    return sharpened(model).eval()


def attention_of(model: PreTrainedModel) -> list[Any]:
    family = find_family(model.config.model_type)
    return list(attention_modules(family.body_of(model), family).values())


def test_every_legacy_type_of_the_plan_is_there() -> None:
    known = {"bloom", "falcon", "gpt_neo", "gpt_neox_japanese", "megatron-bert", "mpnet", "mpt", "openai-gpt"}
    assert known | {"rembert", "roformer", "xglm"} <= set(DECLARED)


@pytest.mark.parametrize("model_type", list(IDENTITY))
def test_its_own_encoding_put_in_from_outside_changes_nothing(model_type: str) -> None:
    model, ids = stock(model_type), tokens(2, 40)
    if model_type == "roformer":  # the angles are no weights, and were sharpened with them
        model.base_model.encoder.embed_positions.weight.div_(30.0)
    before = logits(model, ids)
    posenc.patch(model, IDENTITY[model_type], verify=False)
    assert posenc.verify(model).plan.route == "interposer"
    assert_same(logits(model, ids), before)


@pytest.mark.parametrize(
    "model_type", sorted(set(DECLARED) & {"gpt_neo", "megatron-bert", "openai-gpt", "rembert", "xglm"})
)
def test_positions_outside_attention_are_kept_by_the_same_rows(model_type: str) -> None:
    model, ids = stock(model_type), tokens(2, 40)
    before = logits(model, ids)
    posenc.patch(model, posenc.Learned())
    assert_same(logits(model, ids), before)


@pytest.mark.parametrize("alibi", [False, True], ids=["rotary", "alibi"])
@pytest.mark.parametrize("layout", list(FALCONS))
def test_falcon_in_all_its_layouts(layout: str, alibi: bool) -> None:
    """With ALiBi the stock eager path counts the bias twice, so that the own encoding is compared on sdpa."""
    model, ids = falcon(layout, alibi), tokens(2, LENGTH)
    before = logits(model, tokens(2, 40))
    posenc.patch(model, posenc.Alibi(form="falcon") if alibi else posenc.RoPE(scaling=_DYNAMIC), verify=False)
    assert_same(logits(model, tokens(2, 40)), before)
    posenc.unpatch(model)
    assert model.base_model.use_alibi is alibi
    assert torch.equal(logits(model, tokens(2, 40)), before)
    native = posenc.plan(model, posenc.RoPE(theta=500.0, scaling={"rope_type": "default"})).route == "native"
    assert native is not alibi
    posenc.patch(model, posenc.RoPE(theta=500.0, scaling={"rope_type": "default"}))
    said = logits(model, ids)
    assert_same(in_steps(model, ids, [20, 1, 1, 30], DynamicCache(config=model.config)), said[:, :52])


def test_falcon_with_alibi_hears_of_none_once_it_is_patched() -> None:
    model = falcon("multi-query", alibi=True)
    posenc.patch(model, posenc.NoPE())
    other = falcon("multi-query", alibi=False)
    other.load_state_dict(model.state_dict())
    posenc.patch(other, posenc.NoPE())
    assert torch.equal(logits(model, tokens(1, 40)), logits(other, tokens(1, 40)))


@pytest.mark.parametrize(
    ("model_type", "wrong"),
    [
        ("gpt_neo", {"scaling": None}),
        ("gpt_neo", {"local": ("attention_type", "num_heads")}),
        ("bloom", {"layout": "contiguous"}),
        ("bloom", {"residual": None}),
        ("mpt", {"mask_hides": False}),
        ("mpt", {"projections": ("Wkqv",)}),
        ("roformer", {"output": "query"}),
        ("openai-gpt", {"hides_future": False}),
        ("openai-gpt", {"output": None}),
        ("mpnet", {"projections": ("k", "v", "q")}),
    ],
)
def test_a_record_that_is_not_true_is_refused(model_type: str, wrong: dict[str, Any]) -> None:
    model, family = stock(model_type), find_family(model_type)
    assert family.declared is not None
    record = dataclasses.replace(family, declared=dataclasses.replace(family.declared, **wrong))
    before = logits(model, tokens(1, 9))
    with pytest.raises(UnsupportedFamilyError, match=r"off by [\d.e+]+|cannot be (run as|tried)"):
        posenc.patch(model, posenc.Alibi(), family=record)
    assert torch.equal(logits(model, tokens(1, 9)), before)


def test_a_stock_class_that_comes_to_attend_otherwise_is_refused() -> None:
    model = stock("bloom")
    for module in attention_of(model):

        class BloomAttention(type(module)):  # type: ignore[misc]
            @functools.wraps(type(module).forward)
            def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                return super().forward(hidden_states * 1.01, *args, **kwargs)

        module.__class__ = BloomAttention
    with pytest.raises(UnsupportedFamilyError, match="off by"):
        posenc.plan(model, posenc.Alibi())


def test_a_record_is_checked_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="one or three"):
        posenc.DeclaredAttention(projections=("q", "kv"))
    with pytest.raises(ConfigError, match="did you mean 'grouped'"):
        posenc.DeclaredAttention(projections=("qkv",), layout="groped")


@pytest.mark.parametrize("model_type", DECLARED)
def test_the_other_backend_says_the_same(model_type: str) -> None:
    model, ids = stock(model_type, "eager"), tokens(2, 40)
    posenc.patch(model, posenc.Alibi(), verify=False)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    said, padded = logits(model, ids), logits(model, ids, attention_mask=mask)
    if model_type == "mpt":
        with pytest.raises(BackendError, match="turns its mask around"):
            model.set_attn_implementation("sdpa")
        return
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"
    assert_same(logits(model, ids), said)
    assert_same(logits(model, ids, attention_mask=mask)[0, 5:], padded[0, 5:])
    with pytest.raises(BackendError, match="flash"):
        model.set_attn_implementation("flash_attention_2")


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_grouped_heads_without_a_bias_on_either_backend(backend: str) -> None:
    model = falcon("grouped", alibi=True, backend=backend)
    posenc.patch(model, posenc.RoPE(theta=500.0, scaling={"rope_type": "default"}))
    other = falcon("grouped", alibi=True)
    posenc.patch(other, posenc.RoPE(theta=500.0, scaling={"rope_type": "default"}))
    assert_same(logits(model, tokens(2, 40)), logits(other, tokens(2, 40)))


def gradients(model: Any, **inputs: Any) -> list[torch.Tensor]:
    model.train()
    model.zero_grad()
    losses = [model(input_ids=tokens(2, 30, seed), **inputs).logits.logsumexp(-1).mean() for seed in (0, 1)]
    sum(losses).backward()  # type: ignore[attr-defined]
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("early", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("model_type", ["bloom", "falcon", "gpt_neo", "xglm"])
def test_checkpointed_layers_find_their_positions_again(model_type: str, early: bool, reentrant: bool) -> None:
    """Padding and jumps: a layer that counted for itself when it is computed again would be found out."""
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :6] = 0
    places = torch.arange(30)[None] * torch.tensor([[3], [1]])
    model = stock(model_type)
    twin = copy.deepcopy(model)
    asked = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    if early:
        twin.gradient_checkpointing_enable(**asked)
    for one in (model, twin):
        torch.manual_seed(0)
        posenc.patch(one, posenc.RoPE(theta=500.0, pairing="interleaved", scaling={**_DYNAMIC}), verify=False)
    if not early:
        twin.gradient_checkpointing_enable(**asked)
    inputs = {"attention_mask": mask, "position_ids": places, "use_cache": False}
    for ours, plain in zip(gradients(twin, **inputs), gradients(model, **inputs), strict=True):
        assert_same(ours, plain)
    posenc.unpatch(twin)
    assert not any("posenc" in name for module in twin.modules() for name in vars(module))


@pytest.mark.parametrize("model_type", DECLARED)
def test_explicit_positions_count_whether_or_not_the_head_takes_them(model_type: str) -> None:
    model, ids = stock(model_type), tokens(1, 20)
    posenc.patch(model, posenc.Alibi(), verify=False)
    start = 2 if find_family(model_type).counts_padding else 0
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    said = logits(model, ids)
    assert_same(logits(model, ids, position_ids=torch.arange(20)[None] + 30 + start), said)
    moved = logits(model, ids, position_ids=order[None] + start)
    assert not torch.allclose(moved, said, atol=1e-3)
    if not causal(model_type):  # positions are all that an encoder knows of order
        back = order.argsort()
        assert_same(moved[:, back], logits(model, ids[:, back]))


@pytest.mark.parametrize("model_type", ["megatron-bert", "rembert", "roformer"])
def test_encoders_as_decoders(model_type: str) -> None:
    config = copy.deepcopy(stock(model_type).config)
    config.is_decoder = True
    torch.manual_seed(3)
    model = sharpened(AutoModelForCausalLM.from_config(config)).eval()
    posenc.patch(model, posenc.Alibi())
    ids = tokens(2, LENGTH)
    said = logits(model, ids)
    assert_same(in_steps(model, ids, [20, 1, 1, 60], DynamicCache(config=model.config)), said[:, :82])


@pytest.mark.parametrize("model_type", ["bloom", "gpt_neo", "openai-gpt", "mpnet"])
def test_padding_on_the_right_changes_nothing_before_it(model_type: str) -> None:
    model, ids = stock(model_type), tokens(2, 40)
    posenc.patch(model, posenc.Alibi(), verify=False)
    mask = torch.ones_like(ids)
    mask[:, 30:] = 0
    assert_same(logits(model, ids, attention_mask=mask)[:, :30], logits(model, ids[:, :30]))


@pytest.mark.parametrize("model_type", ["bloom", "gpt_neo", "mpnet"])
def test_copies_and_pickles_say_the_same(model_type: str) -> None:
    model, ids = stock(model_type), tokens(1, 20)
    posenc.patch(model, posenc.Alibi(), verify=False)
    said = logits(model, ids)
    assert torch.equal(logits(copy.deepcopy(model), ids), said)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model)), ids), said)
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    assert torch.equal(logits(torch.load(kept, weights_only=False), ids), said)


@pytest.mark.parametrize("model_type", ["bloom", "gpt_neo", "megatron-bert", "xglm"])
def test_discovery_proposes_what_the_stock_output_confirms(model_type: str) -> None:
    model = stock(model_type)
    if model_type == "bloom":
        model.config.max_position_embeddings = TRAINED
    found, known = posenc.discover(model).declared, find_family(model_type).declared
    assert found is not None
    assert known is not None
    for name in ("projections", "layout", "output", "heads", "scaling", "residual", "hides_future", "local"):
        assert getattr(found, name) == getattr(known, name), name


def test_an_unknown_type_of_its_own_attention_comes_with_a_record_that_works() -> None:
    model = stock("bloom")
    model.config.max_position_embeddings = TRAINED
    model.config.__class__ = types.new_class(
        "Unknown", (type(model.config),), exec_body=lambda n: n.update(model_type="blom")
    )
    with pytest.raises(UnsupportedFamilyError, match="did you mean 'bloom'") as refusal:
        posenc.plan(model, posenc.Alibi())
    record = eval(str(refusal.value).split("\n\n")[1], {"posenc": posenc})
    before = logits(model, tokens(1, 20))
    posenc.patch(model, posenc.Alibi(), family=record, verify=False)
    assert_same(logits(model, tokens(1, 20)), before)


@pytest.mark.parametrize("model_type", ["bloom", "gpt_neo"])
def test_texts_grow_by_generation_past_the_trained_length(model_type: str) -> None:
    """As with all of the cache, so without: greedy, with a row padded on the left."""
    model = stock(model_type)
    posenc.patch(model, posenc.Alibi())
    ids, mask = tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[0, :20] = 0
    asked = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **asked), model.generate(ids, **asked, use_cache=False))


def test_a_length_that_nobody_states_is_asked_for() -> None:
    model = stock("bloom")
    del model.config.seq_length
    with pytest.raises(UnsupportedFamilyError, match=r"set model\.config\.seq_length"):
        posenc.plan(model, posenc.Alibi())


def test_undoing_brings_every_part_back() -> None:
    model = stock("roformer")
    table = model.base_model.encoder.embed_positions
    posenc.patch(model, posenc.Alibi())
    assert "Unheard" in str(record_of(model).plan.changes)  # type: ignore[union-attr]
    posenc.unpatch(model)
    assert model.base_model.encoder.embed_positions is table
    assert not any("posenc" in type(module).__name__.lower() for module in model.modules())


def test_carrying_positions_breaks_no_graph() -> None:
    """Unlike a ContextVar, which torch.compile cannot look into."""

    @torch.compile(backend="eager", fullgraph=True)
    def carried_through(query: torch.Tensor) -> torch.Tensor:
        with carrying(posenc.Positions(query=query, key=query)):
            found = carried()
            return query if found is None else found.query + 1

    assert torch.equal(carried_through(torch.arange(5)[None]), torch.arange(1, 6)[None])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bloom", "gpt_neo", "llama"])
def test_at_most_two_graphs_for_all_lengths(model_type: str) -> None:
    graphs = []
    model = stock(model_type)
    posenc.patch(model, posenc.NoPE(), verify=False)
    torch.compiler.reset()
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    for length in (8, 12, 31, 90):
        ids = tokens(2, length)
        assert_same(logits(compiled, ids, use_cache=False), logits(model, ids, use_cache=False))
    assert len(graphs) <= 2
