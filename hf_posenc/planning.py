"""What a patch would change in a model: decided here, before anything is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.anatomy import attention_modules, biased, by_layer_type, check_record, geometry_of, own_rope
from hf_posenc.config import SCHEMA_VERSION, Encoding, EncodingConfig, from_dict
from hf_posenc.declared import check_declared_backend
from hf_posenc.errors import ConfigError, PosencError, UnsupportedEncodingError, UnsupportedFamilyError
from hf_posenc.family import DeclaredAttention, Family
from hf_posenc.forms import form_of
from hf_posenc.inputs import NoRotation, PositionTable, Unheard, rotary_width
from hf_posenc.interposer import check_backend, looks_up_attention, uses_attention
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
        form: how plain texts are attended, and single queries where that differs, chosen from what the encoding, the
            backend and the dtype allow.
        stack: path of the model whose one body this is about: empty, except in a model of several stacks.
        keeps: whether the model has to say within its trained length what it said before.
        stacks: the plans of the stacks, by name, where there are several. What stands above then sums them up: all of
            `changes` and `attention`, the `geometry` of the last one, which is the one that generates.
    """

    family: Family
    config: EncodingConfig
    geometry: Geometry
    route: str
    changes: dict[str, tuple[str, str]]
    attention: tuple[str, ...] = ()
    form: str = "the stock attention function"
    stack: str = ""
    keeps: bool = False
    stacks: Mapping[str, PatchPlan] = field(default_factory=dict)

    @property
    def parts(self) -> Mapping[str, PatchPlan]:
        """The plans of all bodies by the name of their stack, which is empty where there is one body."""
        return self.stacks or {"": self}

    def model_of(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the model, itself or one of its stacks, whose one body this plan is about."""
        part: Any = model.get_submodule(self.stack)
        return part  # type: ignore[no-any-return]

    def body_of(self, model: PreTrainedModel) -> Any:
        """Return the body that this plan is about."""
        return self.family.body_of(self.model_of(model))

    def __str__(self) -> str:
        """Return the table that `print(posenc.plan(...))` shows."""
        width = max(len(path) for path in self.changes)
        lines = [f"{path:<{width}}  {now} -> {then}" for path, (now, then) in self.changes.items()]
        return "\n".join([f"{self.config} by the {self.route} route, attending by {self.form}:", *lines])


def swaps_attention(family: Family, found: Mapping[str, nn.Module]) -> bool:
    """Tell whether a patch replaces the attention modules: wherever it can, since packed texts are kept apart there."""
    return family.declared is not None or all(looks_up_attention(type(module)) for module in found.values())


def make_plan(model: PreTrainedModel, config: EncodingConfig, family: Family) -> PatchPlan:
    """Decide what changes, and refuse what cannot be right; touches nothing.

    Raises:
        ConfigError, UnsupportedEncodingError: the encoding does not fit the model.
        UnsupportedFamilyError: the model is not built as the record says, or a stack cannot be reached.
        BackendError: the model's attention backend cannot carry the encoding.
    """
    held, unreached = family.stacks_of(model), dict(family.unreached)
    if not held:
        raise UnsupportedFamilyError(f"{type(model).__name__} has none of the stacks {', '.join(family.stacks)}.")
    asked = config.for_stacks([*held, *unreached]) if family.stacks else {"": config}
    named = any(own is not config for own in asked.values())
    plans = {}
    for name, own in asked.items():
        if name in unreached and (named or name in held):
            raise UnsupportedFamilyError(f"the {name} of {type(model).__name__} cannot be patched: {unreached[name]}.")
        if name in held:
            plans[name] = _plan_stack(model, *held[name], own, name=name)
    last = list(plans.values())[-1]
    if len(plans) == 1 and not named:
        return last
    return PatchPlan(
        family=family,
        config=from_dict({"name": "stacks", "version": SCHEMA_VERSION, **{n: p.config for n, p in plans.items()}}),
        geometry=last.geometry,
        route=last.route,
        changes={path: change for plan in plans.values() for path, change in plan.changes.items()},
        attention=tuple(path for plan in plans.values() for path in plan.attention),
        stacks=plans,
    )


def _plan_stack(
    model: PreTrainedModel, stack: PreTrainedModel, family: Family, config: EncodingConfig, *, name: str
) -> PatchPlan:
    """Decide what changes in one stack; errors say in which."""
    try:
        return _plan_body(model, stack, family, config)
    except PosencError as error:
        if not name:
            raise
        raise type(error)(f"{name}: {error}") from error


def _plan_body(model: PreTrainedModel, stack: PreTrainedModel, family: Family, config: EncodingConfig) -> PatchPlan:
    """Decide what changes in the one body of `stack`, which is the model or a part of it."""
    body = family.body_of(stack)
    found = attention_modules(body, family)
    check_record(stack, family, found)
    geometry = geometry_of(stack, family)
    switched = [name for name in family.switches if getattr(body, name)]
    rope = None if switched else own_rope(stack, family, geometry)
    config = _for_model(config, geometry, rope, family)
    config.check(geometry)
    _check_pairing(config, family)
    paths = {id(module): path for path, module in model.named_modules()}
    prefix = paths[id(body)] and f"{paths[id(body)]}."
    changes: dict[str, tuple[str, str]] = {}
    configured = getattr(model.config, "rope_parameters", None) is not None
    stock_rope = configured and stack is model and not switched and not by_layer_type(rope)
    parameters = native_parameters(config, geometry, family) if stock_rope else None
    if family.rotary and parameters:
        now = type(body.get_submodule(family.rotary)).__name__
        changes[prefix + family.rotary] = (_rope_text(rope or {}, now), _rope_text(parameters, now))
        return PatchPlan(family=family, config=config, geometry=geometry, route="native", changes=changes)
    with torch.device("meta"):  # built to be asked; nothing that depends on the length is allocated
        built = config.build_layers(geometry, len(found))
    check_backend(built, stack.config._attn_implementation)
    _check_attention(stack, built, family, found)
    stand_ins = [(family.table, PositionTable), (family.rotary, NoRotation), *((p, Unheard) for p in family.silent)]
    for path, stand_in in stand_ins:
        if path:
            changes[prefix + path] = (type(body.get_submodule(path)).__name__, stand_in.__name__)
    changes |= {f"{prefix}{name}": ("True", "False") for name in switched}
    for path, module in biased(found, family).items():
        changes[f"{prefix}{path}.{family.bias}"] = (type(module.get_submodule(family.bias or "")).__name__, "nothing")
    attention = found if swaps_attention(family, found) else {}
    for path, module in attention.items():
        changes[prefix + path] = (type(module).__name__, config.label + type(module).__name__)
    changes[prefix + "posenc"] = ("nothing", type(built).__name__)
    return PatchPlan(
        family=family,
        config=config,
        geometry=geometry,
        route="interposer",
        changes=changes,
        attention=tuple(prefix + path for path in attention),
        form=form_of(built, stack, causal=geometry.causal),
        stack=paths[id(stack)],
        keeps=_keeps(stack, config, family, found),
    )


def _keeps(model: PreTrainedModel, config: EncodingConfig, family: Family, found: Mapping[str, nn.Module]) -> bool:
    """Tell whether an encoding computes what the model does already, from the table that it takes over."""
    if family.bias:
        shared = len(biased(found, family)) == 1
        own = {name: getattr(model.config, f"relative_attention_{name}") for name in ("num_buckets", "max_distance")}
        said = vars(config)
        return config.name == "t5" and config.temperature is None and said | own | {"per_layer": not shared} == said
    beside = family.declared is not None and family.declared.positional
    kept = config.within_length == "kept" and config.temperature is None
    return kept and bool(family.table) and not beside


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


def _for_model(
    config: EncodingConfig, geometry: Geometry, rope: Mapping[str, Any] | None, family: Family
) -> EncodingConfig:
    """Fill in what depends on the model; raises ConfigError where its types of layers would fill it in differently."""
    if rope is None:
        return config.for_model(geometry)
    pairing = {"pairing": "interleaved" if family.interleaved else "half_split"}
    if not by_layer_type(rope):
        return config.for_model(geometry, {**rope, **pairing})
    filled = [config.for_model(geometry, {**own, **pairing}) for own in rope.values() if own is not None]
    if any(other != filled[0] for other in filled):
        raise ConfigError(
            f"the layers of this model rotate in different ways ({dict(rope)}), and {config.name} is one for all of "
            "them; say which theta and which scaling they shall have, {'rope_type': 'default'} for none."
        )
    return filled[0]


def _check_pairing(config: EncodingConfig, family: Family) -> None:
    """Raise ConfigError where a rotation would pair other dimensions than those that the weights were trained for."""
    if family.interleaved and getattr(config, "pairing", None) == "half_split":
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
    if 0 < len(bare) < len(found) and (encoding.overrides("rotate") or encoding.overrides("rotate_key")):
        raise UnsupportedEncodingError(
            f"{type(model).__name__} leaves {len(bare)} of its {len(found)} layers without positions, and {name} "
            "would turn these as well; change its rotation by one that transformers computes itself (RoPE with a "
            "theta or scaling other than 'dynamic'), or patch in an encoding without a rotation."
        )
    for attribute, what in (("attn_logit_softcapping", "caps its scores"), ("sinks", "has attention sinks")):
        held = getattr(model.config, attribute, None) or any(hasattr(module, attribute) for module in found.values())
        if held and (encoding.overrides("score") or encoding.overrides("output_bias")):
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
