"""Phi-3: a Llama that rotates a part of every head."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

from hf_posenc.config import EncodingConfig
from hf_posenc.export.gated import fits_gated, gated_fields, untied_head
from hf_posenc.export.rotation import half_split, rope_parameters, silent, takes_rotation
from hf_posenc.export.route import Reason, Route, Source, Target, from_types, register_route


def takes(config: EncodingConfig) -> Reason:
    """Say why an encoding is no static rotation."""
    return "a rotation by nothing turns no part of a head" if silent(config) else takes_rotation(config)


def fits(source: Source) -> Reason:
    """Say why a source does not go."""
    config = source.config
    if source.geometry.head_dim * config.num_attention_heads != config.hidden_size:
        return "its heads are not as wide as the hidden size over their number, as those of the target are"
    return fits_gated(source, window=True, bias=False)


def build(source: Source) -> Target:
    """Return the Phi-3 that computes what a Llama or Mistral with a rotation of a part of every head computes."""
    own, weights = source.weights(), {}
    prefix = "" if source.bare else "model."
    joined: dict[str, list[Tensor]] = {}
    for name, weight in own.items():
        layer, _, leaf = name.rpartition(".self_attn." if ".self_attn." in name else ".mlp.")
        if leaf in ("q_proj.weight", "k_proj.weight"):
            weight = half_split(source, weight)
        if leaf in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
            joined.setdefault(f"{prefix}{layer}.self_attn.qkv_proj.weight", []).append(weight)
        elif leaf in ("gate_proj.weight", "up_proj.weight"):
            joined.setdefault(f"{prefix}{layer}.mlp.gate_up_proj.weight", []).append(weight)
        else:
            weights[prefix + name] = weight
    weights |= {name: torch.cat(parts) for name, parts in joined.items()}
    config = transformers.Phi3Config(
        **gated_fields(
            source,
            original_max_position_embeddings=source.geometry.max_position_embeddings,
            sliding_window=getattr(source.config, "sliding_window", None),
            rope_parameters=rope_parameters(source, container=True),
        )
    )
    cls = transformers.Phi3Model if source.bare else transformers.Phi3ForCausalLM
    return Target(cls=cls, config=config, weights=weights, head=untied_head(source))


register_route(
    Route(
        name="phi3",
        writes="Phi3, a part of every head",
        rank=1,
        serves=from_types("llama", "mistral"),
        takes=takes,
        fits=fits,
        build=build,
        runs="llama.cpp; vLLM",
    )
)
