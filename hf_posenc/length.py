"""How long an input a model can take at all: one function, asked by everything that needs to know."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_posenc.errors import UnsupportedFamilyError
from hf_posenc.family import Family, find_family


def table_start(family: Family, config: Any) -> int:
    """Return the row of the position table that belongs to position 0."""
    if family.counts_padding:
        return int(config.pad_token_id) + 1
    return family.table_offset


def max_length(model: nn.Module) -> int | None:
    """Return the number of positions the model can express, or None where no table ends.

    For a learned table these are its rows without the offset rows (a RoBERTa of 514 rows takes 512 tokens). Rotary,
    bias-based and sinusoidal models have no last position: how well they do past their trained length is a matter of
    measurement, not of this function.
    """
    for path, module in model.named_modules():
        if path.rsplit(".", 1)[-1] == "posenc":
            rows: int | None = module.max_positions()
            return rows
    config = getattr(model, "config", None)
    try:
        family = find_family(config.model_type if config is not None else "")
    except UnsupportedFamilyError:
        return _rows_of_any_table(model)
    if family.table is None:
        return None
    table = family.body_of(model).get_submodule(family.table)
    return None if hasattr(table, "make_weights") else len(table_rows(table)) - table_start(family, config)


def table_rows(table: nn.Module) -> Tensor:
    """Return the rows of a table of positions, (rows, hidden_size).

    Sinusoids that a model computes itself, and further ones when it needs them (`make_weights`), are kept as `weights`.
    """
    rows: Tensor = table.weights if hasattr(table, "make_weights") else table.weight  # type: ignore[assignment]
    return rows


def _rows_of_any_table(model: nn.Module) -> int | None:
    """Return the rows of the first embedding whose name says that it holds positions, for families without a record."""
    for name, module in model.named_modules():
        leaf = name.rsplit(".", 1)[-1]
        if isinstance(module, nn.Embedding) and leaf in ("wpe", "position_embeddings", "embed_positions"):
            padding = module.padding_idx
            return len(table_rows(module)) - int(
                getattr(module, "offset", 0) or (0 if padding is None else padding + 1)
            )
    return None
