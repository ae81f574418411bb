"""SmolLM3: a Llama in which layers may be without positions, some or all of them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from hf_posenc.config import EncodingConfig
from hf_posenc.encodings.layered import Layered
from hf_posenc.export.gated import TYPES, fits_gated, gated_fields, untied_head
from hf_posenc.export.rotation import no_rotation, rope_parameters, silent, whole_heads
from hf_posenc.export.route import Reason, Route, Source, Target, from_types, register_route, within


def takes(config: EncodingConfig) -> Reason:
    """Say why an encoding is not, in every layer, nothing or one and the same rotation."""
    if silent(config):
        return None
    if not isinstance(config, Layered):
        return "it is for layers without positions; a rotation in every layer needs no other architecture"
    turning = [inner for inner in config.inner() if not silent(inner)]
    if any(inner != turning[0] for inner in turning):
        return "its layers differ in more than whether they have positions"
    return whole_heads(turning[0]) if turning else None


def fits(source: Source) -> Reason:
    """Say why a source does not go."""
    return fits_gated(source, window=False, bias=True)


def build(source: Source) -> Target:
    """Return the SmolLM3 that computes what a Llama, Mistral or Qwen2 without positions in some layers computes."""
    config, layers = source.config, source.config.num_hidden_layers
    turns = [0] * layers
    rope = no_rotation(source.geometry.max_position_embeddings)
    if isinstance(source.encoding, Layered):
        inner = source.encoding.inner()
        each = [inner[layer % len(inner)] for layer in range(layers)]
        turns = [int(not silent(one)) for one in each]
        if any(turns):
            first = turns.index(1)
            module: Any = source.module
            rope = rope_parameters(within(source, each[first], module.of(first)))
    weights = source.weights()
    attention_bias = any(name.endswith("self_attn.q_proj.bias") for name in weights)
    for layer in range(layers if attention_bias else 0):
        bias = f"layers.{layer}.self_attn.o_proj.bias"
        if bias not in weights:  # Qwen2 has one on the other three
            weights[bias] = torch.zeros_like(weights["norm.weight"])
    target = transformers.SmolLM3Config(
        **gated_fields(
            source,
            attention_bias=attention_bias,
            mlp_bias=getattr(config, "mlp_bias", False),
            no_rope_layers=turns,
            use_sliding_window=False,
            rope_parameters=rope,
        )
    )
    prefix = "" if source.bare else "model."
    return Target(
        cls=transformers.SmolLM3Model if source.bare else transformers.SmolLM3ForCausalLM,
        config=target,
        weights={prefix + name: weight for name, weight in weights.items()},
        head=untied_head(source),
    )


register_route(
    Route(
        name="smollm3",
        writes="SmolLM3, layers without rotation",
        rank=1,
        serves=from_types(*TYPES),
        takes=takes,
        fits=fits,
        build=build,
        runs="transformers only: llama.cpp takes every fourth layer for bare, whatever the config says",
    )
)
