"""What a model has, read off its modules and its config as its record says: attention, numbers, rotation, bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.declared import is_causal, key_value_heads
from hf_posenc.errors import UnsupportedFamilyError
from hf_posenc.family import Family
from hf_posenc.inputs import PositionTable
from hf_posenc.length import table_rows, trained_length
from hf_posenc.positions import Geometry


def attention_modules(body: nn.Module, family: Family) -> dict[str, nn.Module]:
    """Return the self-attention modules of a body by path; cross-attention is left out."""
    return {
        path: module
        for path, module in body.named_modules()
        if any(cls.__name__ in family.attention for cls in type(module).__mro__)
        and not getattr(module, "is_cross_attention", False)
        and path.rpartition(".")[2] != family.cross_attention
    }


def biased(found: Mapping[str, nn.Module], family: Family) -> dict[str, nn.Module]:
    """Return those attention modules, by path, that hold a bias of the model's own."""
    return {path: module for path, module in found.items() if family.bias and getattr(module, f"has_{family.bias}")}


def geometry_of(model: PreTrainedModel, family: Family) -> Geometry:
    """Read the plain numbers of a model of one body that encodings depend on.

    Raises:
        UnsupportedFamilyError: nothing says how long a text the model was trained for.
    """
    config, body = model.config, family.body_of(model)
    found = list(attention_modules(body, family).values())
    table = body.get_submodule(family.table) if family.table else None
    embedded = getattr(config, "embedding_size", None) if family.table is None else None
    hidden = embedded or config.hidden_size
    if table is not None and not isinstance(table, PositionTable):
        hidden = table_rows(table).shape[1]
    heads = getattr(config, family.heads)
    kept = None if "num_key_value_heads" in config.attribute_map else getattr(config, "num_key_value_heads", None)
    if family.declared and found:
        kept = key_value_heads(found[0], family.declared)
    width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return Geometry(
        hidden_size=int(hidden),
        num_attention_heads=heads,
        num_key_value_heads=kept or heads,
        head_dim=width or config.hidden_size // heads,
        max_position_embeddings=trained_length(family, config),
        causal=all(_is_causal(module, family) for module in found),
    )


def _is_causal(module: nn.Module, family: Family) -> bool:
    if family.causal is not None:
        return family.causal
    return is_causal(module, family.declared) if family.declared else bool(getattr(module, "is_causal", True))


def check_record(model: PreTrainedModel, family: Family, found: dict[str, nn.Module]) -> None:
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


def own_rope(model: PreTrainedModel, family: Family, geometry: Geometry) -> Mapping[str, Any] | None:
    """Return the model's own rotation in transformers' terms, or None where it has none."""
    if family.sine_first:
        share = (getattr(model.config, "rotary_dim", None) or geometry.head_dim) / geometry.head_dim
        return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    if family.interleaved and not family.rotary:
        return {"rope_type": "default", "rope_theta": 10000.0}  # RoFormer's, which stands in no config
    if family.rotary is None:
        return None
    rope: Mapping[str, Any] | None = getattr(model.config, "rope_parameters", None)
    theta = getattr(model.config, "rope_theta", None)
    return {"rope_type": "default", "rope_theta": theta} if rope is None and theta else rope


def by_layer_type(rope: Mapping[str, Any] | None) -> bool:
    """Tell whether a model has rotary parameters for every type of layer, as those with two thetas do."""
    return rope is not None and any(isinstance(value, dict) for value in rope.values())
