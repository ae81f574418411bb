"""Whether a record of an attention class is true: the declared forward against the stock one, on a random input.

Asked before anything is patched, so that a record that is wrong, and a transformers that attends in another way than
the one a record was written for, are refused instead of believed.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.config import Encoding
from hf_posenc.declared import is_causal, replacement
from hf_posenc.errors import UnsupportedFamilyError
from hf_posenc.family import LAYOUTS, DeclaredAttention, Family
from hf_posenc.joint import Joint

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest deviation from the stock output that counts as equal, as a share of its largest magnitude (at least 1).

In float64 that of float32's rounding: stock classes take softmax or their scores in float32 whatever they are given.
"""
HALF_TOLERANCE = 0.05
TOKENS = 16
_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("query_key_value",),
    ("c_attn",),
    ("Wqkv",),
    ("qkv",),
    ("in_proj",),
)
_OUTPUTS = ("out_proj", "o_proj", "dense", "c_proj", "out_lin", "o")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


def check(module: nn.Module, record: DeclaredAttention, hidden_size: int, rotary_width: int | None = None) -> None:
    """Compare the declared forward without positions with the stock one, likewise without, on a random input.

    Args:
        module: an unpatched attention module; left as it was.
        record: what is said of it.
        hidden_size: width of what it takes.
        rotary_width: columns of the cosines that it takes, if any.

    Raises:
        UnsupportedFamilyError: the record does not describe it; the message says how far off it is.
    """
    name, tolerance = type(module).__name__, TOLERANCE.get(_weight(module).dtype, HALF_TOLERANCE)
    try:
        size = difference(module, record, hidden_size, rotary_width)
    except UnsupportedFamilyError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedFamilyError(
            f"{name} cannot be run as its record declares it ({type(error).__name__}: {error}). {record}"
        ) from error
    if not size <= tolerance:
        raise UnsupportedFamilyError(
            f"{name} gives something else than what its record declares: off by {size:.3g} of the largest magnitude, "
            f"at most {tolerance:.3g} allowed. Either the record is wrong, or this transformers attends in another way "
            f"than the one it was written for. {record}"
        )


def difference(module: Any, record: DeclaredAttention, hidden_size: int, rotary_width: int | None = None) -> float:
    """Return how far the declared forward is from the stock one, relative to the largest magnitude (at least 1).

    Arguments and errors as in `check`.
    """
    weight = _weight(module)
    tokens, generator = TOKENS, torch.Generator().manual_seed(0)
    if record.local:  # as far as a window shows, or the table of who sees whom, which is as long as the trained length
        tokens = min(TOKENS + getattr(module.config, record.local[1]), module.config.max_position_embeddings)
    others: dict[str, Any] = {}
    states, other = (torch.randn(2, tokens, hidden_size, generator=generator).to(weight) for _ in range(2))
    if record.residual:
        others = {record.residual: other}
    cls = replacement(type(module), "Declared", Family(model_types=(), attention=(), declared=record))
    twin = cls.__new__(cls)
    twin.__dict__.update(module.__dict__)
    body = nn.Module()
    body.posenc, body.__dict__["config"] = Encoding(), _Eager()
    twin.__dict__["posenc_joint"] = Joint(body)
    worst = 0.0
    with _evaluated(module), torch.no_grad():
        twin.training = False
        for mask in _masks(module, record, states):
            inputs = _stock_inputs(module, record, states, rotary_width) | others
            inputs["attention_mask"] = mask
            expected, found = module(states, **inputs)[0], twin(states, **inputs)[0]
            if found.shape != expected.shape:
                return float("inf")
            worst = max(worst, float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0)))
    return worst


def _masks(module: Any, record: DeclaredAttention, states: Tensor) -> Iterator[Tensor]:
    """Yield masks, (b, 1, n, n), in the form that the module takes: one that hides nothing, and a causal one.

    The first tells who hides the later keys, the module or its mask.
    """
    nothing = states.new_zeros(len(states), 1, states.shape[1], states.shape[1])
    masks = [nothing, nothing.masked_fill(torch.ones_like(nothing).triu(1) > 0, torch.finfo(states.dtype).min)]
    for mask in masks if is_causal(module, record) and not record.hides_future else masks[:1]:
        yield mask < 0 if record.mask_hides else mask


class _Eager:
    """What `difference` has for a model config."""

    _attn_implementation = "eager"


def _weight(module: nn.Module) -> Tensor:
    return next(parameter for parameter in module.parameters() if parameter.is_floating_point())


@contextmanager
def _evaluated(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _stock_inputs(module: Any, record: DeclaredAttention, states: Tensor, width: int | None) -> dict[str, Any]:
    """Return what a stock forward is given beside the hidden states, so that no position is heard of.

    Raises:
        UnsupportedFamilyError: it asks for something that nobody here knows.
    """
    rows, tokens, _ = states.shape
    known: dict[str, Any] = {
        "attention_mask": None,
        "position_ids": torch.arange(tokens, device=states.device)[None],
        "position_bias": None,
    }
    if width is None:
        known["alibi"] = states.new_zeros(rows * int(getattr(module, record.heads)), 1, tokens)
    else:
        known["alibi"] = None
        known["position_embeddings"] = (states.new_ones(1, tokens, width), states.new_zeros(1, tokens, width))
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    unknown = required - set(known) - {record.residual}
    if unknown:
        raise UnsupportedFamilyError(
            f"the forward of {type(module).__name__} cannot be tried: it asks for {', '.join(sorted(unknown))}."
        )
    names = {p.name for p in parameters}
    return {name: value for name, value in known.items() if name in names}


def propose(module: nn.Module, hidden_size: int) -> DeclaredAttention | None:
    """Return a record that the stock forward of an attention module agrees with, or None where none was found.

    Args:
        module: an attention module that looks up no attention function.
        hidden_size: width of what it takes.
    """
    names = set(module.__dict__) | set(module._modules)
    projections = next((found for found in _PROJECTIONS if set(found) <= names), None)
    heads = next((name for name in _HEADS if name in names), None)
    dropout = next((name for name in ("attention_dropout", "attn_dropout", "dropout") if name in names), None)
    if projections is None or heads is None or dropout is None:
        return None
    first = DeclaredAttention(
        projections=projections,
        output=next((name for name in _OUTPUTS if name in names), None),
        heads=heads,
        layer="layer_id" if "layer_id" in names else "layer_idx",
        causal="is_decoder" if "is_decoder" in names else True,
        dropout=dropout,
        residual="residual" if "residual" in inspect.signature(type(module).forward).parameters else None,
        local=("attention_type", "window_size") if "attention_type" in names else None,
    )
    layouts = LAYOUTS if len(projections) == 1 else LAYOUTS[:1]
    causes = dict.fromkeys((first.causal, False))
    for layout, scaling, causal, hides in product(layouts, (None, 1.0), causes, (False, True)):
        fields: dict[str, Any] = {"layout": layout, "scaling": scaling, "causal": causal, "hides_future": hides}
        record = dataclasses.replace(first, **fields)
        try:
            check(module, record, hidden_size)
        except UnsupportedFamilyError:
            continue
        return record
    return None
