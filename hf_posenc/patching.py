"""Patch a model in place, undo it, and say beforehand what would change."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.config import EncodingConfig
from hf_posenc.errors import ConfigError, PatchStateError, UnsupportedFamilyError
from hf_posenc.family import RULED_OUT, DeclaredAttention, Family, find_family
from hf_posenc.interposer import looks_up_attention
from hf_posenc.planning import PatchPlan, make_plan
from hf_posenc.surgery import install, record_of, remove
from hf_posenc.trial import propose
from hf_posenc.verify import Probe, verify

M = TypeVar("M", bound=PreTrainedModel)


def plan(model: PreTrainedModel, config: EncodingConfig, *, family: Family | None = None) -> PatchPlan:
    """Say what `patch` would change, path by path, and by which route; changes nothing.

    Args:
        model: a transformers model, with or without a head.
        config: the encoding to put in, for example `posenc.Alibi()`.
        family: where positions enter the model, for model types that no record describes.

    Raises:
        ConfigError: the encoding does not fit the model.
        UnsupportedFamilyError: the model type is unknown, or the model is not built as its record says.
        UnsupportedEncodingError: this model cannot carry the encoding correctly.
        BackendError: the model's attention backend cannot carry it.
        PatchStateError: the model is patched already, or something holds on to it that would miss the change.
    """
    if not isinstance(config, EncodingConfig):
        raise ConfigError(f"expected an encoding config such as posenc.RoPE(), got: {config!r}")
    _check_state(model)
    return make_plan(model, config, _family_of(model) if family is None else family)


def patch(model: M, config: EncodingConfig, *, family: Family | None = None, verify: bool = True) -> M:
    """Replace the position encoding of this one model, in place.

    Args:
        model: a transformers model, with or without a head.
        config: the encoding to put in.
        family: where positions enter the model, for model types that no record describes.
        verify: prove on a short random input that the patch does what it should, and undo it if not. Costs about
            seventeen forward passes over at most 20 tokens.

    Returns:
        The same model.

    Raises:
        VerificationError: the patched model does not behave as its encoding promises; it is unpatched again.
        PosencError: what `plan` raises. The model is untouched then.
    """
    decided = plan(model, config, family=family)
    before = {name: Probe(part.model_of(model)) for name, part in decided.parts.items()} if verify else None
    install(model, decided)
    if before is not None:
        try:
            _verify(model, before=before)
        except BaseException:
            remove(model)
            raise
    return model


_verify = verify  # `patch` has a parameter of that name


def unpatch(model: M) -> M:
    """Undo `patch`: the model is bit for bit what it was, and returned.

    Raises:
        PatchStateError: the model is not patched, or was loaded with its encoding.
    """
    remove(model)
    return model


def is_patched(model: nn.Module) -> bool:
    """Tell whether the position encoding of this model was replaced by this package, in this process or before."""
    return record_of(model) is not None


def discover(model: PreTrainedModel) -> Family:
    """Propose a family record for a model by looking at its modules. It is a guess: print it, check it, pass it on.

    Raises:
        UnsupportedFamilyError: nothing in the model looks like one attention module per layer.
    """
    base = model.base_model
    counts = Counter(type(module).__name__ for module in base.modules() if "Attention" in type(module).__name__)
    layers = model.config.num_hidden_layers
    names = [name for name, count in counts.items() if count == layers and "Cross" not in name]
    inner = [name for name in names if "Self" in name] or names[-1:]
    if not inner:
        raise UnsupportedFamilyError(
            f"no class of attention module occurs {layers} times in {type(model).__name__}, once per layer; "
            f"found {dict(counts) or 'none'}."
        )
    table = rotary = None
    offset = 0
    for path, module in base.named_modules():
        leaf = path.rsplit(".", 1)[-1]
        if isinstance(module, nn.Embedding) and ("position" in leaf or leaf == "wpe"):
            table, offset = path, int(getattr(module, "offset", 0))
        if type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "inv_freq"):
            rotary = path
    padding = base.get_submodule(table).padding_idx if table else None
    return Family(
        model_types=(model.config.model_type,),
        attention=tuple(inner),
        table=table,
        table_offset=offset,
        rotary=rotary,
        counts_padding=padding is not None,
        token_type_buffer=any(name.endswith("token_type_ids") for name, _ in base.named_buffers()),
        declared=_declared(base, inner, model.config.hidden_size),
    )


def _declared(base: nn.Module, classes: list[str], hidden_size: int) -> DeclaredAttention | None:
    """Return what the stock output confirms of attention modules that look up no attention function."""
    modules = [module for module in base.modules() if type(module).__name__ in classes]
    own = [module for module in modules if not looks_up_attention(type(module))]
    return propose(own[0], hidden_size) if own and not next(base.parameters()).is_meta else None


def _family_of(model: PreTrainedModel) -> Family:
    """Return the record of a model; where there is none, raise UnsupportedFamilyError with one to check and paste."""
    model_type = model.config.model_type
    try:
        return find_family(model_type)
    except UnsupportedFamilyError as error:
        if model_type in RULED_OUT:
            raise
        if model.config.is_encoder_decoder:
            raise UnsupportedFamilyError(
                f"no family record describes model_type {model_type!r}, which has positions in an encoder and in a "
                "decoder; write one with stacks=('encoder', 'decoder') and pass it as family=."
            ) from None
        try:
            record = discover(model)
        except UnsupportedFamilyError:
            raise error from None
        text = f"posenc.{record}".replace("DeclaredAttention(", "posenc.DeclaredAttention(")
        raise UnsupportedFamilyError(f"{error} It proposes:\n\n{text}") from None


def _check_state(model: object) -> None:
    """Raise PatchStateError where a patch now would be missed by whoever wrapped or holds the model."""
    if hasattr(model, "peft_config") or any(type(m).__module__.startswith("peft.") for m in _modules(model)):
        raise PatchStateError("the model carries PEFT adapters; patch the base model first, then add adapters.")
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedFamilyError(f"expected a transformers PreTrainedModel, got: {type(model).__name__}")
    if record_of(model) is not None:
        raise PatchStateError("the model is patched already; call posenc.unpatch(model) first.")
    if any("_hf_hook" in module.__dict__ for module in model.modules()):
        raise PatchStateError("accelerate hooks are attached to the model; patch first, then dispatch or prepare it.")
    if _is_optimized(model):
        raise PatchStateError(
            "an optimizer holds the parameters of this model and would go on training the old ones; "
            "patch first, then create the optimizer."
        )


def _modules(model: object) -> list[nn.Module]:
    return list(model.modules()) if isinstance(model, nn.Module) else []


def _is_optimized(model: nn.Module) -> bool:
    """Tell whether a live optimizer has a parameter of a model in one of its groups.

    An optimizer's list is one holder more than the modules are. Only then is it looked for: that goes through every
    object there is, which takes longer than all the rest of a plan.
    """
    held = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    parameters, spare = list(model.parameters()), nn.Parameter(torch.empty(0))
    (alone,) = _holders([spare])  # `spare` counts as a module's hold on a parameter does
    counts = zip(parameters, _holders(parameters), strict=True)
    more = [parameter for parameter, count in counts if count - held[id(parameter)] > alone - 1]
    for holder in gc.get_referrers(*more) if more else ():
        if isinstance(holder, list):
            for group in gc.get_referrers(holder):
                if isinstance(group, dict) and group.get("params") is holder and "lr" in group:
                    return True
    return False


def _holders(parameters: list[nn.Parameter]) -> list[int]:
    return [sys.getrefcount(parameter) for parameter in parameters]
