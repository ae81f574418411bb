"""What all rows of a removed position table share lives on, as a part of every token's embedding.

A token embedding and a position were always added, so the mean of the positions is a constant that the rest of the
model was trained with. Adding it to every row of the token embedding keeps it, and costs no weight and no code: it is
saved, exported and published like any embedding. A head that is tied to the embedding then adds one number, the product
of its input and the constant, to the logits of all words alike, the padding token too, which softmax does not see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.family import find_family
from hf_posenc.length import table_rows, table_start
from hf_posenc.planning import PatchPlan

_MIXER = "map_inputs_layer"
"""Where RoCBert mixes shapes and sounds into its words, before it adds positions."""


def position_rows(model: PreTrainedModel) -> Tensor | None:
    """Return a copy of the rows that an unpatched model adds at positions 0, 1, ..., (rows, width), or None.

    None too where they are not added to the token embedding itself: a model that scales, projects or mixes its
    embedding first, or one with several stacks.
    """
    family = find_family(model.config.model_type)
    if family.table is None or family.stacks:
        return None
    body: Any = family.body_of(model)
    rows = table_rows(body.get_submodule(family.table))[table_start(family, model.config) :]
    words: Any = model.get_input_embeddings()
    scaled = getattr(words, "embed_scale", None) not in (None, 1.0)
    mixed = any(hasattr(module, _MIXER) for module in body.modules())
    if scaled or mixed or rows.shape[1] != words.weight.shape[1]:
        return None
    return rows.detach().clone()


def can_absorb(model: PreTrainedModel, plan: PatchPlan) -> bool:
    """Tell whether an unpatched model adds a table to its token embedding that the planned patch takes away."""
    return not plan.keeps and position_rows(model) is not None


def absorb(model: PreTrainedModel, constant: Tensor) -> Callable[[], None]:
    """Add a constant, (width,), to every token's embedding, in place and in whatever is tied to it.

    The weight is replaced, not written to: whoever else holds the old one keeps it as it was.

    Returns:
        A function that puts the old weight back.
    """
    words: Any = model.get_input_embeddings()
    old: nn.Parameter = words.weight
    new = nn.Parameter((old.detach().double() + constant.double()).to(old), requires_grad=old.requires_grad)
    _exchange(model, old, new)
    return lambda: _exchange(model, new, old)


def _exchange(model: PreTrainedModel, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is old:
                module._parameters[name] = new
