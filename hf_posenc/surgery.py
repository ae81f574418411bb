"""Carry a patch plan out on one model, undo it, and repeat it on a model that is being loaded."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.config import from_dict
from hf_posenc.declared import replacement
from hf_posenc.errors import PatchStateError
from hf_posenc.family import find_family
from hf_posenc.inputs import NoRotation, PositionTable, Unheard, rotary_width
from hf_posenc.interposer import Joint
from hf_posenc.length import table_rows, table_start
from hf_posenc.modeling import announce, config_class, model_class
from hf_posenc.planning import PatchPlan, attention_modules, make_plan, native_parameters, swaps_attention
from hf_posenc.positions import checkpointed

RECORD = "posenc_record"


@dataclass(kw_only=True)
class _Record:
    """What is needed to undo a patch."""

    plan: PatchPlan
    modules: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)
    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)


def record_of(model: nn.Module) -> _Record | None:
    """Return what a patch left behind to undo it, or None where the model is not patched."""
    record: _Record | None = model.__dict__.get(RECORD)
    return record


def install(model: PreTrainedModel, plan: PatchPlan) -> None:
    """Carry a plan out on one instance. Nothing in here is expected to fail: `make_plan` has checked everything."""
    if record_of(model) is not None:
        raise PatchStateError("the model is patched already; call posenc.unpatch(model) first.")
    record = _Record(plan=plan)
    config = copy.deepcopy(model.config)
    if plan.route == "native":
        _install_native(model, config, record)
    else:
        _install_interposer(model, config, record)
    model.__dict__[RECORD] = record


def _install_native(model: PreTrainedModel, config: Any, record: _Record) -> None:
    """Write transformers' own rope parameters and rebuild the rotary module, without which they change nothing."""
    plan, body = record.plan, record.plan.family.body_of(model)
    parameters = native_parameters(plan.config, plan.geometry, plan.family) or {}
    config.rope_parameters = parameters
    original = parameters.get("original_max_position_embeddings")
    if original:
        config.max_position_embeddings = max(config.max_position_embeddings, round(original * parameters["factor"]))
    _use_config(model, config, record)
    old = body.get_submodule(plan.family.rotary or "")
    new = type(old)(config=config).to(next(body.parameters()).device)
    _replace(body, plan.family.rotary or "", new, record)


def _install_interposer(model: PreTrainedModel, config: Any, record: _Record) -> None:
    plan, family = record.plan, record.plan.family
    body = family.body_of(model)
    weight = next(body.parameters())
    encoding = plan.config.build_layers(plan.geometry, getattr(model.config, family.layers))
    encoding.to(device=weight.device, dtype=weight.dtype)
    joint = Joint(body)
    if family.table:
        table = body.get_submodule(family.table)
        start = table_start(family, model.config)
        encoding.adopt(table_rows(table)[start:])
        _replace(body, family.table, PositionTable(joint), record)
    if family.rotary:
        width = rotary_width(body.get_submodule(family.rotary))
        _replace(body, family.rotary, NoRotation(width=width, sine_first=family.sine_first), record)
    for path in family.silent:
        _replace(body, path, Unheard(), record)
    for name in family.switches:
        record.attributes.append((body, name, getattr(body, name)))
        setattr(body, name, False)
    attention = attention_modules(body, family).values() if swaps_attention(encoding, family) else ()
    for layer, module in enumerate(attention):
        stock: Any = type(module)
        _swap(module, replacement(stock, plan.config.label, family), joint, record)
        module.__dict__["posenc_layer"] = layer
    body.posenc = encoding.train(body.training)
    _describe(config, plan)
    _use_config(model, config, record)
    body.__dict__["posenc_family"] = family
    for part in dict.fromkeys((model, model.base_model, body)):
        stock = type(part)
        _swap(part, model_class(stock, rebuild), joint, record)
    if family.declared:
        _checkpoint_with_positions(model, record)
    if getattr(model, "loss_type", "") is None and plan.geometry.causal and model.get_output_embeddings() is not None:
        # transformers reads the loss off the class name, and finds none in names such as GPT2LMHeadModel
        record.attributes.append((model, "loss_type", None))
        model.loss_type = "ForCausalLM"


def _checkpoint_with_positions(model: PreTrainedModel, record: _Record) -> None:
    """Have layers that are checkpointed already find their positions again."""
    name = "_gradient_checkpointing_func"
    for module in model.modules():
        if name in module.__dict__:
            stock = module.__dict__[name]
            record.attributes.append((module, name, stock))
            module.__dict__[name] = partial(checkpointed, stock)


def _describe(config: Any, plan: PatchPlan) -> None:
    """Make the copied config that of a patched model."""
    if not config.model_type.startswith("posenc_"):
        stock: Any = type(config)
        config.__class__ = config_class(stock)
        announce(stock)
    config.posenc = plan.config.to_dict()
    # the length that the weights were trained for stays on record when a longer table changes the model's own
    config.original_max_position_embeddings = plan.geometry.max_position_embeddings
    rows = plan.config.__dict__.get("max_position_embeddings")
    if rows:
        config.max_position_embeddings = rows + (table_start(plan.family, config) if plan.family.counts_padding else 0)


def _use_config(model: PreTrainedModel, config: Any, record: _Record) -> None:
    """Give the model a config of its own; another model may share the one it has."""
    shared = model.config
    for module in model.modules():
        if module.__dict__.get("config") is shared:
            record.attributes.append((module, "config", shared))
            module.__dict__["config"] = config


def _replace(body: nn.Module, path: str, new: nn.Module, record: _Record) -> None:
    parent_path, _, name = path.rpartition(".")
    parent = body.get_submodule(parent_path)
    record.modules.append((parent, name, parent.get_submodule(name)))
    new.train(body.training)
    parent._modules[name] = new


def _swap(module: nn.Module, cls: type[nn.Module], joint: Joint, record: _Record) -> None:
    record.classes.append((module, type(module)))
    module.__class__ = cls
    module.__dict__["posenc_joint"] = joint


def remove(model: PreTrainedModel) -> None:
    """Undo `install`: classes, modules, config and attributes are the very objects from before.

    Raises:
        PatchStateError: the model is not patched, or was loaded patched and so never had another encoding.
    """
    record = record_of(model)
    if record is None:
        raise PatchStateError("the model is not patched; there is nothing to undo.")
    if not record.classes and not record.modules:
        raise PatchStateError("the model was loaded with its encoding; its former positions are not in the checkpoint.")
    for module, cls in record.classes:
        module.__class__ = cls
        for name in ("posenc_joint", "posenc_family", "posenc_layer"):
            module.__dict__.pop(name, None)
    weight = next(model.parameters())
    for parent, name, module in record.modules:
        # it stood aside while the model may have moved; the frequencies of a rotary module stay in float32
        module.to(device=weight.device, dtype=weight.dtype if isinstance(module, nn.Embedding) else None)
        parent._modules[name] = module.train(model.training)
    for module, name, value in record.attributes:
        module.__dict__[name] = value
    record.plan.family.body_of(model)._modules.pop("posenc", None)
    del model.__dict__[RECORD]


def rebuild(model: PreTrainedModel) -> None:
    """Patch a freshly constructed model as the spec in its config says; the weights come later."""
    config = model.config
    spec = config.posenc
    if spec is None:
        raise PatchStateError(f"a config of type {config.model_type} needs a 'posenc' spec, which says what to build")
    made_patched = record_of(model.base_model)
    if made_patched is not None and model.base_model is not model:
        # the class has its base made by AutoModel, which knows our config
        model.__dict__[RECORD] = model.base_model.__dict__.pop(RECORD)
        model.__dict__["posenc_joint"] = model.base_model.posenc_joint
        return
    model.__class__ = type(model).posenc_stock  # type: ignore[attr-defined]
    plan = make_plan(model, from_dict(spec), find_family(config.model_type))
    _install_interposer(model, config, _Record(plan=plan))
    model.__dict__[RECORD] = _Record(plan=plan)  # nothing to undo: what stood there before was never trained
