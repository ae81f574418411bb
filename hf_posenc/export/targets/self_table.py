"""The same architecture, with its table of absolute positions rewritten."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.config import EncodingConfig
from hf_posenc.encodings.learned import Learned
from hf_posenc.encodings.sinusoidal import Sinusoidal
from hf_posenc.export.rotation import silent
from hf_posenc.export.route import Reason, Route, Source, Target, register_route, stock_config
from hf_posenc.family import FAMILIES
from hf_posenc.length import table_start


def serves(model_type: str) -> bool:
    """Tell whether models of a type have such a table."""
    if model_type not in FAMILIES:
        return False
    family = FAMILIES[model_type]
    return bool(family.table) and not family.table_grows and not family.stacks


def takes(config: EncodingConfig) -> Reason:
    """Say why an encoding is no table of absolute positions."""
    if silent(config) or isinstance(config, Learned | Sinusoidal):
        return None
    return f"{config.name} acts inside attention, which a table of positions cannot"


def fits(source: Source) -> Reason:
    """Say why the stock model would not read the table as the patched one does."""
    if source.family.counts_padding and source.geometry.causal:
        return (
            "a stock decoder of this type counts positions from 0 in generate, and behind the padding index elsewhere"
        )
    return None


@torch.no_grad()
def table(source: Source) -> Tensor:
    """Return the rows of the new table, (start + rows, hidden_size); those that belong to no position are zero."""
    ids = torch.arange(source.rows, device=source.model.device)[None]
    added = source.module.embed(source.module.remap(ids))
    start, width = table_start(source.family, source.config), source.geometry.hidden_size
    if added is None:
        return torch.zeros(start + source.rows, width)
    return torch.cat([added.new_zeros(start, width), added[0]])


def build(source: Source) -> Target:
    """Return the stock model with the rows that the encoding gives, its config saying how many there are."""
    base = source.model.base_model
    prefix = "" if source.bare else f"{source.model.base_model_prefix}."
    body = next(path for path, module in base.named_modules() if module is source.family.body_of(source.model))
    weights = {name: weight for name, weight in source.model.state_dict().items() if "posenc" not in name.split(".")}
    path = ".".join(part for part in (body, source.family.table) if part)
    weights[f"{prefix}{path}.weight"] = table(source)
    if source.family.declared and source.family.declared.positional:  # what its attention adds was taken out too
        weights |= {name: torch.zeros_like(w) for name, w in weights.items() if "relative_attention_bias" in name}
    config = stock_config(source)
    start = table_start(source.family, source.config) if source.family.counts_padding else 0
    config.max_position_embeddings = source.rows + start
    limit = {"positions": f"{source.rows}, where its table ends"}
    return Target(cls=source.stock, config=config, weights=weights, limits=limit)


register_route(
    Route(
        name="self_table",
        writes="the same architecture, its table rewritten",
        rank=0,
        serves=serves,
        takes=takes,
        fits=fits,
        build=build,
        runs="every engine that runs the architecture",
    )
)
