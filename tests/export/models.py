"""What is exported to what: tiny models, encodings and routes, and refused routes with a word of the reason."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

import hf_posenc as posenc
from hf_posenc.surgery import record_of
from tests.families.models import backends, fresh
from tests.models import SPECS, SUBJECTS, TRAINED, VARIANTS, Subject

_ENCODING = posenc.encoding
_GPT2, _BERT, _LLAMA = (SUBJECTS[name].fields for name in ("gpt2", "bert", "llama"))
_NEO = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": TRAINED}
_NEO |= {"window_size": 16, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_BLOOM = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": TRAINED, "pad_token_id": 0}
_MPT = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": TRAINED, "pad_token_id": 0}
MODELS = {
    **SUBJECTS,
    **VARIANTS,
    "opt": Subject("OPTForCausalLM", "OPTConfig", {**SUBJECTS["opt"].fields, "word_embed_proj_dim": 32}),
    "opt-narrow": SUBJECTS["opt"],
    "opt-bare-norms": Subject(
        "OPTForCausalLM",
        "OPTConfig",
        {
            **SUBJECTS["opt"].fields,
            "word_embed_proj_dim": 32,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
        },
    ),
    "biogpt": Subject("BioGptForCausalLM", "BioGptConfig", {**_BERT, "scale_embedding": True}),
    "bigcode": Subject("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT2),
    "bigcode-mha": Subject("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**_GPT2, "multi_query": False}),
    "bloom": Subject("BloomForCausalLM", "BloomConfig", _BLOOM),
    "gpt_neo-global": Subject("GPTNeoForCausalLM", "GPTNeoConfig", {**_NEO, "attention_types": [[["global"], 2]]}),
    "gpt_neo-local": Subject(
        "GPTNeoForCausalLM", "GPTNeoConfig", {**_NEO, "attention_types": [[["global", "local"], 1]]}
    ),
    "mpt": Subject("MptForCausalLM", "MptConfig", _MPT),
    "gpt2-untied": Subject("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "tie_word_embeddings": False}),
    "mistral": Subject("MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": 16}),
    "mistral-unbounded": Subject("MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": None}),
    "qwen2": Subject("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    "llama-tied": Subject("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}),
}
_ROPE = _ENCODING("rope", theta=500.0)
ENCODINGS = {
    **SPECS,
    "drope": _ENCODING("drope"),
    "lerope": _ENCODING("lerope"),
    "lerope-per-layer": _ENCODING("lerope", per_layer=True),
    "llama4": _ENCODING("rope", theta=500.0, temperature={"kind": "llama4", "length": 16}),
    "ministral3": _ENCODING("rope", theta=500.0, temperature={"kind": "ministral3", "length": 16}),
    "mixed": _ENCODING("layered", pattern=[_ROPE, _ENCODING("nope")]),
    "mixed-biases": _ENCODING("layered", pattern=[_ROPE, _ENCODING("alibi")]),
    "rope-interleaved": _ENCODING("rope", theta=500.0, pairing="interleaved", partial_rotary_factor=0.5),
    "rope-linear": _ENCODING("rope", scaling={"rope_type": "linear", "factor": 4.0}),
    "rope-proportional": _ENCODING("rope", partial_rotary_factor=0.5, scaling={"rope_type": "proportional"}),
    "rope-resonant": _ENCODING("rope", theta=500.0, scaling={"rope_type": "ntk", "factor": 2.0, "resonance": True}),
    "t5": _ENCODING("t5"),
    "kerple": _ENCODING("kerple", per_layer=False),
    "t5-per-layer": _ENCODING("t5", per_layer=True),
    "t5-small": _ENCODING("t5", num_buckets=16),
}
ROUTED = [
    *(("gpt2", spec, "starcoder2") for spec in ("rope", "rope-linear", "rope-yarn", "rope-resonant", "lerope")),
    *(("gpt2", spec, "starcoder2") for spec in ("rope-proportional", "nope")),
    *((f"gpt2{kind}", "rope", "starcoder2") for kind in ("-base", "-inverse-layer", "-unscaled", "-untied", "-upcast")),
    *((model, "rope", "starcoder2") for model in ("opt", "opt-bare-norms", "biogpt", "bigcode", "bigcode-mha")),
    *((model, "rope", target) for model in ("bloom", "gpt_neo-global", "mpt") for target in ("starcoder2", "gpt_neox")),
    *(("gpt2", spec, "gpt_neox") for spec in ("rope", "rope-partial", "rope-interleaved", "rope-yarn", "nope")),
    *((model, "rope", "gpt_neox") for model in ("gpt2-base", "opt", "biogpt", "bigcode-mha")),
    *((model, "rope", "jina_embeddings_v3") for model in ("bert", "bert-base", "roberta", "roberta-base")),
    *(("bert", spec, "jina_embeddings_v3") for spec in ("rope-linear", "rope-resonant", "lerope", "nope")),
    *((model, "rope", "roformer") for model in ("bert", "roberta")),
    *(("bert", spec, "roformer") for spec in ("rope-interleaved", "rope-yarn", "lerope", "nope")),
    *((model, "t5", "mpnet") for model in ("bert", "bert-base", "roberta")),
    *((model, "learned-tile", "self_table") for model in ("gpt2", "opt", "opt-narrow", "bert", "roberta", "biogpt")),
    *(("gpt2", spec, "self_table") for spec in ("learned", "learned-interpolate", "nope", "sinusoidal", "drope")),
    *((model, "nope", "self_table") for model in ("gpt2-base", "gpt2-classifier", "bert", "bert-classifier")),
    *((model, "nope", "self_rope") for model in ("llama", "llama-base", "gpt_neox", "mistral", "qwen2")),
    *(("llama", spec, "self_rope") for spec in ("rope-yarn", "rope-resonant", "lerope", "drope")),
    *((model, "nope", "smollm3") for model in ("llama", "llama-tied", "llama-wide-head", "qwen2")),
    *((model, "mixed", "smollm3") for model in ("llama", "mistral-unbounded")),
    *((model, "rope-partial", "phi3") for model in ("llama", "mistral", "llama-base")),
    *(("llama", spec, "phi3") for spec in ("rope-interleaved", "rope-yarn")),
    *((model, "ministral3", "ministral3") for model in ("llama", "mistral")),
]
"""Model, encoding and a route that is exact."""
REFUSED = [
    ("gpt2", "alibi", "starcoder2", "no rotation"),
    ("gpt2", "t5", "gpt_neox", "no rotation"),
    ("gpt2", "rope-partial", "starcoder2", "whole heads"),
    ("gpt2", "rope-dynamic", "gpt_neox", "length of the text"),
    ("gpt2", "lerope-per-layer", "starcoder2", "layer to layer"),
    ("gpt2", "rope", "self_table", "inside attention"),
    ("gpt2-classifier", "rope", "starcoder2", "head"),
    ("opt-post-norm", "rope", "starcoder2", "LayerNorms"),
    ("opt-narrow", "rope", "starcoder2", "another width"),
    ("gpt_neo-local", "rope", "starcoder2", "nearest keys"),
    ("bigcode", "rope", "gpt_neox", "one key head"),
    ("bert", "rope-partial", "jina_embeddings_v3", "whole heads"),
    ("bert-decoder", "rope", "jina_embeddings_v3", "decoder"),
    ("bert-base", "rope", "roformer", "pooler"),
    ("bert", "alibi", "mpnet", "T5"),
    ("bert", "t5-small", "mpnet", "buckets"),
    ("roberta-decoder", "learned-tile", "self_table", "generate"),
    ("llama", "rope-partial", "self_rope", "whole heads"),
    ("gpt_neox", "rope-interleaved", "self_rope", "pairs"),
    ("llama", "rope-dynamic", "self_rope", "length of the text"),
    ("llama", "rope", "smollm3", "without positions"),
    ("llama", "mixed-biases", "smollm3", "differ in more"),
    ("mistral", "nope", "smollm3", "window"),
    ("llama", "nope", "phi3", "turns no part"),
    ("llama", "llama4", "ministral3", "no stock model"),
]
"""Model, encoding, a route from that model's type that would not be exact, and a word of the reason."""


def prepared(model: str, spec: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A patched model whose trained numbers, if it has some, say something."""
    if model.startswith(("bloom", "gpt_neo-", "mpt")):
        # patched in float32: these take their softmax in it, and are no closer to their records in float64
        own = posenc.patch(MODELS[model].fresh(attn_implementation="eager"), ENCODINGS[spec], verify=False)
        return stirred(own.to(dtype))
    return stirred(posenc.patch(MODELS[model].fresh().to(dtype), ENCODINGS[spec], verify=False))


def stirred(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, with what is trained in its encoding moved off its start."""
    record: Any = record_of(model)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for part in record.plan.parts.values():
            encoding = getattr(part.body_of(model), "posenc", None)
            for weight in encoding.parameters() if encoding is not None else ():
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator).abs().to(weight.dtype))
    return model


def of_type(model_type: str, spec: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A patched model of any registered type, on a backend that it has."""
    model = by_loops(fresh(model_type, backends(model_type)[0]).to(dtype))
    return stirred(posenc.patch(model, ENCODINGS[spec], verify=False))


def by_loops(model: Any) -> Any:
    """The same model, its experts one after the other if it has some: grouped products take no float64."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model
