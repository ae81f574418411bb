"""A start for rotations: queries and keys are fitted until they attend as those of the original did.

A rotation has no parameters. What it can say of positions is decided by the weights that make queries and keys: a
constant part of both, turned against each other, is a curve over the distance, and the fast pairs of dimensions, which
a rotation mixes up, must not carry what words say. So these weights are fitted, layer by layer from below, on what
reaches the attention of a layer in the converted model, whose lower layers are fitted by then. The goal is the
attention of the original on the same rows (mean KL divergence of a query, in nats). Gradients run through the attention
of the one layer only. Where layers share an attention module (ALBERT), all its calls count.

Every weight of an attention module takes part that its probabilities depend on, whatever it is called: those of values
and output get no gradient, and stay.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.anatomy import own_rope
from hf_posenc.errors import UnsupportedFamilyError
from hf_posenc.evaluation.attention_record import reporting_attention
from hf_posenc.evaluation.scoring import evaluation_mode
from hf_posenc.planning import PatchPlan

PAIRS = 2**28
"""Probabilities of one module that are kept at a time, 1 GiB in float32; longer rows make fewer."""
AT_ONCE = 8
"""Rows in one step."""
STEPS = 64
"""Steps of a layer."""
STEP = 0.1
"""First step of a weight over the root mean square of its tensor; the steps fall to 0 along a cosine."""
LEAST_SIZE = 1e-3
"""Root mean square that counts for tensors of smaller numbers: biases may start at zero."""
_LEAST = 1e-20


def fit_attention(model: PreTrainedModel, original: PreTrainedModel, rows: Tensor, plan: PatchPlan) -> None:
    """Fit what makes queries and keys of a patched model, in place.

    Args:
        model: patched; weights that do not require gradients stay.
        original: the same model before the patch, which shares none of the weights that are fitted.
        rows: (N, n) token ids, of which as many are read as `PAIRS` allows.
        plan: of the patch.

    Raises:
        UnsupportedFamilyError: an attention module reports no probabilities.
    """
    heads = plan.geometry.num_attention_heads
    calls_a_pass = math.ceil(model.config.num_hidden_layers / len(plan.attention))
    rows = rows[: max(1, PAIRS // (calls_a_pass * heads * rows.shape[1] ** 2))].to(model.device)
    batches = rows.split(AT_ONCE)
    with ExitStack() as stack:
        for each in (model, original):
            stack.enter_context(reporting_attention(each))
            stack.enter_context(evaluation_mode(each))
        for path in plan.attention:
            goals = [_probabilities(output, path) for batch in batches for *_, output in _calls(original, path, batch)]
            calls = [call[:2] for batch in batches for call in _calls(model, path, batch)]
            _fit(model.get_submodule(path), path, calls, goals)


def gains_rotation(model: PreTrainedModel, plan: PatchPlan) -> bool:
    """Tell whether an unpatched model, which turns no queries and keys, will do so after the planned patch."""
    encoding = plan.config.build_layers(plan.geometry, len(plan.attention))
    return encoding.overrides("rotate") and own_rope(model, plan.family, plan.geometry) is None


def _calls(model: PreTrainedModel, path: str, rows: Tensor) -> list[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Run a model and return what one of its modules was given, and what it gave, in every call of it."""
    found: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found.append((args, dict(kwargs), output))

    with ExitStack() as stack:
        stack.callback(model.get_submodule(path).register_forward_hook(keep, with_kwargs=True).remove)
        model(input_ids=rows, use_cache=False, output_attentions=True)
    return found


def _probabilities(output: Any, path: str) -> Tensor:
    """Return the attention probabilities, (b, h, n, n), among what an attention module gave."""
    for given in output if isinstance(output, tuple | list) else ():
        if isinstance(given, Tensor) and given.ndim == 4 and given.shape[-1] == given.shape[-2]:
            return given
    raise UnsupportedFamilyError(f"{path} reports no attention probabilities to be fitted to; leave calibrate out.")


def _fit(module: nn.Module, path: str, calls: list[Any], goals: list[Tensor]) -> None:
    """Take `STEPS` of Adam, in proportion to the size of every weight that is not frozen."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    if not weights:
        return
    sizes = [max(float(weight.detach().square().mean().sqrt()), LEAST_SIZE) for weight in weights]
    groups = [{"params": [weight], "lr": STEP * size} for weight, size in zip(weights, sizes, strict=True)]
    search = torch.optim.Adam(groups)
    falls = torch.optim.lr_scheduler.LambdaLR(search, lambda step: (1 + math.cos(math.pi * step / STEPS)) / 2)
    with torch.enable_grad():
        for step in range(STEPS):
            (args, kwargs), goal = calls[step % len(calls)], goals[step % len(goals)]
            found = _probabilities(module(*args, **kwargs), path)
            ratio = goal.clamp(min=_LEAST).log() - found.clamp(min=_LEAST).log()
            search.zero_grad()
            (goal * ratio).sum(-1).mean().backward()
            search.step()
            falls.step()
    search.zero_grad()
