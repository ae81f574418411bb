"""Pre-norm decoders with a GELU-like feed-forward layer, read into one form: GPT-2 and all that is built as it is.

What differs between them is folded into the weights where that changes nothing: factors on scores go into the queries,
factors on embeddings into the table, which is untied from the head then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_posenc.export.route import Reason, Source


class Affine(NamedTuple):
    """A linear layer, (out, in) and (out,), or a LayerNorm, (width,) twice."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, kw_only=True)
class Block:
    """One layer: x + output(attention(norm(x))), then x + down(act(up(norm(x)))); heads stand one after the other."""

    before_attention: Affine
    query: Affine
    key: Affine
    value: Affine
    output: Affine
    before_mlp: Affine
    up: Affine
    down: Affine


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The weights of a whole decoder.

    Attributes:
        embedding: (vocab_size, hidden_size).
        blocks: the layers, in order.
        norm: the last LayerNorm.
        head: (vocab_size, hidden_size), or None where it is the embedding or there is none.
        activation: of the feed-forward layers, by transformers' name.
        eps: of every LayerNorm.
    """

    embedding: Tensor
    blocks: list[Block]
    norm: Affine
    head: Tensor | None
    activation: str
    eps: float


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


class _Weights:
    """The weights of a body; linear layers and norms are looked up by the name of their module."""

    def __init__(self, source: Source) -> None:
        self.named = source.weights()

    def __getitem__(self, name: str) -> Tensor:
        return self.named[name]

    def affine(self, name: str, *, transposed: bool = False) -> Affine:
        """Return a layer; a missing bias is zero, a missing scale of a norm one."""
        weight, bias = self.named.get(f"{name}.weight"), self.named.get(f"{name}.bias")
        if weight is None:
            width, like = self.named[self.embedding].shape[1], self.named[self.embedding]
            return Affine(like.new_ones(width), like.new_zeros(width))
        weight = weight.T if transposed else weight
        return Affine(weight, weight.new_zeros(weight.shape[0]) if bias is None else bias)

    @property
    def embedding(self) -> str:
        """The name of the token embedding."""
        return next(name for name in self.named if name.endswith(("wte.weight", "embed_tokens.weight")))


def _head(source: Source, *, scaled: bool = False) -> Tensor | None:
    """Return the head where it has weights of its own, or has to have because the embedding was scaled."""
    head: Any = source.model.get_output_embeddings()
    return None if head is None or (source.tied and not scaled) else head.weight.detach()


def _cut(joint: Affine, sizes: list[int]) -> list[Affine]:
    """Cut a joint projection into consecutive ones."""
    return [Affine(*pair) for pair in zip(joint.weight.split(sizes), joint.bias.split(sizes), strict=True)]


def _times(layer: Affine, factor: float) -> Affine:
    return layer if factor == 1.0 else Affine(layer.weight * factor, layer.bias * factor)


def _read_gpt2(source: Source) -> Decoder:
    """GPT-2 keeps linear layers as (in, out); GPTBigCode as (out, in), with one key head or heads in turns."""
    config, weights = source.config, _Weights(source)
    transposed, width, size = source.model_type == "gpt2", config.hidden_size, source.geometry.head_dim
    heads, shared = config.num_attention_heads, getattr(config, "multi_query", False)
    unscaled = 1.0 if config.scale_attn_weights else math.sqrt(size)
    blocks = []
    for layer in range(config.num_hidden_layers):
        joint = weights.affine(f"h.{layer}.attn.c_attn", transposed=transposed)
        if not transposed and not shared:
            order = torch.arange(3 * width).view(heads, 3, size).transpose(0, 1).flatten()
            joint = Affine(joint.weight[order], joint.bias[order])
        query, key, value = _cut(joint, [width, size, size] if shared else [width, width, width])
        by_layer = layer + 1 if getattr(config, "scale_attn_by_inverse_layer_idx", False) else 1
        blocks.append(
            Block(
                before_attention=weights.affine(f"h.{layer}.ln_1"),
                query=_times(query, unscaled / by_layer),
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
        head=_head(source),
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
    config, weights = source.config, _Weights(source)
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
        head=_head(source, scaled=factor != 1.0),
        activation=getattr(config, "activation_function", None) or config.hidden_act,
        eps=1e-5,
    )


def _always(config: Any) -> Reason:
    return None


READERS = {
    "biogpt": Reader(fits=_always, read=_read_like_bart),
    "gpt2": Reader(fits=_always, read=_read_gpt2),
    "gpt_bigcode": Reader(fits=_always, read=_read_gpt2),
    "opt": Reader(fits=_fits_opt, read=_read_like_bart),
}
"""Model type -> how it is read."""
