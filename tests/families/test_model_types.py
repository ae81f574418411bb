"""Every registered model type, tiny and random, under every way of acting: the laws that a patch has to keep."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    EsmConfig,
    EsmForMaskedLM,
    Exaone4Config,
    Exaone4ForCausalLM,
)

import hf_posenc as posenc
from hf_posenc.encodings.rerope import ReRoPE
from hf_posenc.encodings.t5_bias import T5
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from hf_posenc.family import find_family
from hf_posenc.inspection import inspection
from tests.families.models import MODEL_TYPES, WINDOW, backends, keeps_cache, stock
from tests.models import TRAINED, assert_same, in_steps, logits, sharpened, tokens

LENGTH = 5 * TRAINED // 2
_STATIC = {"rope_type": "default"}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}
SPECS = {
    "alibi": posenc.Alibi(),
    "learned": posenc.Learned(max_position_embeddings=LENGTH, extension="tile"),
    "nope": posenc.NoPE(allow_bidirectional=True),
    "rope": posenc.RoPE(theta=500.0, scaling=_STATIC),
    "rope-dynamic": posenc.RoPE(theta=500.0, partial_rotary_factor=1.0, scaling=_DYNAMIC),
    "sinusoidal": posenc.Sinusoidal(),
    "t5": T5(),
}
REFUSED = {
    ("cohere2", "rope-dynamic"): "leaves 1 of its 2 layers without positions",
    ("exaone4", "rope-dynamic"): "leaves 1 of its 2 layers without positions",
    ("exaone_moe", "rope-dynamic"): "leaves 1 of its 2 layers without positions",
    ("smollm3", "rope-dynamic"): "leaves 1 of its 2 layers without positions",
}
"""Cells that cannot be right, and what is said of them."""
PECULIAR = ["albert", "cohere2", "gemma2", "gemma3_text", "glm", "gpt_bigcode", "gpt_oss", "mistral", "smollm3", "xmod"]
"""Types that differ in kind from those that the other contract tests go through."""


def spec_for(model_type: str, name: str) -> posenc.EncodingConfig:
    """The spec, in the pairing that the type was trained with."""
    spec = SPECS[name]
    if isinstance(spec, posenc.RoPE) and find_family(model_type).interleaved:
        return dataclasses.replace(spec, pairing="interleaved")
    return spec


def cells() -> list[Any]:
    """Every type with a bias, peculiar ones with everything that is fast; the rest is for the slow tier."""
    return [
        pytest.param(
            model_type,
            name,
            id=f"{model_type}-{name}",
            marks=() if name == "alibi" or (model_type in PECULIAR and name != "rope-dynamic") else pytest.mark.slow,
        )
        for model_type in MODEL_TYPES
        for name in SPECS
    ]


@pytest.mark.parametrize(("model_type", "name"), cells())
def test_a_model_type_keeps_the_laws(model_type: str, name: str, tmp_path: Path) -> None:
    model, spec = stock(model_type), spec_for(model_type, name)
    before = logits(model, tokens(2, 40))
    if (model_type, name) in REFUSED:
        with pytest.raises(UnsupportedEncodingError, match=REFUSED[model_type, name]):
            posenc.patch(model, spec)
        assert torch.equal(logits(model, tokens(2, 40)), before)
        return
    posenc.patch(model, spec)  # verifies
    ids = tokens(2, LENGTH)
    said = logits(model, ids)
    assert said.isfinite().all()
    family = find_family(model_type)
    if name == "learned" and family.table and not (family.declared and family.declared.positional):
        tolerance = 1e-5 if family.declared else 0.0  # other kernels
        assert_same(logits(model, tokens(2, 40)), before, tolerance)
    if keeps_cache(model_type):
        assert_same(
            in_steps(model, ids, [WINDOW - 3, 1, 1, 10, 60, 1, 1], DynamicCache(config=model.config)), said[:, :95]
        )
    padded_laws(model, model_type, ids)
    for backend in backends(model_type)[1:]:
        model.set_attn_implementation(backend)
        assert_same(logits(model, ids), said)
    saved_laws(model, tmp_path)
    model.set_attn_implementation(backends(model_type)[0])
    posenc.unpatch(model)
    assert torch.equal(logits(model, tokens(2, 40)), before)
    assert not [path for path, _ in model.named_modules() if "posenc" in path]


def padded_laws(model: Any, model_type: str, ids: Tensor) -> None:
    """Padding on the left of one row changes nothing that is said of its tokens, cached or not."""
    short = ids[:1, :-7]
    rows = torch.cat([torch.cat([torch.zeros_like(ids[:1, :7]), short], 1), ids[1:]])
    mask = torch.ones_like(rows)
    mask[0, :7] = 0
    said = logits(model, short)
    assert_same(logits(model, rows, attention_mask=mask)[0, 7:], said[0])
    if keeps_cache(model_type):
        cache = DynamicCache(config=model.config)
        assert_same(in_steps(model, rows, [30, 1, 5], cache, attention_mask=mask)[0, 7:], said[0, :29])


def saved_laws(model: Any, folder: Path) -> None:
    """What is loaded says bit for bit what was saved."""
    expected = logits(model, tokens(2, 40))
    model.save_pretrained(folder)
    loaded = posenc.from_pretrained(folder, attn_implementation=model.config._attn_implementation).eval()
    assert torch.equal(logits(loaded, tokens(2, 40)), expected)


def test_how_many_types_there_are() -> None:
    assert len(MODEL_TYPES) >= 80
    assert len(set(MODEL_TYPES)) == len(MODEL_TYPES)


@pytest.mark.parametrize("model_type", ["gemma3_text", "modernbert"])
def test_thetas_of_its_own_for_each_type_of_layer_are_not_taken_for_one(model_type: str) -> None:
    model = stock(model_type)
    with pytest.raises(ConfigError, match="rotate in different ways"):
        posenc.plan(model, posenc.RoPE())
    assert posenc.plan(model, posenc.RoPE(theta=500.0, scaling=_STATIC)).route == "interposer"


@pytest.mark.parametrize("model_type", ["cohere", "glm", "helium", "roformer"])
def test_neighbouring_pairs_are_not_torn_apart(model_type: str) -> None:
    assert posenc.plan(stock(model_type), posenc.RoPE()).config.pairing == "interleaved"  # as the weights have it
    with pytest.raises(ConfigError, match="pairing='interleaved'"):
        posenc.plan(stock(model_type), posenc.RoPE(pairing="half_split"))


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="rotated inside its attention then")
def test_an_encoder_configured_for_a_rotation_has_one() -> None:
    """Most of ESM-2; its theta stands in the config, beside no rope_parameters."""
    config = EsmConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        position_embedding_type="rotary",
        rope_theta=300.0,
        pad_token_id=0,
        intermediate_size=48,
        mask_token_id=2,
        token_dropout=False,
        max_position_embeddings=TRAINED,
    )
    torch.manual_seed(7)
    model, ids = sharpened(EsmForMaskedLM(config)).eval(), tokens(2, LENGTH)
    before = logits(model, ids)
    assert inspection(model)["last position"] == "none: no table ends"
    posenc.patch(model, posenc.RoPE())
    assert posenc.verify(model).plan.config.theta == 300.0  # type: ignore[attr-defined]
    assert_same(logits(model, ids), before)
    assert_same(logits(model, ids, position_ids=torch.arange(LENGTH)[None]), before)
    posenc.unpatch(model)
    posenc.patch(model, posenc.Sinusoidal())
    padded_laws(model, "esm", ids)
    assert (logits(model, ids) - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("deberta-v2", "content"), ("mamba", "recurrent"), ("longformer", "sparse"), ("reformer", "approximates")],
)
def test_what_cannot_be_patched_is_refused_with_the_reason(model_type: str, reason: str) -> None:
    with pytest.raises(posenc.errors.UnsupportedFamilyError, match=reason):
        find_family(model_type)


@pytest.mark.parametrize("model_type", ["gptj", "codegen", "helium", "glm"])
def test_the_rotation_that_a_model_has_can_be_put_in_from_outside(model_type: str) -> None:
    """Dynamic scaling goes through the interposer and changes nothing up to the trained length."""
    model = stock(model_type)
    before = logits(model, tokens(2, 40))
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": TRAINED}
    posenc.patch(model, posenc.RoPE(pairing="interleaved", scaling=scaling), verify=False)
    assert posenc.verify(model).plan.route == "interposer"
    assert_same(logits(model, tokens(2, 40)), before, 1e-4)


def test_an_unknown_type_is_refused_with_a_record_to_paste() -> None:
    class Unknown(type(stock("llama").config)):  # type: ignore[misc]
        model_type = "lllama"

    model = stock("llama")
    model.config.__class__ = Unknown
    with pytest.raises(posenc.errors.UnsupportedFamilyError, match="did you mean 'llama'") as refusal:
        posenc.plan(model, posenc.Alibi())
    record = eval(str(refusal.value).split("\n\n")[1], {"posenc": posenc})
    assert record == posenc.Family(model_types=("lllama",), attention=("LlamaAttention",), rotary="rotary_emb")
    posenc.patch(model, posenc.Alibi(), family=record)


def test_attention_that_computes_its_own_scores_is_refused_by_name() -> None:
    config = BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
    model = BloomForCausalLM(config).eval()
    config.max_position_embeddings = TRAINED
    record = dataclasses.replace(posenc.discover(model), declared=None)
    with pytest.raises(posenc.errors.UnsupportedFamilyError, match=r"BloomAttention .* computes its scores itself"):
        posenc.plan(model, posenc.Alibi(), family=record)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_scores_of_its_own_would_lose_caps_and_sinks(model_type: str) -> None:
    model = stock(model_type)
    if model_type == "gemma2":
        assert model.config.attn_logit_softcapping
    with pytest.raises(UnsupportedEncodingError, match=r"caps its scores|has attention sinks"):
        posenc.plan(model, ReRoPE(window=16))


def test_without_windows_every_layer_rotates() -> None:
    """EXAONE 4 of 1.2B has none, and no layer of it is a sliding one."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    none = {"sliding_window": None, "layer_types": ["full_attention"] * 2, "eos_token_id": None}
    config = Exaone4Config(vocab_size=61, **sizes, num_key_value_heads=2, **none)
    model = Exaone4ForCausalLM(config).eval()
    before = logits(model, tokens(2, 40))
    posenc.patch(model, SPECS["rope-dynamic"])
    assert (logits(model, tokens(2, 40)) - before).abs().max() > 1e-6
