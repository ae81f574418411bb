"""The four terms of the first layer's scores: words and places of the query with words and places of the key.

Where positions are added to the embedding, a score is (E_i + P_i) W_q^T W_k (E_j + P_j) / sqrt(d), which multiplies out
into four. The LayerNorms between the sum and the projections are taken at the scale that they really have, so that they
too pass on E and P apart, and the four terms add up to the very scores of the model. Biases belong to E.

No projection is named here. The share of E is what reaches the first attention module when the table is silenced and
the norms are held at their scale; the rest is the share of P. Both are then laid side by side as one sequence, the
attention module is asked once how each looks at each, and its answer holds the four terms as four blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import ConfigError, UnsupportedFamilyError
from hf_posenc.evaluation.attention_record import centred_scores
from hf_posenc.family import Family, find_family

TERMS = ("content_content", "content_position", "position_content", "position_position")
"""The terms, query before key."""
_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class ScoreTerms:
    """The four terms of the scores of the first layer, on the given text.

    Attributes:
        share: term -> (h,) float64, its covariance with the score over the score's variance. The four of a head add up
            to one; a negative one works against the rest.
        deviation: term -> (h,) float64, its standard deviation in score units (nats). Terms that cancel each other are
            large here and small in the score.
        total: (h,) float64, the standard deviation of the score.
    """

    share: dict[str, Tensor]
    deviation: dict[str, Tensor]
    total: Tensor


def score_terms(model: PreTrainedModel, rows: Tensor) -> ScoreTerms:
    """Split the scores of the first attention layer into the four terms.

    Args:
        model: in eval mode, without gradients, within `reporting_attention`.
        rows: (b, n) token ids.

    Raises:
        UnsupportedFamilyError: the model adds no table of positions to its embedding, has no record, or does something
            between the sum and its first attention that no fixed scale makes linear.
        ConfigError: scores lie further apart than the probabilities of the model's dtype can tell.
    """
    totals: dict[str, Tensor] = {}
    for row in rows.to(model.device).split(1):
        content, position, attention = input_parts(model, row)
        terms = _blocks(attention, content, position)  # term -> (h, n, n), each less the mean of its row
        score = torch.stack(list(terms.values())).sum(0)
        sums = {name: (term * score).sum((1, 2)) for name, term in terms.items()}
        sums |= {f"{name} squared": term.square().sum((1, 2)) for name, term in terms.items()}
        sums["pairs"] = torch.tensor(float(_pairs(score.shape[-1], attention).sum()))
        totals = {name: totals.get(name, 0) + value.cpu() for name, value in sums.items()}
    whole = torch.stack([totals[name] for name in TERMS]).sum(0)
    return ScoreTerms(
        share={name: totals[name] / whole.clamp(min=1e-300) for name in TERMS},
        deviation={name: (totals[f"{name} squared"] / totals["pairs"]).sqrt() for name in TERMS},
        total=(whole / totals["pairs"]).sqrt(),
    )


def input_parts(model: PreTrainedModel, rows: Tensor) -> tuple[Tensor, Tensor, nn.Module]:
    """Return what reaches the first attention module because of words and because of places, and that module.

    (b, n) token ids -> two (b, n, hidden), whose sum is what reaches it. Raises as `score_terms`.
    """
    family = find_family(model.config.model_type).as_built(model)
    if family.table is None or family.stacks:
        what = "has more than one stack" if family.stacks else "adds no table of positions to its embedding"
        raise UnsupportedFamilyError(f"{type(model).__name__} {what}, so that there are no terms to split.")
    body = family.body_of(model)
    attention = _first_attention(body, family)
    table: nn.Module = body.get_submodule(family.table)
    scales: dict[nn.Module, Tensor] = {}

    def reach(factor: float, norm: Callable[..., Any]) -> Tensor:
        hooks = [(table, lambda *call: call[-1] * factor)]
        hooks += [(module, norm) for module in body.modules() if isinstance(module, nn.LayerNorm)]
        return _input_of(attention, hooks, model, rows)

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        scales[module] = _spread(module, args[0])

    def hold(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        constant: Tensor | float = 0.0 if module.bias is None else module.bias
        held: Tensor = (output - constant) * (_spread(module, args[0]) / scales[module]) + constant
        return held

    whole = reach(1.0, note)
    content, between = reach(0.0, hold), reach(0.5, hold)
    position = whole - content
    if not position.any():  # patched: what tells positions now acts behind the embedding
        raise UnsupportedFamilyError(
            f"{type(model).__name__} adds nothing for positions to its embedding, so that there are no terms to split."
        )
    if float((content + position / 2 - between).abs().max()) > _TOLERANCE * float(whole.abs().max()):
        raise UnsupportedFamilyError(
            f"{type(model).__name__} does something non-linear to its embedding before the first attention, so that "
            "words and positions cannot be told apart there."
        )
    return content, position, attention


def _spread(norm: Any, states: Tensor) -> Tensor:
    """Return what a LayerNorm divides by, (b, n, 1)."""
    spread: Tensor = (states.var(-1, keepdim=True, unbiased=False) + norm.eps).sqrt()
    return spread


def _first_attention(body: nn.Module, family: Family) -> nn.Module:
    for module in body.modules():
        if any(cls.__name__ in family.attention for cls in type(module).__mro__):
            return module
    raise UnsupportedFamilyError(f"no {' or '.join(family.attention)} is in this model, though its record names it.")


class _Reached(Exception):
    """The first attention module was reached: nothing behind it matters."""


def _input_of(attention: nn.Module, hooks: list[tuple[nn.Module, Any]], model: PreTrainedModel, rows: Tensor) -> Tensor:
    """Return the hidden states that reach `attention`, (b, n, hidden), with these forward hooks in place."""
    found: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])
        raise _Reached

    with ExitStack() as stack:
        for module, hook in hooks:
            stack.callback(module.register_forward_hook(hook).remove)
        stack.callback(attention.register_forward_pre_hook(stop, with_kwargs=True).remove)
        with suppress(_Reached):
            model.base_model(input_ids=rows)
    return found[0]


def _pairs(size: int, attention: nn.Module) -> Tensor:
    """Return which pairs count, (n, n): those that the module sees, without what a token thinks of itself."""
    pairs = ~torch.eye(size, dtype=torch.bool)
    return pairs.tril() if getattr(attention, "is_causal", True) else pairs


def _answer(attention: nn.Module, states: Tensor) -> Tensor:
    """Return the attention probabilities of states, (1, n, hidden) -> (h, n, n), asked without a mask."""
    try:
        probabilities: Tensor = attention(states, attention_mask=None)[1][0]
    except (TypeError, IndexError, RuntimeError) as error:  # it takes more than states, or fewer, or reports nothing
        raise UnsupportedFamilyError(
            f"{type(attention).__name__} does not say by itself how words and positions look at each other ({error})."
        ) from error
    return probabilities


def _blocks(attention: nn.Module, content: Tensor, position: Tensor) -> dict[str, Tensor]:
    """Return the four terms, each (h, n, n) less the mean of its row, float64, from (1, n, hidden) each.

    The module sees words, places and one zero as a sequence without a mask. The bias of its queries would count in the
    rows of words and of places, so the row of the zero, which is nothing but that bias, is taken from those of places.
    A bias of its keys is the same all along a row, and falls out.
    """
    size = content.shape[1]
    zero = torch.zeros_like(content[:, :1])
    probabilities = _answer(attention, torch.cat([content, position, zero], dim=1))
    if not probabilities.all():
        raise ConfigError(
            "scores lie further apart than these probabilities can tell; load the model with dtype=torch.float64."
        )
    visible = _pairs(size, attention).to(content.device)
    blocks = {}
    for key, columns in (("content", slice(0, size)), ("position", slice(size, 2 * size))):
        part = probabilities[:, :, columns]
        bias = centred_scores(part[:, -1:].expand(-1, size, -1), visible)
        blocks[f"content_{key}"] = centred_scores(part[:, :size], visible)
        blocks[f"position_{key}"] = centred_scores(part[:, size:-1], visible) - bias
    return {name: blocks[name] for name in TERMS}
