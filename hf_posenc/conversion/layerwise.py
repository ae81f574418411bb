"""Every layer taught by itself: it gets what reaches it in the original, and is to make what the original makes of it.

One forward pass of each model does for all layers: hooks put the original's states in the place of the converted
model's own before every layer, so that no gradient passes from one layer to the next. Where the original adds its
positions to a stream that layers only add to, they are taken out of what the converted model gets, and of what it is to
make, since it will never see them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.anatomy import attention_modules
from hf_posenc.errors import UnsupportedFamilyError
from hf_posenc.evaluation.scoring import evaluation_mode
from hf_posenc.planning import PatchPlan

_TOLERANCE = 1e-4
States = list[tuple[Tensor, Tensor]]


def attention_paths(model: PreTrainedModel, plan: PatchPlan) -> list[str]:
    """Return the paths of the attention modules of a model, those too that its patch leaves as they are."""
    body = plan.body_of(model)
    paths = {id(module): path for path, module in model.named_modules()}
    return [paths[id(module)] for module in attention_modules(body, plan.family).values()]


def layer_paths(model: PreTrainedModel, plan: PatchPlan) -> list[str]:
    """Return the paths of the layers that hold the attention modules of a model, such as `transformer.h.0`.

    Raises:
        UnsupportedFamilyError: attention modules do not each have a layer of their own, as where layers are shared.
    """
    attention = attention_paths(model, plan)
    found = [match[1] for path in attention if (match := re.match(r"(.*?\.\d+)\.", path))]
    if len(set(found)) != len(attention) or len(attention) < model.config.num_hidden_layers:
        raise UnsupportedFamilyError(
            f"layerwise needs a layer for every attention module, and {type(model).__name__} has none, or has layers "
            "that share one; leave the stage layerwise out."
        )
    return found


def layerwise_loss(
    model: nn.Module,
    inputs: dict[str, Tensor],
    *,
    original: PreTrainedModel,
    paths: Sequence[str],
    positions: Tensor | None,
) -> Tensor:
    """Return the mean over layers of the squared error of what a layer adds, over the mean square of what it adds.

    Args:
        model: the converted model, or what wraps it for several processes.
        inputs: of both models, with `input_ids` (b, n); what an `attention_mask` (b, n) hides does not count.
        original: the model before.
        paths: of the layers, in both models.
        positions: (n, width), what the original added to the stream, or None where it cannot be taken out.
    """
    with evaluation_mode(original):
        given = _run(original, original, inputs, paths, None)
    if positions is not None:
        given = [(states - positions, output - positions) for states, output in given]
    made = _run(model, getattr(model, "module", model), inputs, paths, [states for states, _ in given])
    mask = inputs.get("attention_mask")
    seen = ... if mask is None else mask.bool()
    losses = []
    for (states, wanted), (_, output) in zip(given, made, strict=True):
        added = (wanted - states)[seen].float().square().mean()
        losses.append((output - wanted)[seen].float().square().mean() / added)
    return torch.stack(losses).mean()


def stream_positions(original: PreTrainedModel, path: str, rows: Tensor | None, input_ids: Tensor) -> Tensor | None:
    """Return the rows of a table, (rows, width), if they are just what reaches the first layer beside the words.

    None where something stands in between, such as a normalisation, and where there is no table.
    """
    if rows is None:
        return None
    with evaluation_mode(original):
        states = _run(original, original, {"input_ids": input_ids}, [path], None)[0][0]
        embed: Any = original.get_input_embeddings()
        words: Tensor = embed(input_ids)
    missed = (states - words - rows[: input_ids.shape[1]].to(words)).abs().max()
    return rows if float(missed) <= _TOLERANCE * float(states.abs().max()) else None


def _run(
    model: nn.Module, owner: nn.Module, inputs: dict[str, Tensor], paths: Sequence[str], forced: list[Tensor] | None
) -> States:
    """Run a model and return what reached and what left each layer, (b, n, width) each; `forced` goes in instead."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def before(index: int) -> Any:
        def replace(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if forced is None:
                return None
            if args:
                return (forced[index], *args[1:]), kwargs
            return args, kwargs | {"hidden_states": forced[index]}

        return replace

    def after(index: int) -> Any:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            states: Tensor = args[0] if args else kwargs["hidden_states"]
            found[index] = states, output[0] if isinstance(output, tuple) else output

        return keep

    with ExitStack() as stack:
        for index, path in enumerate(paths):
            layer = owner.get_submodule(path)
            stack.callback(layer.register_forward_pre_hook(before(index), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(after(index), with_kwargs=True).remove)
        model(**inputs, use_cache=False)
    return [found[index] for index in range(len(paths))]
