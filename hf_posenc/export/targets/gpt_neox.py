"""GPT-NeoX, sequential: a GPT-2 with a rotation of whole heads or a part of them."""

from __future__ import annotations

import torch
import transformers

from hf_posenc.export.blocks import Affine, Block
from hf_posenc.export.carried import carried
from hf_posenc.export.decoder import READERS, fits_decoder, read_decoder
from hf_posenc.export.rotation import half_split, rope_parameters, takes_rotation
from hf_posenc.export.route import Reason, Route, Source, Target, from_types, register_route


def fits(source: Source) -> Reason:
    """Say why a source does not go: GPT-NeoX has as many key heads as query heads."""
    if getattr(source.config, "multi_query", False):
        return "its query heads share one key head, and those of the target have one each"
    return fits_decoder(source)


def _joint(source: Source, block: Block) -> Affine:
    """Return query, key and value of every head in turns."""
    parts = [
        Affine(*(half_split(source, part) for part in block.query)),
        Affine(*(half_split(source, part) for part in block.key)),
        block.value,
    ]
    heads = source.geometry.num_attention_heads
    weight = torch.stack([part.weight.view(heads, -1, part.weight.shape[1]) for part in parts], dim=1)
    bias = torch.stack([part.bias.view(heads, -1) for part in parts], dim=1)
    return Affine(weight.flatten(0, 2), bias.flatten())


def build(source: Source) -> Target:
    """Return the GPT-NeoX that computes what a GPT-2-like decoder with a rotation computes.

    Its head is always untied and its legacy keys are written, since engines look for both.
    """
    decoder = read_decoder(source)
    prefix = "" if source.bare else "gpt_neox."
    weights = {f"{prefix}embed_in.weight": decoder.embedding}
    layers = {f"{prefix}final_layer_norm": decoder.norm}
    for index, block in enumerate(decoder.blocks):
        layers |= {
            f"{prefix}layers.{index}.{name}": layer
            for name, layer in {
                "input_layernorm": block.before_attention,
                "attention.query_key_value": _joint(source, block),
                "attention.dense": block.output,
                "post_attention_layernorm": block.before_mlp,
                "mlp.dense_h_to_4h": block.up,
                "mlp.dense_4h_to_h": block.down,
            }.items()
        }
    for name, layer in layers.items():
        weights |= {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}
    rope = rope_parameters(source)
    config = transformers.GPTNeoXConfig(
        **carried(
            source,
            tie_word_embeddings=False,
            intermediate_size=len(decoder.blocks[0].up.bias),
            hidden_act=decoder.activation,
            layer_norm_eps=decoder.eps,
            use_parallel_residual=False,
            attention_bias=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            rope_parameters=rope,
        )
    )
    config.rotary_pct, config.rotary_emb_base = rope["partial_rotary_factor"], rope["rope_theta"]
    if source.bare:
        return Target(cls=transformers.GPTNeoXModel, config=config, weights=weights)
    head = decoder.embedding if decoder.head is None else decoder.head
    return Target(cls=transformers.GPTNeoXForCausalLM, config=config, weights=weights, head=head)


register_route(
    Route(
        name="gpt_neox",
        writes="GPTNeoX, sequential",
        rank=2,
        serves=from_types(*READERS),
        takes=takes_rotation,
        fits=fits,
        build=build,
        runs="vLLM; CTranslate2; llama.cpp with a GELU",
    )
)
