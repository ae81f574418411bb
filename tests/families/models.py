"""A tiny random model of every registered model type, built from its config class alone."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_posenc.family import FAMILIES, find_family
from tests.models import TRAINED, VOCABULARY, sharpened

MODEL_TYPES = [name for name in FAMILIES if not FAMILIES[name].stacks]
"""Those of one body; `stacked` has the others."""
WINDOW = 24
"""Tokens that layers with a sliding window see."""

LATE = ("codegen", "diffllama", "doge", "gptj", "nemotron")
"""Types that were rewritten to attend as others do between the oldest and the newest transformers."""

_WIDTHS = {
    **dict.fromkeys(("hidden_size", "true_hidden_size", "intra_bottleneck_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "hidden_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("sliding_window", "local_attention"), WINDOW),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_key_value_heads", "num_hidden_layers", "n_group"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "first_k_dense_replace", "bos_token_id"), 1),
    **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), VOCABULARY),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim", "embedding_size"), 16),
    "head_dim": 8,
    "rotary_dim": 4,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "eos_token_id": None,
    "pad_token_id": 0,
    "languages": ["en_XX"],
    "default_language": "en_XX",
    "global_attn_every_n_layers": 2,
    "token_dropout": False,
    "is_decoder": False,
}
_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "dropout", "hidden_dropout_prob", "resid_pdrop")
_OWN: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"]},
    "exaone_moe": {"layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "doge": {"keep_window_size": 512},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "mpnet": {"pad_token_id": 1},  # whatever its config says, its code counts on that
}
"""What shows the peculiarity of a type in two layers."""


def causal(model_type: str) -> bool:
    """Whether the type is tried with its causal head; encoders that can be run as decoders are tried as encoders."""
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


@functools.cache
def _known(model_type: str) -> dict[str, Any]:
    config = AutoConfig.for_model(model_type)
    return {**vars(config), **dict.fromkeys(config.attribute_map)}


def keeps_cache(model_type: str) -> bool:
    """Whether the type, as it is tried, keeps a cache."""
    return causal(model_type) and model_type != "openai-gpt"


def fresh(model_type: str, backend: str = "sdpa") -> PreTrainedModel:
    """A model of its own, in eval mode; the same weights every time."""
    known = _known(model_type)
    asked = {**_WIDTHS, **dict.fromkeys(_DROPOUT, 0.0), **_OWN.get(model_type, {})}
    fields = {name: value for name, value in asked.items() if name in known}
    length = TRAINED + (1 if find_family(model_type).counts_padding else 0)
    fields[find_family(model_type).length] = length
    if causal(model_type) and "is_decoder" in known:
        fields["is_decoder"] = True
    config = AutoConfig.for_model(model_type, **fields)
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    auto = AutoModelForCausalLM if causal(model_type) else AutoModelForMaskedLM
    model: PreTrainedModel = auto.from_config(config, attn_implementation=backend)
    torch.random.set_rng_state(state)
    return sharpened(model).eval()


@functools.cache
def backends(model_type: str) -> tuple[str, ...]:
    """The attention backends, among those that carry scores, that the stock model can run on."""
    try:
        fresh(model_type, "sdpa")
    except ValueError:  # transformers refuses
        return ("eager",)
    return ("sdpa", "eager")


@functools.cache
def _stock(model_type: str, backend: str) -> PreTrainedModel:
    return fresh(model_type, backend)


def stock(model_type: str, backend: str | None = None) -> PreTrainedModel:
    """The unpatched model, a copy that may be changed; skips where this transformers has another kind of it."""
    if model_type in LATE and Version(transformers.__version__) < Version("5.24"):
        pytest.skip(f"{model_type} attended by itself in older releases, and is refused there")
    return copy.deepcopy(_stock(model_type, backend or backends(model_type)[0]))
