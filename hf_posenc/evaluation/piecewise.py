"""Feed-forward layers run on a few tokens at a time, since nothing that a long text makes is wider than their insides.

The inner states of 65,536 tokens of GPT-2 small take 768 MiB, and its activation makes three more of them. Such a
layer sees one token at a time, so that it gives the same in pieces, for the same work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

ROWS = 1024
"""Tokens in a piece."""
_FEED_FORWARD = re.compile(r"(MLP|FeedForward|FFN|DenseActDense|DenseGatedActDense)$")


def feed_forward_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that transformers names as feed-forward layers, without those that are called by a wrapper."""
    named = [module for module in model.modules() if _FEED_FORWARD.search(type(module).__name__)]
    return [module for module in named if "forward" not in vars(module)]


@contextmanager
def in_pieces(layers: Sequence[nn.Module], rows: int) -> Iterator[None]:
    """Within the block, each of the layers runs on at most so many tokens at a time: (b, n, hidden) -> the same.

    A layer that is called with anything but one such tensor, or that gives anything but one, runs as it is.
    """
    try:
        for layer in layers:
            vars(layer)["forward"] = _split(layer.forward, rows)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _split(forward: Callable[..., Any], rows: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        states = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(states, torch.Tensor) or states.dim() != 3 or states.shape[1] <= rows:
            return forward(*args, **kwargs)
        first, *others = (piece.contiguous() for piece in states.split(rows, dim=1))  # GPT-2 takes views of them
        made = forward(first)
        if not isinstance(made, torch.Tensor):  # experts that also say how they were chosen
            return forward(*args, **kwargs)
        return torch.cat([made, *map(forward, others)], dim=1)

    return run
