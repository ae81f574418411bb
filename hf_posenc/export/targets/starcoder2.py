"""Starcoder2: a GPT-2 with a rotation. The first choice for GPT-2-like decoders, since most engines run it."""

from __future__ import annotations

import transformers

from hf_posenc.export.carried import carried
from hf_posenc.export.decoder import READERS, fits_decoder, read_decoder
from hf_posenc.export.rotation import half_split, rope_parameters, whole_heads
from hf_posenc.export.route import Route, Source, Target, from_types, register_route


def build(source: Source) -> Target:
    """Return the Starcoder2 that computes what a GPT-2-like decoder with a rotation of whole heads computes."""
    decoder = read_decoder(source)
    prefix = "" if source.bare else "model."
    weights = {f"{prefix}embed_tokens.weight": decoder.embedding}
    layers = {f"{prefix}norm": decoder.norm}
    for index, block in enumerate(decoder.blocks):
        layers |= {
            f"{prefix}layers.{index}.{name}": layer
            for name, layer in {
                "input_layernorm": block.before_attention,
                "self_attn.q_proj": type(block.query)(*(half_split(source, part) for part in block.query)),
                "self_attn.k_proj": type(block.key)(*(half_split(source, part) for part in block.key)),
                "self_attn.v_proj": block.value,
                "self_attn.o_proj": block.output,
                "post_attention_layernorm": block.before_mlp,
                "mlp.c_fc": block.up,
                "mlp.c_proj": block.down,
            }.items()
        }
    for name, layer in layers.items():
        weights |= {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}
    config = transformers.Starcoder2Config(
        **carried(
            source,
            tie_word_embeddings=decoder.head is None,
            num_key_value_heads=len(decoder.blocks[0].key.bias) // source.geometry.head_dim,
            intermediate_size=len(decoder.blocks[0].up.bias),
            hidden_act=decoder.activation,
            norm_epsilon=decoder.eps,
            sliding_window=None,
            use_bias=True,
            rope_parameters=rope_parameters(source),
        )
    )
    cls = transformers.Starcoder2Model if source.bare else transformers.Starcoder2ForCausalLM
    return Target(cls=cls, config=config, weights=weights, head=decoder.head)


register_route(
    Route(
        name="starcoder2",
        writes="Starcoder2",
        rank=1,
        serves=from_types(*READERS),
        takes=whole_heads,
        fits=fits_decoder,
        build=build,
        runs="vLLM; llama.cpp with a tanh-GELU and no scaling by pair",
    )
)
