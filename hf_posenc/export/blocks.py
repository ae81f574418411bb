"""The one form that pre-norm decoders are read into, and what reading takes.

A GELU-like feed-forward layer, a LayerNorm before every part: GPT-2 and all that is built as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_posenc.export.route import Source


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


class Weights:
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


def own_head(source: Source, *, scaled: bool = False) -> Tensor | None:
    """Return the head where it has weights of its own, or has to have because the embedding was scaled."""
    head: Any = source.model.get_output_embeddings()
    return None if head is None or (source.tied and not scaled) else head.weight.detach()


def cut(joint: Affine, sizes: list[int]) -> list[Affine]:
    """Cut a joint projection into consecutive ones."""
    return [Affine(*pair) for pair in zip(joint.weight.split(sizes), joint.bias.split(sizes), strict=True)]


def times(layer: Affine, factor: float) -> Affine:
    """Return a layer whose output is larger by a factor."""
    return layer if factor == 1.0 else Affine(layer.weight * factor, layer.bias * factor)


def in_turns(joint: Affine, heads: int) -> list[Affine]:
    """Cut a projection that has query, key and value of every head in turns, (heads * 3 * head_dim, ...)."""
    size = len(joint.bias) // heads // 3
    order = torch.arange(len(joint.bias)).view(heads, 3, size).transpose(0, 1).flatten()
    return cut(Affine(joint.weight[order], joint.bias[order]), [heads * size] * 3)
