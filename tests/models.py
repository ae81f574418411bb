"""Tiny random models of every family, and the specs of every encoding: the axes of the contract tests."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import hf_posenc as posenc

VOCABULARY = 61
TRAINED = 64
"""Length in tokens that every tiny model says it was trained for."""
_IDS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": TRAINED,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    **_IDS,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": TRAINED,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **_IDS,
}
_LLAMA = {**_SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
_OPT = {**_SMALL, "ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 16}
_NEOX = {**_SMALL, "intermediate_size": 48, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_NEOX["rope_parameters"]["partial_rotary_factor"] = 0.5
_BERT = {**_SMALL, "intermediate_size": 48}
_ROBERTA = {**_BERT, "pad_token_id": 1, "bos_token_id": 0, "max_position_embeddings": TRAINED + 2}


@dataclass(frozen=True)
class Subject:
    """One kind of tiny model."""

    model: str
    config: str
    fields: dict[str, Any] = field(hash=False)
    causal: bool = True

    def fresh(self, **fields: Any) -> PreTrainedModel:
        """A model of its own, in eval mode; the same weights every time for the same fields."""
        config = getattr(transformers, self.config)(**{**self.fields, **fields})
        config._attn_implementation = fields.get("attn_implementation", "sdpa")
        state = torch.random.get_rng_state()
        torch.manual_seed(7)
        model: PreTrainedModel = getattr(transformers, self.model)(config)
        torch.random.set_rng_state(state)
        return sharpened(model).eval()


SUBJECTS = {
    "gpt2": Subject("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "opt": Subject("OPTForCausalLM", "OPTConfig", _OPT),
    "gpt_neox": Subject("GPTNeoXForCausalLM", "GPTNeoXConfig", _NEOX),
    "llama": Subject("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "bert": Subject("BertForMaskedLM", "BertConfig", _BERT, causal=False),
    "roberta": Subject("RobertaForMaskedLM", "RobertaConfig", _ROBERTA, causal=False),
    "bert-decoder": Subject("BertLMHeadModel", "BertConfig", {**_BERT, "is_decoder": True}),
    "roberta-decoder": Subject("RobertaForCausalLM", "RobertaConfig", {**_ROBERTA, "is_decoder": True}),
}
VARIANTS = {
    "gpt2-base": Subject("GPT2Model", "GPT2Config", _GPT2),
    "gpt2-classifier": Subject("GPT2ForSequenceClassification", "GPT2Config", _GPT2),
    "gpt2-inverse-layer": Subject("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-upcast": Subject("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "reorder_and_upcast_attn": True}),
    "gpt2-unscaled": Subject("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "scale_attn_weights": False}),
    "llama-wide-head": Subject("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "head_dim": 16}),
    "llama-base": Subject("LlamaModel", "LlamaConfig", _LLAMA),
    "opt-post-norm": Subject("OPTForCausalLM", "OPTConfig", {**_OPT, "do_layer_norm_before": False}),
    "gpt_neox-sequential": Subject("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_NEOX, "use_parallel_residual": False}),
    "bert-base": Subject("BertModel", "BertConfig", _BERT, causal=False),
    "bert-classifier": Subject("BertForSequenceClassification", "BertConfig", _BERT, causal=False),
    "roberta-base": Subject("RobertaModel", "RobertaConfig", _ROBERTA, causal=False),
}
CAUSAL = [name for name, subject in SUBJECTS.items() if subject.causal]

_ORIGINAL = {"original_max_position_embeddings": 32}
SPECS: dict[str, posenc.EncodingConfig] = {
    "alibi": posenc.Alibi(),
    "learned": posenc.Learned(),
    "learned-tile": posenc.Learned(max_position_embeddings=4 * TRAINED, extension="tile"),
    "learned-interpolate": posenc.Learned(max_position_embeddings=4 * TRAINED, extension="interpolate"),
    "nope": posenc.NoPE(allow_bidirectional=True),
    "rope": posenc.RoPE(theta=500.0),
    "rope-partial": posenc.RoPE(theta=500.0, partial_rotary_factor=0.5),
    "rope-yarn": posenc.RoPE(theta=500.0, scaling={"rope_type": "yarn", "factor": 4.0, **_ORIGINAL}),
    "rope-dynamic": posenc.RoPE(theta=500.0, scaling={"rope_type": "dynamic", "factor": 2.0, **_ORIGINAL}),
    "sinusoidal": posenc.Sinusoidal(),
}
ENDLESS = [name for name in SPECS if name != "learned"]
"""Specs that reach past the trained length."""
CORE = ["alibi", "learned-tile", "nope", "rope", "rope-dynamic", "sinusoidal"]
"""One spec for every way of acting at all; the others differ from these in numbers only."""
ATTENDING = ["alibi", "rope", "rope-dynamic"]
"""One spec for every way of acting inside attention: by bias, by rotated keys in the cache, by unrotated ones."""


def sharpened(model: PreTrainedModel) -> PreTrainedModel:
    """Scale weights and fill biases, so that attention is far from uniform and no two tokens look alike."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(5.0 if "wpe" not in name and "position" not in name else 30.0)
            elif name.endswith("bias"):
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return model


@functools.cache
def _patched(subject: str, spec: str, backend: str) -> PreTrainedModel:
    model = {**SUBJECTS, **VARIANTS}[subject].fresh(attn_implementation=backend)
    torch.manual_seed(5)  # for tables that start from random rows
    return posenc.patch(model, SPECS[spec], verify=False)


def patched(subject: str, spec: str, backend: str = "sdpa", *, own: bool = False) -> PreTrainedModel:
    """The subject with that encoding, shared between tests; `own=True` gives a copy that may be changed."""
    model = _patched(subject, spec, backend)
    return copy.deepcopy(model) if own else model


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids, (rows, length), none of which means padding to any of the models."""
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding_of(model: PreTrainedModel) -> int:
    """The id that fills up rows of this model."""
    return int(model.config.pad_token_id)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    """What the model says, (rows, length, width)."""
    output = model(input_ids=ids, **inputs)
    return output.logits if "logits" in output else output.last_hidden_state


def largest(difference: Tensor) -> float:
    """The largest magnitude, NaN where there is one."""
    return float(difference.abs().max())


def cells(subjects: list[str], specs: list[str]) -> list[Any]:
    """Parameters for `subject, spec`: every pair, named."""
    return [pytest.param(subject, spec, id=f"{subject}-{spec}") for subject in subjects for spec in specs]


def reach(spec: str, length: int) -> int:
    """The length in tokens, at most that the encoding can express."""
    return min(length, TRAINED) if spec == "learned" else length


def cache_of(output: Any) -> Any:
    """The cache in a model's output, whatever this version of transformers calls it."""
    return next(output[name] for name in ("cache", "past_key_values") if name in output)


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Equal up to rounding, which is measured against the largest magnitude; NaN equals nothing."""
    assert found.shape == expected.shape
    allowed = tolerance * max(1.0, largest(expected))
    assert largest(found - expected) <= allowed


def in_steps(model: PreTrainedModel, ids: Tensor, sizes: list[int], cache: Any, **inputs: Any) -> Tensor:
    """The logits of consecutive calls over chunks of these sizes with one cache, (rows, sum(sizes), width).

    A 2-D mask is cut at the end of each chunk, `position_ids` at both ends.
    """
    said, start = [], 0
    for size in sizes:
        end = start + size
        cut = {
            name: value[:, :end] if name == "attention_mask" else value[:, start:end] for name, value in inputs.items()
        }
        said.append(logits(model, ids[:, start:end], past_key_values=cache, use_cache=True, **cut))
        start = end
    return torch.cat(said, dim=1)
