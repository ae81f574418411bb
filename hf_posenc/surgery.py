"""What a patch changes in a model, decided first and then done: plan, install, remove."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.config import EncodingConfig, from_dict
from hf_posenc.errors import PatchStateError, UnsupportedFamilyError
from hf_posenc.family import Family, find_family
from hf_posenc.inputs import NoRotation, PositionTable
from hf_posenc.interposer import Joint, check_backend, interposed, uses_attention
from hf_posenc.length import table_start
from hf_posenc.modeling import config_class, model_class
from hf_posenc.positions import Geometry

RECORD = "posenc_record"


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
    table = body.get_submodule(family.table) if family.table else None
    hidden = config.hidden_size if table is None or isinstance(table, PositionTable) else table.weight.shape[1]
    rope = getattr(config, "rope_parameters", None) or {}
    length = getattr(config, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    stated = config.max_position_embeddings - (table_start(family, config) if family.counts_padding else 0)
    return Geometry(
        hidden_size=int(hidden),
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_position_embeddings=int(length or stated),
        causal=all(getattr(module, "is_causal", True) for module in attention_modules(body, family).values()),
    )


def make_plan(model: PreTrainedModel, config: EncodingConfig, family: Family) -> PatchPlan:
    """Decide what changes, and refuse what cannot be right; touches nothing.

    Raises:
        ConfigError, UnsupportedEncodingError: the encoding does not fit the model.
        UnsupportedFamilyError: the model is not built as the record says.
        BackendError: the model's attention backend cannot carry the encoding.
    """
    body = family.body_of(model)
    found = attention_modules(body, family)
    expected = model.config.num_hidden_layers
    if len(found) != expected:
        raise UnsupportedFamilyError(
            f"{type(model).__name__} has {expected} layers, but {len(found)} self-attention modules of the declared "
            f"classes {', '.join(family.attention)}; its record does not describe it. See posenc.discover(model)."
        )
    geometry = geometry_of(model, family)
    rope = getattr(model.config, "rope_parameters", None) if family.rotary else None
    config = config.for_model(geometry, rope)
    config.check(geometry)
    prefix = next(path for path, module in model.named_modules() if module is body)
    prefix = prefix and f"{prefix}."
    changes: dict[str, tuple[str, str]] = {}
    parameters = native_parameters(config, geometry, family)
    if family.rotary and parameters:
        now = type(body.get_submodule(family.rotary)).__name__
        changes[prefix + family.rotary] = (_rope_text(rope or {}, now), _rope_text(parameters, now))
        return PatchPlan(family=family, config=config, geometry=geometry, route="native", changes=changes)
    # nothing that depends on the length is allocated: the module is built to be asked, on no device
    encoding = _on_meta(config, geometry)
    check_backend(encoding, model.config._attn_implementation)
    for path, stand_in in ((family.table, PositionTable), (family.rotary, NoRotation)):
        if path:
            changes[prefix + path] = (type(body.get_submodule(path)).__name__, stand_in.__name__)
    attention = found if uses_attention(encoding) else {}
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

    It cannot for `dynamic`: transformers takes the base from the length of the call, so that its cached decode and its
    full forward disagree; the interposer gives every query the base of its own position.
    """
    parameters = config.rope_parameters(geometry)
    if family.rotary is None or parameters is None or parameters["rope_type"] == "dynamic":
        return None
    if family.partial_rotary:
        return parameters
    return parameters if parameters.pop("partial_rotary_factor") == 1.0 else None


def _rope_text(parameters: Any, name: str) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in parameters.items())})"


def _on_meta(config: EncodingConfig, geometry: Geometry) -> Any:
    with torch.device("meta"):
        return config.build(geometry)


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
    encoding = plan.config.build(plan.geometry).to(device=weight.device, dtype=weight.dtype)
    joint = Joint(body)
    if family.table:
        table = body.get_submodule(family.table)
        start = table_start(family, model.config)
        encoding.adopt(table.weight[start:])
        _replace(body, family.table, PositionTable(joint), record)
    if family.rotary:
        frequencies = body.get_submodule(family.rotary).inv_freq
        _replace(body, family.rotary, NoRotation(width=2 * len(frequencies)), record)
    for module in attention_modules(body, family).values() if uses_attention(encoding) else ():
        stock: Any = type(module)
        _swap(module, interposed(stock, plan.config.label), joint, record)
    body.posenc = encoding
    _describe(config, plan)
    _use_config(model, config, record)
    body.__dict__["posenc_family"] = family
    for part in dict.fromkeys((model, model.base_model, body)):
        stock = type(part)
        _swap(part, model_class(stock, rebuild), joint, record)
    if getattr(model, "loss_type", "") is None and plan.geometry.causal and model.get_output_embeddings() is not None:
        # transformers reads the loss off the class name, and finds none in names such as GPT2LMHeadModel
        record.attributes.append((model, "loss_type", None))
        model.loss_type = "ForCausalLM"


def _describe(config: Any, plan: PatchPlan) -> None:
    """Make the copied config that of a patched model."""
    if not config.model_type.startswith("posenc_"):
        stock: Any = type(config)
        config.__class__ = config_class(stock)
    config.posenc = plan.config.to_dict()
    # the length that the weights were trained for stays on record when a longer table changes the model's own
    config.original_max_position_embeddings = plan.geometry.max_position_embeddings
    parameters = plan.config.rope_parameters(plan.geometry)
    if plan.family.rotary and parameters and parameters["rope_type"] == "dynamic":
        parameters.pop("original_max_position_embeddings")  # transformers reads it off the model's own length here
        config.rope_parameters = parameters  # for whoever reads the config; `posenc` is what counts
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
        for name in ("posenc_joint", "posenc_family"):
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
    model.__class__ = type(model).posenc_stock  # type: ignore[attr-defined]
    plan = make_plan(model, from_dict(spec), find_family(config.model_type))
    _install_interposer(model, config, _Record(plan=plan))
    model.__dict__[RECORD] = _Record(plan=plan)  # nothing to undo: what stood there before was never trained
