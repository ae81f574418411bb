"""A tiny random model of every registered model type that has an encoder and a decoder."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    BertConfig,
    EncoderDecoderCache,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_posenc.family import FAMILIES
from tests.models import TRAINED, VOCABULARY, sharpened

MODEL_TYPES = [name for name in FAMILIES if FAMILIES[name].stacks]
BIASED = [name for name in MODEL_TYPES if FAMILIES[name].bias]
"""T5 and its relatives."""
TABLED = [name for name in MODEL_TYPES if name not in BIASED]
REACHED = [name for name in MODEL_TYPES if not FAMILIES[name].unreached]
"""Types of which both stacks can be patched."""
ALONE = [name for name in MODEL_TYPES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name != "encoder-decoder"]
"""Types of which transformers has the decoder as a model by itself."""

_SIZES = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("max_position_embeddings", "max_source_positions", "max_target_positions"), TRAINED),
    **dict.fromkeys(("dropout", "attention_dropout", "dropout_rate", "router_jitter_noise"), 0.0),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0),
    "bos_token_id": 1,
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id", "begin_suppress_tokens", "suppress_tokens"), None),
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "num_heads": 4,
    "d_model": 32,
    "d_kv": 12,  # heads are wider than their share of the model
    "num_mel_bins": 8,
    "num_experts": 2,
    "expert_capacity": 10_000,
    "local_radius": 4,
    "pad_token_id": 0,
    "scale_embedding": True,
}
_BERT = BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=TRAINED,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    pad_token_id=0,
)


def _config(model_type: str) -> Any:
    if model_type == "encoder-decoder":
        berts = {"encoder": _BERT.to_dict(), "decoder": {**_BERT.to_dict(), "is_decoder": True}}
        berts["decoder"]["add_cross_attention"] = True
        return AutoConfig.for_model(model_type, **berts, pad_token_id=0, decoder_start_token_id=1)
    default = AutoConfig.for_model(model_type)
    known = {**vars(default), **dict.fromkeys(default.attribute_map)}
    fields = {name: value for name, value in _SIZES.items() if name in known}
    return AutoConfig.for_model(model_type, **fields, decoder_start_token_id=1)


@functools.cache
def _stock(model_type: str, alone: bool) -> PreTrainedModel:
    auto: Any = AutoModelForSpeechSeq2Seq if model_type == "whisper" else AutoModelForSeq2SeqLM
    auto = AutoModelForCausalLM if alone else auto
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    try:
        model: PreTrainedModel = auto.from_config(_config(model_type), attn_implementation="sdpa")
    except ValueError:  # transformers refuses
        model = auto.from_config(_config(model_type), attn_implementation="eager")
    torch.random.set_rng_state(state)
    sharpened(model)
    with torch.no_grad():  # scores that are not scaled are sharp enough, and soon too sharp for single precision
        for weight in model.parameters() if model_type in BIASED else ():
            weight.mul_(0.2 if weight.ndim == 2 else 1.0)
    return model.eval()


def stock(model_type: str, *, alone: bool = False, attends: bool = True) -> PreTrainedModel:
    """The unpatched model, or its decoder alone; a copy that may be changed.

    Skips where this transformers lets the type compute its scores by itself, unless nothing new `attends`.
    """
    if attends and model_type in BIASED and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("T5 and its relatives attended by themselves in older releases, and are refused there")
    return copy.deepcopy(_stock(model_type, alone))


def source(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
    """What the encoder is given: these tokens, or sound, which is the same whatever they are."""
    if model.config.model_type.endswith("whisper"):
        sound = torch.randn(1, 8, 2 * TRAINED, generator=torch.Generator().manual_seed(1))
        return {"input_features": sound.expand(len(ids), -1, -1)}
    return {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def answers(model: PreTrainedModel, given: dict[str, Any], ids: Tensor, **inputs: Any) -> Tensor:
    """What the decoder says of `ids`, (rows, length, vocabulary)."""
    logits: Tensor = model(**given, decoder_input_ids=ids, **inputs).logits
    return logits


@torch.no_grad()
def steps(model: PreTrainedModel, given: dict[str, Any], ids: Tensor, sizes: list[int], **inputs: Any) -> Tensor:
    """The same in consecutive calls with one cache; the mask of the decoder is cut at the end of each chunk."""
    heard = model.get_encoder()(**given)
    asked = {"attention_mask": given["attention_mask"]} if "attention_mask" in given else {}
    said, start, cache = [], 0, None
    for size in sizes:
        cut = {name: value[:, : start + size] for name, value in inputs.items()}
        output = model(
            encoder_outputs=heard,
            decoder_input_ids=ids[:, start : start + size],
            past_key_values=cache,
            use_cache=True,
            **asked,
            **cut,
        )
        cache, start = output.get("cache") or output.get("past_key_values"), start + size
        assert isinstance(cache, EncoderDecoderCache)
        said.append(output.logits)
    return torch.cat(said, dim=1)
