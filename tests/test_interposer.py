"""The joint by itself: class swap, cache stand-in, config view, and modules that are called outside their model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention

import hf_posenc as posenc
from hf_posenc.interposer import NAME, check_backend, interposed, uses_attention, uses_key_positions
from tests.models import SPECS, SUBJECTS, assert_same, logits, patched, tokens


def built(spec: str) -> Any:
    geometry = posenc.Geometry(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=64,
        causal=True,
    )
    return posenc.build(SPECS[spec], geometry)


def test_one_class_for_each_pair_and_no_other_is_touched() -> None:
    before = dict(vars(GPT2Attention))
    cls = interposed(GPT2Attention, "Alibi")
    assert cls is interposed(GPT2Attention, "Alibi")
    assert cls is not interposed(GPT2Attention, "Rotary")
    assert cls is not interposed(LlamaAttention, "Alibi")
    assert issubclass(cls, GPT2Attention)
    assert cls.__name__ == "AlibiGPT2Attention"
    assert dict(vars(GPT2Attention)) == before


def test_what_acts_where() -> None:
    assert {spec for spec in SPECS if uses_attention(built(spec))} == {s for s in SPECS if "rope" in s or s == "alibi"}
    assert {spec for spec in SPECS if uses_key_positions(built(spec))} == {"alibi", "rope-dynamic"}
    check_backend(built("rope"), "flash_attention_2")
    check_backend(built("alibi"), None)


@pytest.mark.parametrize("subject", ["gpt2", "opt", "llama", "gpt_neox", "bert"])
def test_only_the_attention_module_sees_the_other_config(subject: str) -> None:
    model = patched(subject, "alibi", own=True)
    layers = [m for m in model.modules() if type(m).__name__.startswith("Alibi") and hasattr(type(m), "posenc_stock")]
    assert len(layers) == 2
    for layer in layers:
        assert layer.config._attn_implementation == NAME
        assert layer.config.hidden_size == model.config.hidden_size
        assert layer.__dict__["config"] is model.config
        with pytest.raises(AttributeError):
            _ = layer.config.no_such_field
    assert model.config._attn_implementation == "sdpa"
    assert NAME not in [model.config.to_dict().get(key) for key in ("_attn_implementation", "attn_implementation")]


@pytest.mark.parametrize("spec", ["alibi", "rope", "rope-dynamic"])
def test_a_layer_called_by_itself_counts_from_its_cache(spec: str) -> None:
    """As probes and pruning tools call it: hidden states in, no positions given."""
    model = patched("gpt2", spec, "eager")
    layer, states = model.transformer.h[0].attn, torch.randn(1, 12, 32)
    mask = torch.zeros(1, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
    with torch.no_grad():
        whole = layer(states, attention_mask=mask)[0]
        explicit = layer(states, attention_mask=mask, position_ids=torch.arange(12)[None])[0]
    assert_same(explicit, whole)
    if spec != "rope":
        return
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [layer(states[:, i : i + 1], past_key_values=cache)[0] for i in range(12)]
    assert_same(torch.cat(parts, 1), whole)


def test_the_cache_holds_rotated_keys_but_not_where_the_rotation_grows() -> None:
    ids = tokens(1, 20)
    keys = {}
    for spec in ("nope", "rope", "rope-dynamic"):
        model = patched("gpt2", spec)
        cache = DynamicCache(config=model.config)
        logits(model, ids, past_key_values=cache)
        keys[spec] = cache.layers[0].keys
    assert torch.equal(keys["rope-dynamic"], keys["nope"])
    assert_same(keys["rope"], built("rope").rotate(keys["nope"], torch.arange(20)[None]))


@pytest.mark.parametrize("subject", list(SUBJECTS))
def test_positional_arguments_and_tuples_work_as_before(subject: str) -> None:
    model, ids = patched(subject, "alibi"), tokens(2, 12)
    said = logits(model, ids)
    with torch.no_grad():
        assert_same(model(ids).logits, said)
        assert_same(model(ids, return_dict=False)[0], said)
        embedded = model.get_input_embeddings()(ids)
        assert_same(model(inputs_embeds=embedded).logits, said)


def test_hidden_states_and_maps_are_recorded_before_and_after_a_patch() -> None:
    model, ids = SUBJECTS["gpt2"].fresh(attn_implementation="eager"), tokens(1, 12)
    wanted = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        stock = model(ids, **wanted)
        posenc.patch(model, posenc.Alibi())
        changed = model(ids, **wanted)
        posenc.unpatch(model)
        again = model(ids, **wanted)
    assert len(changed.hidden_states) == len(stock.hidden_states) == 3
    assert len(changed.attentions) == len(stock.attentions) == 2
    assert not torch.allclose(changed.attentions[0], stock.attentions[0], atol=1e-3)
    for one, other in zip(again.attentions, stock.attentions, strict=True):
        assert torch.equal(one, other)
