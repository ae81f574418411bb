"""What has to be known of a model family to patch it: plain data, no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import ConfigError, UnsupportedFamilyError, did_you_mean
from hf_posenc.registry import Registry

LAYOUTS = ("contiguous", "grouped")


@dataclass(frozen=True, kw_only=True)
class DeclaredAttention:
    """How attention modules that look up no attention function get from hidden states to their output.

    Names are attributes of the attention module unless it says otherwise. What the modules do with positions is left
    out: the declared forward does everything but that.

    Attributes:
        projections: of queries, keys and values: three of them, or the one that gives all three side by side.
        layout: of what one projection gives. `contiguous`: all queries, all keys, all values; `grouped`: for each key
            head its queries, its key and its value, which without grouped heads is head by head.
        output: the projection of the output, or None where the module has none.
        heads: number of query heads.
        key_value_heads: number of key heads, or None where there are as many as query heads.
        layer: index of the layer in the cache.
        scaling: what the product of a query and a key is multiplied by, as a number or a name; None for
            1 / sqrt(head_dim).
        clip: bound on what the projection gives, on either side, or None.
        causal: whether a query sees no later key.
        hides_future: True where the module hides later keys itself, and the mask that it is given says padding only.
        local: attribute that reads `local` in layers that see the nearest keys only, and the attribute of the config
            that says how many; None where there are no such layers.
        mask_hides: True where a boolean mask is True on what is hidden.
        dropout: of the attention weights, a module or a number.
        output_dropout: of the output, or None where it is not the module's.
        residual: argument of the forward that is added to the output, or None.
        positional: True where the module puts positions in by itself, which the declared forward leaves out.
        returns: what else is returned after the output and the weights.
        listed: True where they are returned as a list.
    """

    projections: tuple[str, ...]
    layout: str = "contiguous"
    output: str | None = None
    heads: str = "num_heads"
    key_value_heads: str | None = None
    layer: str = "layer_idx"
    scaling: str | float | None = None
    clip: str | None = None
    causal: str | bool = True
    hides_future: bool = False
    local: tuple[str, str] | None = None
    mask_hides: bool = False
    dropout: str = "attention_dropout"
    output_dropout: str | None = None
    residual: str | None = None
    positional: bool = False
    returns: tuple[str, ...] = ()
    listed: bool = False

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        if len(self.projections) not in (1, 3):
            raise ConfigError(f"DeclaredAttention.projections must name one or three, were: {self.projections!r}")
        if self.layout not in LAYOUTS:
            raise ConfigError(f"unknown DeclaredAttention.layout {self.layout!r}; {did_you_mean(self.layout, LAYOUTS)}")


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
        either: True where a model has the table or the rotary module, whichever it was configured for; with a rotation
            it does not count padding.
        partial_rotary: True where the attention modules can rotate a part of the head.
        interleaved: True where the attention modules pair dimension 2k with 2k + 1 instead of k with k + half.
        sine_first: True where the rotary module is that of GPT-J: sines before cosines, one a pair, for frequencies of
            base 10000 that stand in no config.
        rotates: attribute of the attention modules that is None or False on layers that stay without positions, or
            None where there are no such layers. Where it is so on all of them, all rotate.
        counts_padding: True where positions are counted over `input_ids != pad_token_id`, and both explicit
            `position_ids` and the rows of the table start at `pad_token_id + 1` (the RoBERTa convention).
        token_type_buffer: True where `token_type_ids` default to a buffer as long as the table.
        length: attribute of the config that says how long a text the model was trained for, in tokens.
        ends: True where a stock model computes its rotation or its bias for so many positions and no more.
        declared: how the attention modules attend, where they look up no attention function; None where they do.
        switches: attributes of the body that turn its own encoding on; a patch turns them off.
        silent: paths of modules whose positions reach nothing but declared attention, where nobody hears of them.
        stacks: attributes of `model.base_model` that hold an encoder or a decoder, each a body by itself, which this
            record then describes one by one; `{stack}` stands for their names in `layers` and `heads`. Those that a
            model lacks, as decoders without an encoder do, are left out.
        unreached: attribute and reason, which ends a sentence, of stacks in which no encoding can be put.
        heads: attribute of the config that says how many query heads there are.
        cross_attention: last part of the path of those attention modules that look at another stack.
        usual_length: that length itself, where a config does not say it.
        bias: attribute of the attention modules that holds a bias for every bucket of distances, in the first layer for
            all or in every layer, as `T5` computes it; `has_<bias>` says whether a module has one.
        table_grows: True where the table holds computed sinusoids and grows with the text.
        causal: whether a query sees no later key; None where the attention modules say so.
        mixes: attribute of the config that, where it is true, has every token take in its neighbours outside attention;
            texts packed into one row cannot be kept apart there.
    """

    model_types: tuple[str, ...]
    attention: tuple[str, ...]
    layers: str = "num_hidden_layers"
    body: str = ""
    table: str | None = None
    table_offset: int = 0
    rotary: str | None = None
    either: bool = False
    partial_rotary: bool = False
    interleaved: bool = False
    sine_first: bool = False
    rotates: str | None = None
    counts_padding: bool = False
    token_type_buffer: bool = False
    length: str = "max_position_embeddings"
    ends: bool = False
    declared: DeclaredAttention | None = None
    switches: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    unreached: tuple[tuple[str, str], ...] = ()
    heads: str = "num_attention_heads"
    cross_attention: str | None = None
    usual_length: int | None = None
    bias: str | None = None
    table_grows: bool = False
    causal: bool | None = None
    mixes: str | None = None

    @property
    def name(self) -> str:
        """Return the name that `families()` lists: the first model type."""
        return self.model_types[0]

    def body_of(self, model: Any) -> Any:
        """Return the body of a model of this family."""
        return model.base_model.get_submodule(self.body)

    def stacks_of(self, model: Any) -> dict[str, tuple[Any, Family]]:
        """Return the stacks of a model by name, each as a model with one body and the record of such models.

        A record without attention classes leaves it to the model type of every stack, which then is a whole model.
        """
        if not self.stacks:
            return {"": (model, self.as_built(model))}
        held = {name: getattr(model.base_model, name) for name in self.stacks if hasattr(model.base_model, name)}
        return {
            name: (stack, self._of_stack(name) if self.attention else find_family(stack.config.model_type))
            for name, stack in held.items()
        }

    def as_built(self, model: Any) -> Family:
        """Return the record of this one model, with its table or its rotary module where it has `either`."""
        if not self.either:
            return self
        if self.table in {path for path, _ in self.body_of(model).named_modules()}:
            return dataclasses.replace(self, either=False, rotary=None)
        return dataclasses.replace(self, either=False, table=None, counts_padding=False)

    def _of_stack(self, name: str) -> Family:
        return dataclasses.replace(
            self,
            stacks=(),
            layers=self.layers.format(stack=name),
            heads=self.heads.format(stack=name),
            causal=name == "decoder",
        )


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
