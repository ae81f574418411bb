"""Carry a patch plan out on one model, undo it, and repeat it on a model that is being loaded."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.anatomy import attention_modules, biased
from hf_posenc.config import from_dict
from hf_posenc.declared import replacement
from hf_posenc.errors import PatchStateError
from hf_posenc.family import find_family
from hf_posenc.inputs import NoRotation, PositionTable, Unheard, rotary_width
from hf_posenc.joint import Joint
from hf_posenc.length import rows_before, table_rows, table_start
from hf_posenc.modeling import announce, config_class, model_class, native_class
from hf_posenc.planning import PatchPlan, make_plan, native_parameters, swaps_attention
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
    config = _own_config(model, record)
    if plan.route == "native":
        _install_native(model, config, record)
    else:
        _install_interposer(model, config, record)
    model.__dict__[RECORD] = record


def _install_native(model: PreTrainedModel, config: Any, record: _Record) -> None:
    """Write transformers' own rope parameters and rebuild the rotary module, without which they change nothing."""
    plan, body = record.plan, record.plan.body_of(model)
    parameters = native_parameters(plan.config, plan.geometry, plan.family) or {}
    config.rope_parameters = parameters
    original = parameters.get("original_max_position_embeddings")
    if original:
        config.max_position_embeddings = max(config.max_position_embeddings, round(original * parameters["factor"]))
    old = body.get_submodule(plan.family.rotary or "")
    new = type(old)(config=config).to(next(body.parameters()).device)
    _replace(body, plan.family.rotary or "", new, record)
    for module in dict.fromkeys((model, model.base_model, body)):
        stock: Any = type(module)
        _swap(module, native_class(stock), record)


def _install_interposer(model: PreTrainedModel, config: Any, record: _Record) -> None:
    plan = record.plan
    joints = {}
    for part in plan.parts.values():
        stack = part.model_of(model)
        joints[stack] = _install_body(stack, part, record)
    _describe(config, plan)
    _set_length(model, config, list(joints.values()), record)
    for stack, joint in joints.items():
        for module in dict.fromkeys((stack, stack.base_model, joint.body)):
            _swap_model(module, (joint,), record)
    for module in dict.fromkeys((model, model.base_model)):
        if "posenc_joints" not in module.__dict__:
            _swap_model(module, tuple(joints.values()), record)
    if any(part.family.declared for part in plan.parts.values()):
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


def _install_body(model: PreTrainedModel, plan: PatchPlan, record: _Record) -> Joint:
    """Put the encoding into one body, in the place of all that it had of its own."""
    family, body = plan.family, plan.family.body_of(model)
    weight, found = next(body.parameters()), attention_modules(body, plan.family)
    encoding = plan.config.build_layers(plan.geometry, len(found))
    encoding.to(device=weight.device, dtype=weight.dtype)
    joint = Joint(body)
    if family.table:
        encoding.adopt(table_rows(body.get_submodule(family.table))[table_start(family, model.config) :])
        _replace(body, family.table, PositionTable(joint), record)
    if family.rotary:
        width = rotary_width(body.get_submodule(family.rotary))
        _replace(body, family.rotary, NoRotation(width=width, sine_first=family.sine_first), record)
    for path in family.silent:
        _replace(body, path, Unheard(), record)
    for name in family.switches:
        record.attributes.append((body, name, getattr(body, name)))
        setattr(body, name, False)
    own = [_take_bias(module, family.bias or "", record) for module in biased(found, family).values()]
    if own:
        encoding.adopt_bias(own)
    for layer, module in enumerate(found.values() if swaps_attention(family, found) else ()):
        stock: Any = type(module)
        _swap(module, replacement(stock, plan.config.label, family), record)
        module.__dict__.update(posenc_joint=joint, posenc_layer=layer)
    body.posenc = encoding.train(body.training)
    body.__dict__["posenc_family"] = family
    return joint


def _take_bias(module: nn.Module, name: str, record: _Record) -> Tensor:
    """Take an attention module's own table of biases out, without which it adds zeros, and return its rows."""
    table = module.get_submodule(name)
    record.modules.append((module, name, table))
    record.attributes.append((module, f"has_{name}", True))
    module.__dict__[f"has_{name}"] = False
    del module._modules[name]
    rows: Tensor = table.weight  # type: ignore[assignment]
    return rows


def _describe(config: Any, plan: PatchPlan) -> None:
    """Make the copied config that of a patched model."""
    if not config.model_type.startswith("posenc_"):
        stock: Any = type(config)
        config.__class__ = config_class(stock)
        announce(stock)
    config.posenc = plan.config.to_dict()
    # the length that the weights were trained for stays on record when a longer table changes the model's own
    config.original_max_position_embeddings = plan.geometry.max_position_embeddings


def _set_length(model: PreTrainedModel, config: Any, joints: list[Joint], record: _Record) -> None:
    """Have the config speak of the tables' rows, and `generate` too if its limit was the old one or is out of reach."""
    plan, family = record.plan, record.plan.family
    tables = [joint.encoding for joint in joints if joint.encoding.overrides("embed")]
    lengths = {table.max_positions() for table in tables}
    whole = len(tables) >= max(len(family.stacks), 1)  # a stack that was left alone goes by the length that it had
    rows = lengths.pop() if whole and len(lengths) == 1 else None
    if rows is None:
        return
    if hasattr(config, family.length):
        setattr(config, family.length, rows + rows_before(family, config))
    generation: Any = getattr(model, "generation_config", None)
    limit = getattr(generation, "max_length", None)
    if limit is not None and (limit == plan.geometry.max_position_embeddings or limit > rows):
        record.attributes.append((model, "generation_config", generation))
        model.generation_config = copy.deepcopy(generation)
        model.generation_config.max_length = rows


def _own_config(model: PreTrainedModel, record: _Record) -> Any:
    """Give the model a config of its own, with those inside it, and return it; the one it has may be shared."""
    copies: dict[int, Any] = {}
    config = copy.deepcopy(model.config, copies)
    for module in model.modules():
        shared = module.__dict__.get("config")
        if id(shared) in copies:
            record.attributes.append((module, "config", shared))
            module.__dict__["config"] = copies[id(shared)]
    return config


def _replace(body: nn.Module, path: str, new: nn.Module, record: _Record) -> None:
    parent_path, _, name = path.rpartition(".")
    parent = body.get_submodule(parent_path)
    record.modules.append((parent, name, parent.get_submodule(name)))
    new.train(body.training)
    parent._modules[name] = new


def _swap(module: nn.Module, cls: type[nn.Module], record: _Record) -> None:
    record.classes.append((module, type(module)))
    module.__class__ = cls


def _swap_model(module: Any, joints: tuple[Joint, ...], record: _Record) -> None:
    stock: Any = type(module)
    _swap(module, model_class(stock, rebuild), record)
    module.__dict__["posenc_joints"] = joints


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
        for name in ("posenc_joint", "posenc_joints", "posenc_family", "posenc_layer"):
            module.__dict__.pop(name, None)
    weight = next(model.parameters())
    for parent, name, module in record.modules:
        # it stood aside while the model may have moved; the frequencies of a rotary module stay in float32
        table = isinstance(module, nn.Embedding) or hasattr(module, "weights")
        module.to(device=weight.device, dtype=weight.dtype if table else None)
        parent._modules[name] = module.train(model.training)
    for module, name, value in record.attributes:
        module.__dict__[name] = value
    for part in record.plan.parts.values():
        part.body_of(model)._modules.pop("posenc", None)
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
        model.__dict__["posenc_joints"] = model.base_model.posenc_joints
        return
    model.__class__ = type(model).posenc_stock  # type: ignore[attr-defined]
    plan = make_plan(model, from_dict(spec), find_family(config.model_type))
    _install_interposer(model, config, _Record(plan=plan))
    model.__dict__[RECORD] = _Record(plan=plan)  # nothing to undo: what stood there before was never trained
