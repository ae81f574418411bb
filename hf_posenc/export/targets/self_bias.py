"""The same T5, with a bucket of its own for every distance: any bias of the distance alone, up to a last distance.

T5 gives every distance below half of a side's buckets a bucket of its own. With 4N buckets that is every distance below
N in an encoder, where half of them are for keys ahead, and below 2N in a decoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.config import Encoding, EncodingConfig, Layers
from hf_posenc.encodings.stacks import Stacks
from hf_posenc.export.rotation import silent
from hf_posenc.export.route import Reason, Route, Source, Target, from_types, register_route, stock_config

STACKS = ("encoder", "decoder")
_BASE = Encoding.distance_bias


def takes(config: EncodingConfig) -> Reason:
    """Say why an encoding is no bias of the distance alone, in both stacks."""
    if isinstance(config, Stacks) and (config.encoder is None or config.decoder is None):
        return "one stack keeps its own buckets, and a stock model has as many in both"
    each = config.for_stacks(STACKS).values() if isinstance(config, Stacks) else [config]
    for one in each:
        if not silent(one) and getattr(one.module, "distance_bias", _BASE) is _BASE:
            return f"{one.name} is no bias of the distance alone, which is all that buckets can hold"
    return None


def fits(source: Source) -> Reason:
    """Say why a source does not go."""
    for name in STACKS:
        if name not in source.stacks:
            return f"it has no {name}"
        stack = source.stacks[name]
        if isinstance(stack.module, Layers) and source.model_type != "umt5":
            return f"the layers of its {name} differ, and those of the target share one table"
        if any(row is None for row in rows(stack, torch.zeros(1))):
            return f"the bias of its {name} is one of the key's place, not of the distance"
    return None


def rows(stack: Source, distance: Tensor) -> list[Tensor | None]:
    """Return the bias at these distances, (n,) -> (n, heads), for every layer with its own; None for no such bias."""
    module: Any = stack.module
    each: list[Any] = list(module.layers) if isinstance(module, Layers) else [module]
    if silent(stack.encoding):
        return [torch.zeros(len(distance), stack.geometry.num_attention_heads) for _ in each]
    found = [one.distance_bias(distance) for one in each]
    return [None if bias is None else bias.T for bias in found]


@torch.no_grad()
def tables(stack: Source, end: int) -> list[Tensor]:
    """Return the tables of 4 * `end` buckets, (4 * end, heads), of a stack: one, or one a layer."""
    behind = torch.arange(end if not stack.geometry.causal else 2 * end, dtype=torch.float64)
    found = []
    for near, ahead in zip(rows(stack, behind), rows(stack, -behind), strict=True):
        if near is None or ahead is None:
            continue
        table = near.new_zeros(4 * end, near.shape[1])
        table[: len(near)] = near
        if not stack.geometry.causal:
            table[2 * end : 3 * end] = ahead
        found.append(table)
    return found


def build(source: Source) -> Target:
    """Return the stock model with a bucket for every distance below `rows`."""
    end = source.rows
    weights = {name: weight for name, weight in source.model.state_dict().items() if "posenc" not in name.split(".")}
    for name in STACKS:
        own = tables(source.stacks[name], end)
        layers = getattr(source.config, "num_layers" if name == "encoder" else "num_decoder_layers")
        for layer in range(layers if source.model_type == "umt5" else 1):
            path = f"{name}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
            weights[path] = own[layer % len(own)]
    config = stock_config(source)
    config.relative_attention_num_buckets = config.relative_attention_max_distance = 4 * end
    limit = {"distances": f"below {end}, those beyond share a bucket without a bias"}
    return Target(cls=source.stock, config=config, weights=weights, limits=limit)


register_route(
    Route(
        name="self_bias",
        writes="the same T5, a bucket for every distance",
        rank=0,
        serves=from_types("t5", "mt5", "umt5"),
        takes=takes,
        fits=fits,
        build=build,
        runs="every engine that runs T5 and reads the number of buckets",
    )
)
