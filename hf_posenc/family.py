"""What has to be known of a model family to patch it: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import UnsupportedFamilyError, did_you_mean
from hf_posenc.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where positions enter the models of one kind. Paths are relative to the body.

    Attributes:
        model_types: transformers' `config.model_type` of every model that this record describes.
        attention: class names of the self-attention modules.
        layers: attribute of the config that says how many attention modules there are.
        body: path, below `model.base_model`, of the module that takes `input_ids` and `position_ids` and runs the
            layers; empty where that is the base model itself.
        table: path of the table of absolute positions, or None.
        table_offset: rows of that table before the one of position 0.
        rotary: path of the rotary module, or None.
        partial_rotary: True where the attention modules can rotate a part of the head.
        interleaved: True where the attention modules pair dimension 2k with 2k + 1 instead of k with k + half.
        sine_first: True where the rotary module is that of GPT-J: sines before cosines, one a pair, for frequencies of
            base 10000 that stand in no config.
        rotates: attribute of the attention modules that is None or False on layers that stay without positions, or
            None where there are no such layers.
        counts_padding: True where positions are counted over `input_ids != pad_token_id`, and both explicit
            `position_ids` and the rows of the table start at `pad_token_id + 1` (the RoBERTa convention).
        token_type_buffer: True where `token_type_ids` default to a buffer as long as the table.
    """

    model_types: tuple[str, ...]
    attention: tuple[str, ...]
    layers: str = "num_hidden_layers"
    body: str = ""
    table: str | None = None
    table_offset: int = 0
    rotary: str | None = None
    partial_rotary: bool = False
    interleaved: bool = False
    sine_first: bool = False
    rotates: str | None = None
    counts_padding: bool = False
    token_type_buffer: bool = False

    @property
    def name(self) -> str:
        """Return the name that `families()` lists: the first model type."""
        return self.model_types[0]

    def body_of(self, model: Any) -> Any:
        """Return the body of a model of this family."""
        return model.base_model.get_submodule(self.body)


FAMILIES: Registry[Family] = Registry(kind="family", package="hf_posenc.families")


def register_family(family: Family) -> Family:
    """Make a family known under each of its model types; raises ConfigError where one is taken by another record."""
    for model_type in family.model_types:
        FAMILIES.add(model_type, family)
    return family


RULED_OUT: dict[str, str] = {}
"""Model type -> why no record can describe it, as the end of a sentence."""


def rule_out(reason: str, *model_types: str) -> None:
    """Note for good that models of these types cannot be patched; `reason` ends a sentence."""
    RULED_OUT.update(dict.fromkeys(model_types, reason))


def families() -> list[str]:
    """Return the names of all families."""
    return sorted({family.name for family in FAMILIES.values()})


def find_family(model_type: str) -> Family:
    """Return the record for a model type, that of the stock model where it is one of ours (`posenc_*`).

    Raises:
        UnsupportedFamilyError: no record describes that model type, or none can, for a reason that the message names.
    """
    stock = model_type.removeprefix("posenc_")
    if stock not in FAMILIES and stock in RULED_OUT:
        raise UnsupportedFamilyError(f"models of type {stock!r} cannot be patched: {RULED_OUT[stock]}.")
    if stock not in FAMILIES:
        raise UnsupportedFamilyError(
            f"no family record describes model_type {model_type!r}; {did_you_mean(stock, FAMILIES)} To use the model "
            "all the same, pass family=posenc.discover(model) after checking what it proposes."
        )
    return FAMILIES[stock]
