"""What a patch would change in a model: decided here, before anything is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.config import Encoding, EncodingConfig
from hf_posenc.declared import check_declared_backend, is_causal, key_value_heads
from hf_posenc.errors import ConfigError, UnsupportedEncodingError, UnsupportedFamilyError
from hf_posenc.family import DeclaredAttention, Family
from hf_posenc.inputs import NoRotation, PositionTable, Unheard, rotary_width
from hf_posenc.interposer import check_backend, looks_up_attention, uses_attention
from hf_posenc.length import table_rows, table_start
from hf_posenc.positions import Geometry
from hf_posenc.trial import check

_HALF_SPLIT: dict[str, Any] = {"pairing": "half_split"}


@dataclass(frozen=True, kw_only=True)
class PatchPlan:
    """What `patch` would change.

    Attributes:
        family: the record that says where positions enter the model.
        config: the encoding, with every default that depends on the model filled in.
        geometry: the numbers of the model that the encoding is built from.
        route: `native` where transformers itself computes the new encoding, otherwise `interposer`.
        changes: path of a module -> (class now, class then).
        attention: paths of the attention modules among them.
    """

    family: Family
    config: EncodingConfig
    geometry: Geometry
    route: str
    changes: dict[str, tuple[str, str]]
    attention: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the table that `print(posenc.plan(...))` shows."""
        width = max(len(path) for path in self.changes)
        lines = [f"{path:<{width}}  {now} -> {then}" for path, (now, then) in self.changes.items()]
        return "\n".join([f"{self.config} by the {self.route} route:", *lines])


def attention_modules(body: nn.Module, family: Family) -> dict[str, nn.Module]:
    """Return the self-attention modules of a body by path; cross-attention is left out."""
    return {
        path: module
        for path, module in body.named_modules()
        if any(cls.__name__ in family.attention for cls in type(module).__mro__)
        and not getattr(module, "is_cross_attention", False)
    }


def geometry_of(model: PreTrainedModel, family: Family) -> Geometry:
    """Read the plain numbers of a model that encodings depend on."""
    config, body = model.config, family.body_of(model)
    heads = config.num_attention_heads
    found = attention_modules(body, family).values()
    table = body.get_submodule(family.table) if family.table else None
    embedded = getattr(config, "embedding_size", None) if family.table is None else None
    hidden = embedded or config.hidden_size
    if table is not None and not isinstance(table, PositionTable):
        hidden = table_rows(table).shape[1]
    rope = getattr(config, "rope_parameters", None) or {}
    length = getattr(config, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    stated = getattr(config, family.length, None) or getattr(config, "max_position_embeddings", None)
    if length is None and stated is None:
        raise UnsupportedFamilyError(
            f"the config of this {type(model).__name__} does not say how long a text it was trained for; set "
            f"model.config.{family.length} to that number of tokens."
        )
    stated = (stated or 0) - (table_start(family, config) if family.counts_padding else 0)
    kept = getattr(config, "num_key_value_heads", None) or heads
    if family.declared and found:
        kept = key_value_heads(next(iter(found)), family.declared)
    return Geometry(
        hidden_size=int(hidden),
        num_attention_heads=heads,
        num_key_value_heads=kept,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_position_embeddings=int(length or stated),
        causal=all(_is_causal(module, family) for module in found),
    )


def _is_causal(module: nn.Module, family: Family) -> bool:
    return is_causal(module, family.declared) if family.declared else bool(getattr(module, "is_causal", True))


def swaps_attention(encoding: Encoding, family: Family) -> bool:
    """Tell whether a patch replaces the attention modules: for the encoding, or to drop positions of their own."""
    return family.declared is not None or uses_attention(encoding)


def make_plan(model: PreTrainedModel, config: EncodingConfig, family: Family) -> PatchPlan:
    """Decide what changes, and refuse what cannot be right; touches nothing.

    Raises:
        ConfigError, UnsupportedEncodingError: the encoding does not fit the model.
        UnsupportedFamilyError: the model is not built as the record says.
        BackendError: the model's attention backend cannot carry the encoding.
    """
    body = family.body_of(model)
    found = attention_modules(body, family)
    _check_record(model, family, found)
    geometry = geometry_of(model, family)
    switched = [name for name in family.switches if getattr(body, name)]
    rope = None if switched else _own_rope(model, family, geometry)
    config = _for_model(config, geometry, rope)
    config.check(geometry)
    _check_pairing(config, family)
    prefix = next(path for path, module in model.named_modules() if module is body)
    prefix = prefix and f"{prefix}."
    changes: dict[str, tuple[str, str]] = {}
    parameters = None if switched or by_layer_type(rope) else native_parameters(config, geometry, family)
    if family.rotary and parameters:
        now = type(body.get_submodule(family.rotary)).__name__
        changes[prefix + family.rotary] = (_rope_text(rope or {}, now), _rope_text(parameters, now))
        return PatchPlan(family=family, config=config, geometry=geometry, route="native", changes=changes)
    with torch.device("meta"):  # built to be asked; nothing that depends on the length is allocated
        encoding = config.build_layers(geometry, len(found))
    check_backend(encoding, model.config._attn_implementation)
    _check_attention(model, encoding, family, found)
    stand_ins = [(family.table, PositionTable), (family.rotary, NoRotation), *((p, Unheard) for p in family.silent)]
    for path, stand_in in stand_ins:
        if path:
            changes[prefix + path] = (type(body.get_submodule(path)).__name__, stand_in.__name__)
    changes |= {f"{prefix}{name}": ("True", "False") for name in switched}
    attention = found if swaps_attention(encoding, family) else {}
    for path, module in attention.items():
        changes[prefix + path] = (type(module).__name__, config.label + type(module).__name__)
    changes[prefix + "posenc"] = ("nothing", type(encoding).__name__)
    return PatchPlan(
        family=family,
        config=config,
        geometry=geometry,
        route="interposer",
        changes=changes,
        attention=tuple(prefix + path for path in attention),
    )


def native_parameters(config: EncodingConfig, geometry: Geometry, family: Family) -> dict[str, Any] | None:
    """Return the `rope_parameters` with which transformers itself computes an encoding, or None where it cannot.

    It cannot for `dynamic` as it is by default: transformers takes the base from the length of the call, so that its
    cached decode and its full forward disagree; the interposer gives every query the base of its own position.
    """
    if family.interleaved and getattr(config, "pairing", None) == "interleaved":
        config = dataclasses.replace(config, **_HALF_SPLIT)  # the parameters say nothing of pairs
    parameters = config.rope_parameters(geometry)
    if family.rotary is None or family.sine_first or parameters is None:
        return None
    if family.partial_rotary:
        return parameters
    return parameters if parameters.pop("partial_rotary_factor") == 1.0 else None


def _check_record(model: PreTrainedModel, family: Family, found: dict[str, nn.Module]) -> None:
    """Raise UnsupportedFamilyError where a model is not built as a record says."""
    body, name = family.body_of(model), type(model).__name__
    expected = getattr(model.config, family.layers)
    if len(found) != expected:
        raise UnsupportedFamilyError(
            f"{name} has {expected} layers, but {len(found)} self-attention modules of the declared "
            f"classes {', '.join(family.attention)}; its record does not describe it. See posenc.discover(model)."
        )
    paths = {path for path, _ in body.named_modules()}
    for path in (family.table, family.rotary, *family.silent):
        if path and path not in paths:
            raise UnsupportedFamilyError(
                f"{name} has no module {path!r}, where the record of {family.name!r} says that its positions come "
                "from: this one was configured to take them from elsewhere. See posenc.discover(model)."
            )


def _own_rope(model: PreTrainedModel, family: Family, geometry: Geometry) -> Mapping[str, Any] | None:
    """Return the model's own rotation in transformers' terms, or None where it has none."""
    if family.sine_first:
        share = (getattr(model.config, "rotary_dim", None) or geometry.head_dim) / geometry.head_dim
        return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    rope: Mapping[str, Any] | None = getattr(model.config, "rope_parameters", None) if family.rotary else None
    return rope


def by_layer_type(rope: Mapping[str, Any] | None) -> bool:
    """Tell whether a model has rotary parameters for every type of layer, as those with two thetas do."""
    return rope is not None and any(isinstance(value, dict) for value in rope.values())


def _for_model(config: EncodingConfig, geometry: Geometry, rope: Mapping[str, Any] | None) -> EncodingConfig:
    """Fill in what depends on the model; raises ConfigError where its types of layers would fill it in differently."""
    if not by_layer_type(rope) or rope is None:
        return config.for_model(geometry, rope)
    filled = [config.for_model(geometry, own) for own in rope.values() if own is not None]
    if any(other != filled[0] for other in filled):
        raise ConfigError(
            f"the layers of this model rotate in different ways ({dict(rope)}), and {config.name} is one for all of "
            "them; say which theta and which scaling they shall have, {'rope_type': 'default'} for none."
        )
    return filled[0]


def _check_pairing(config: EncodingConfig, family: Family) -> None:
    """Raise ConfigError where a rotation would pair other dimensions than those that the weights were trained for."""
    if family.interleaved and getattr(config, "pairing", "interleaved") != "interleaved":
        raise ConfigError(
            f"models of type {family.name!r} rotate dimension 2k with 2k + 1, which half_split would tear apart; "
            "ask for pairing='interleaved'."
        )


def _check_attention(model: PreTrainedModel, encoding: Encoding, family: Family, found: dict[str, nn.Module]) -> None:
    """Raise an error where an encoding cannot get at the scores, or would overrule the model's own way of attending.

    Raises:
        UnsupportedFamilyError: the attention modules compute their scores themselves.
        UnsupportedEncodingError: layers without positions would get some, or caps and sinks would be lost.
    """
    name = type(encoding).__name__
    if family.declared:
        _try_declared(model, family.declared, family, found)
    own = {type(module).__name__ for module in found.values() if not looks_up_attention(type(module))}
    if not family.declared and own and uses_attention(encoding):
        raise UnsupportedFamilyError(
            f"{', '.join(own)} of {type(model).__name__} computes its scores itself, without looking up an attention "
            f"function, so that {name} cannot reach them; only what is added to the token embedding can be replaced."
        )
    bare = [path for path, module in found.items() if family.rotates and not getattr(module, family.rotates, None)]
    if bare and (encoding.overrides("rotate") or encoding.overrides("rotate_key")):
        raise UnsupportedEncodingError(
            f"{type(model).__name__} leaves {len(bare)} of its {len(found)} layers without positions, and {name} "
            "would turn these as well; change its rotation by one that transformers computes itself (RoPE with a "
            "theta or scaling other than 'dynamic'), or patch in an encoding without a rotation."
        )
    for attribute, what in (("attn_logit_softcapping", "caps its scores"), ("sinks", "has attention sinks")):
        held = getattr(model.config, attribute, None) or any(hasattr(module, attribute) for module in found.values())
        if held and encoding.overrides("score"):
            raise UnsupportedEncodingError(
                f"{type(model).__name__} {what}, which {name} would leave out, since it computes all scores itself."
            )


def _try_declared(
    model: PreTrainedModel, record: DeclaredAttention, family: Family, found: dict[str, nn.Module]
) -> None:
    """Raise BackendError or UnsupportedFamilyError where attention cannot be run as its record declares it."""
    check_declared_backend(record, model.config._attn_implementation, type(model).__name__)
    if next(model.parameters()).is_meta:
        return  # being loaded; `verify` looks at what was
    body = family.body_of(model)
    width = rotary_width(body.get_submodule(family.rotary)) if family.rotary else None
    for module in found.values():
        check(module, record, model.config.hidden_size, width)


def _rope_text(parameters: Any, name: str) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in parameters.items())})"
