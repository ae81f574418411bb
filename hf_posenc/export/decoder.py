"""How pre-norm decoders are read: GPT-2, and the types that differ from it in names and in factors.

What differs is folded into the weights where that changes nothing: factors on scores go into the queries, what is done
to the token embedding goes into the table, which is untied from the head then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_posenc.export.blocks import Block, Decoder, Weights, cut, in_turns, own_head, times
from hf_posenc.export.route import Reason, Source


@dataclass(frozen=True, kw_only=True)
class Reader:
    """How decoders of one model type are read, and why some of them cannot be."""

    fits: Callable[[Any], Reason]
    read: Callable[[Source], Decoder]


def fits_decoder(source: Source) -> Reason:
    """Say why a source is not such a decoder."""
    config = source.config
    if getattr(config, "add_cross_attention", False):
        return "it attends to an encoder as well"
    return source.no_head_but_the_language_models() or READERS[source.model_type].fits(config)


def read_decoder(source: Source) -> Decoder:
    """Return the weights of a source of a type in `READERS`."""
    return READERS[source.model_type].read(source)


def _read_gpt2(source: Source) -> Decoder:
    """GPT-2 keeps linear layers as (in, out); GPTBigCode as (out, in), with one key head or heads in turns."""
    config, weights = source.config, Weights(source)
    transposed, width, size = source.model_type == "gpt2", config.hidden_size, source.geometry.head_dim
    heads, shared = config.num_attention_heads, getattr(config, "multi_query", False)
    unscaled = 1.0 if config.scale_attn_weights else math.sqrt(size)
    blocks = []
    for layer in range(config.num_hidden_layers):
        joint = weights.affine(f"h.{layer}.attn.c_attn", transposed=transposed)
        if not transposed and not shared:
            query, key, value = in_turns(joint, heads)
        else:
            query, key, value = cut(joint, [width, size, size] if shared else [width, width, width])
        by_layer = layer + 1 if getattr(config, "scale_attn_by_inverse_layer_idx", False) else 1
        blocks.append(
            Block(
                before_attention=weights.affine(f"h.{layer}.ln_1"),
                query=times(query, unscaled / by_layer),
                key=key,
                value=value,
                output=weights.affine(f"h.{layer}.attn.c_proj", transposed=transposed),
                before_mlp=weights.affine(f"h.{layer}.ln_2"),
                up=weights.affine(f"h.{layer}.mlp.c_fc", transposed=transposed),
                down=weights.affine(f"h.{layer}.mlp.c_proj", transposed=transposed),
            )
        )
    return Decoder(
        embedding=weights["wte.weight"],
        blocks=blocks,
        norm=weights.affine("ln_f"),
        head=own_head(source),
        activation=config.activation_function,
        eps=config.layer_norm_epsilon,
    )


def _fits_opt(config: Any) -> Reason:
    if not config.do_layer_norm_before or config._remove_final_layer_norm:
        return "its LayerNorms stand behind the layers, or the last one is missing, and those of the target do not"
    if config.word_embed_proj_dim != config.hidden_size:
        return "its token embedding is projected to another width, for which the target has no layer"
    return None


def _read_like_bart(source: Source) -> Decoder:
    """OPT and BioGPT, which name their layers alike; their LayerNorms have torch's own epsilon, always."""
    config, weights = source.config, Weights(source)
    prefix = "decoder." if source.model_type == "opt" else ""
    factor = math.sqrt(config.hidden_size) if getattr(config, "scale_embedding", False) else 1.0
    blocks = []
    for layer in range(config.num_hidden_layers):
        at = f"{prefix}layers.{layer}."
        blocks.append(
            Block(
                before_attention=weights.affine(f"{at}self_attn_layer_norm"),
                query=weights.affine(f"{at}self_attn.q_proj"),
                key=weights.affine(f"{at}self_attn.k_proj"),
                value=weights.affine(f"{at}self_attn.v_proj"),
                output=weights.affine(f"{at}self_attn.out_proj"),
                before_mlp=weights.affine(f"{at}final_layer_norm"),
                up=weights.affine(f"{at}fc1"),
                down=weights.affine(f"{at}fc2"),
            )
        )
    return Decoder(
        embedding=weights[f"{prefix}embed_tokens.weight"] * factor,
        blocks=blocks,
        norm=weights.affine(f"{prefix}final_layer_norm" if prefix else "layer_norm"),
        head=own_head(source, scaled=factor != 1.0),
        activation=getattr(config, "activation_function", None) or config.hidden_act,
        eps=1e-5,
    )


def _fits_bloom(config: Any) -> Reason:
    if config.apply_residual_connection_post_layernorm:
        return "its residuals start behind the LayerNorms, and those of the target before them"
    return None


def _read_bloom(source: Source) -> Decoder:
    """BLOOM, whose LayerNorm over the token embedding is folded into it; its GELU has a constant of eight digits."""
    config, weights = source.config, Weights(source)
    scale = weights.affine("word_embeddings_layernorm")
    blocks = []
    for layer in range(config.num_hidden_layers):
        at = f"h.{layer}."
        query, key, value = in_turns(
            weights.affine(f"{at}self_attention.query_key_value"), source.geometry.num_attention_heads
        )
        blocks.append(
            Block(
                before_attention=weights.affine(f"{at}input_layernorm"),
                query=query,
                key=key,
                value=value,
                output=weights.affine(f"{at}self_attention.dense"),
                before_mlp=weights.affine(f"{at}post_attention_layernorm"),
                up=weights.affine(f"{at}mlp.dense_h_to_4h"),
                down=weights.affine(f"{at}mlp.dense_4h_to_h"),
            )
        )
    table, eps = weights["word_embeddings.weight"], config.layer_norm_epsilon
    return Decoder(
        embedding=nn.functional.layer_norm(table, table.shape[1:], *scale, eps=eps),
        blocks=blocks,
        norm=weights.affine("ln_f"),
        head=own_head(source, scaled=True),
        activation="gelu_pytorch_tanh",
        eps=eps,
    )


def _fits_mpt(config: Any) -> Reason:
    if config.attn_config.clip_qkv:
        return "it clips queries, keys and values, and the target does not"
    return None


def _read_mpt(source: Source) -> Decoder:
    config, weights = source.config, Weights(source)
    size, asked = source.geometry.head_dim, config.attn_config.softmax_scale
    factor = asked * math.sqrt(size) if asked else 1.0
    blocks = []
    for layer in range(config.num_hidden_layers):
        at = f"blocks.{layer}."
        query, key, value = cut(weights.affine(f"{at}attn.Wqkv"), [config.hidden_size] * 3)
        blocks.append(
            Block(
                before_attention=weights.affine(f"{at}norm_1"),
                query=times(query, factor),
                key=key,
                value=value,
                output=weights.affine(f"{at}attn.out_proj"),
                before_mlp=weights.affine(f"{at}norm_2"),
                up=weights.affine(f"{at}ffn.up_proj"),
                down=weights.affine(f"{at}ffn.down_proj"),
            )
        )
    return Decoder(
        embedding=weights["wte.weight"],
        blocks=blocks,
        norm=weights.affine("norm_f"),
        head=own_head(source),
        activation="gelu",
        eps=config.layer_norm_epsilon,
    )


def _fits_gpt_neo(config: Any) -> Reason:
    if set(config.attention_layers) != {"global"}:
        return "some of its layers see the nearest keys only, in turns with others, which the target cannot"
    return None


def _read_gpt_neo(source: Source) -> Decoder:
    """GPT-Neo, whose scores are not scaled: its queries are made larger by what the target divides by."""
    config, weights = source.config, Weights(source)
    blocks = []
    for layer in range(config.num_hidden_layers):
        at = f"h.{layer}."
        query = weights.affine(f"{at}attn.attention.q_proj")
        blocks.append(
            Block(
                before_attention=weights.affine(f"{at}ln_1"),
                query=times(query, math.sqrt(source.geometry.head_dim)),
                key=weights.affine(f"{at}attn.attention.k_proj"),
                value=weights.affine(f"{at}attn.attention.v_proj"),
                output=weights.affine(f"{at}attn.attention.out_proj"),
                before_mlp=weights.affine(f"{at}ln_2"),
                up=weights.affine(f"{at}mlp.c_fc"),
                down=weights.affine(f"{at}mlp.c_proj"),
            )
        )
    return Decoder(
        embedding=weights["wte.weight"],
        blocks=blocks,
        norm=weights.affine("ln_f"),
        head=own_head(source),
        activation=config.activation_function,
        eps=config.layer_norm_epsilon,
    )


def _always(config: Any) -> Reason:
    return None


READERS = {
    "biogpt": Reader(fits=_always, read=_read_like_bart),
    "bloom": Reader(fits=_fits_bloom, read=_read_bloom),
    "gpt2": Reader(fits=_always, read=_read_gpt2),
    "gpt_neo": Reader(fits=_fits_gpt_neo, read=_read_gpt_neo),
    "gpt_bigcode": Reader(fits=_always, read=_read_gpt2),
    "mpt": Reader(fits=_fits_mpt, read=_read_mpt),
    "opt": Reader(fits=_fits_opt, read=_read_like_bart),
}
"""Model type -> how it is read."""
