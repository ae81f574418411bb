"""How long an input a model can take at all: one function, asked by everything that needs to know."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER, PreTrainedTokenizerBase

from hf_posenc.errors import UnsupportedFamilyError
from hf_posenc.family import Family, find_family


def table_start(family: Family, config: Any) -> int:
    """Return the row of the position table that belongs to position 0."""
    if family.counts_padding:
        return int(config.pad_token_id) + 1
    return family.table_offset


def rows_before(family: Family, config: Any) -> int:
    """Return how many rows the config counts into its length that belong to no position (RoBERTa counts them)."""
    return table_start(family, config) if family.counts_padding and not family.table_grows else 0


def trained_length(family: Family, config: Any) -> int:
    """Return the length that a model was trained for, in tokens, also after a patch made it longer.

    Raises:
        UnsupportedFamilyError: neither the config nor the record says it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    length = getattr(config, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    if length:
        return int(length)
    stated = getattr(config, family.length, None) or getattr(config, "max_position_embeddings", None)
    if stated is None and family.usual_length is None:
        raise UnsupportedFamilyError(
            f"this {type(config).__name__} does not say how long a text its model was trained for; set "
            f"model.config.{family.length} to that number of tokens."
        )
    return int(stated) - rows_before(family, config) if stated else int(family.usual_length or 0)


def max_length(model: nn.Module) -> int | None:
    """Return the number of positions the model can express, or None where no table ends.

    For a learned table these are its rows without the offset rows (a RoBERTa of 514 rows takes 512 tokens). Rotary,
    bias-based and sinusoidal models have no last position: how well they do past their trained length is a matter of
    measurement, not of this function. An encoder-decoder takes what the shorter of its text stacks takes.
    """
    unwrap = getattr(model, "get_base_model", None)  # a PEFT wrapper hides where the table is
    model = model if unwrap is None else unwrap()
    patched: list[Any] = [module for path, module in model.named_modules() if path.rpartition(".")[2] == "posenc"]
    ends = [module.max_positions() for module in patched]
    config: Any = getattr(model, "config", None)
    try:
        family = find_family(config.model_type if config is not None else "")
    except UnsupportedFamilyError:
        return ends[0] if ends else _rows_of_any_table(model)
    if family.stacks or not ends:
        bodies = ((record.body_of(stack), stack.config, record) for stack, record in family.stacks_of(model).values())
        ends += [_rows(body, config, record) for body, config, record in bodies if not hasattr(body, "posenc")]
    return min((end for end in ends if end is not None), default=None)


def _rows(body: nn.Module, config: Any, family: Family) -> int | None:
    """Return the number of positions that the stock body has rows for, or computes, or None where none ends."""
    if family.ends:
        return int(getattr(config, family.length))
    if family.table is None or family.table_grows:
        return None
    return len(table_rows(body.get_submodule(family.table))) - table_start(family, config)


def set_model_max_length(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> None:
    """Set `tokenizer.model_max_length`, where truncation cuts, to the number of positions that the model can express.

    Where the model has no last position, this becomes the number by which transformers says that there is no limit.
    Save the tokenizer of a patched model after this, and its folder speaks of one length everywhere.
    """
    length = max_length(model)
    tokenizer.model_max_length = VERY_LARGE_INTEGER if length is None else length


def table_rows(table: nn.Module) -> Tensor:
    """Return the rows of a table of positions, (rows, hidden_size), which tables that grow call `weights`."""
    rows: Tensor = table.weights if hasattr(table, "weights") else table.weight  # type: ignore[assignment]
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
