"""Negative log-likelihood of given tokens under any causal language model, without the logits of a whole sequence.

The logits of 16,384 tokens over 50,257 words take 3.1 GiB, the hidden states before them 48 MiB. So the model runs once
with its output head fed the first piece of rows, the head's whole input is kept, and the head then runs on the other
pieces. Both go through the model's own forward and a hook on the head's input: whatever a model does before its head
(a projection) or after it (soft-capping, scaling) is done by the model itself, and no family needs code of its own.
Feed-forward layers run in pieces as well (`piecewise`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import UnsupportedFamilyError
from hf_posenc.evaluation.forward import device_of, forward
from hf_posenc.evaluation.piecewise import ROWS, feed_forward_layers, in_pieces

# Numbers in one piece of logits, 64 MiB in float32: large enough that pieces cost nothing, small beside any model.
_PIECE_NUMBERS = 2**24
_MIN_PIECE_ROWS = 128
_PROBE_TOKENS = 8


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch every submodule to eval mode and gradients off, and give back each submodule's own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # Not inference_mode: a table that an encoding memoises here must stay usable in later training.
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def token_nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood in nats of `targets` (n,) under `logits` (n, vocabulary): float64 on the CPU.

    Exponentials are taken in float32 (float64 logits stay float64) relative to the row's maximum, the logarithm of
    their sum in float64; equal logits therefore give ln(vocabulary) to the last digit.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    top = logits.amax(dim=-1)
    total = (logits - top[:, None]).exp_().sum(dim=-1)
    picked = logits.gather(-1, targets[:, None]).squeeze(-1)
    return total.cpu().double().log() + (top - picked).cpu().double()


class Scorer:
    """Scores windows of one model. Call it inside `evaluation_mode(model)`.

    Args:
        model: a causal language model whose forward takes `input_ids` and returns an output with `logits`.
        probe: (n,) token ids, n >= 2, to check on that the head can be run in pieces with the same result.

    Raises:
        UnsupportedFamilyError: the model returns no logits for each input token, or earlier logits depend on later
            tokens (a masked language model), so that its numbers would not be perplexities.
    """

    def __init__(self, model: nn.Module, probe: torch.Tensor) -> None:
        self._model = model
        self._device = device_of(model)
        self._head = _output_head(model)
        self._layers = feed_forward_layers(model)
        probe = probe[:_PROBE_TOKENS].to(self._device)[None]  # (1, n)
        logits = self._logits(probe)
        if logits.shape[:2] != probe.shape:
            raise UnsupportedFamilyError(
                f"{type(model).__name__} returns logits of shape {tuple(logits.shape)} for {probe.shape[1]} tokens: "
                "one row a token is needed."
            )
        _check_causal(self._logits, probe, logits, type(model).__name__)
        self._piece = max(_MIN_PIECE_ROWS, _PIECE_NUMBERS // logits.shape[-1])
        if self._head is not None and not self._pieces_agree(probe, logits):
            self._head = None
        if not _close(self._logits(probe, rows=3), logits):
            self._layers = []

    def nll(self, tokens: torch.Tensor, scored: int) -> torch.Tensor:
        """Return the nats of the last `scored` tokens of each row: (b, n + 1) ids -> (b, scored), float64, CPU.

        The first n tokens of a row are the model's input; all rows have the same length, so there is no padding.
        """
        tokens = tokens.to(self._device)
        inputs, targets = tokens[:, :-1], tokens[:, -scored:].flatten()
        if self._head is None:
            return token_nll(self._logits(inputs)[:, -scored:].flatten(0, 1), targets).view(-1, scored)
        rows, logits = self._run(inputs, scored)
        pieces = [token_nll(logits, targets[: self._piece])]
        for first in range(self._piece, len(rows), self._piece):
            logits = self._replay(inputs[:1, :1], rows[first : first + self._piece])
            pieces.append(token_nll(logits, targets[first : first + self._piece]))
        return torch.cat(pieces).view(-1, scored)

    def _logits(self, inputs: torch.Tensor, *, rows: int = ROWS) -> torch.Tensor:
        """Return the logits of every token, with feed-forward layers run on so many tokens at a time."""
        with in_pieces(self._layers, rows):
            logits: torch.Tensor = forward(self._model, input_ids=inputs, use_cache=False).logits
        return logits

    def _run(self, inputs: torch.Tensor, scored: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on `inputs` (b, n), its head on the first piece of the scored rows only.

        Returns what the head was to be given for all scored rows, (b * scored, hidden), and the first piece's logits.
        """
        kept: list[torch.Tensor] = []

        def keep(states: torch.Tensor) -> torch.Tensor:
            kept.append(states[:, -scored:].flatten(0, 1))
            return kept[0][None, : self._piece]

        with _head_input(self._head, keep):
            logits = self._logits(inputs)[0]
        return kept[0], logits

    def _replay(self, token: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the model's logits (n, vocabulary) for head inputs `rows` (n, hidden); `token` (1, 1) is a dummy."""
        with _head_input(self._head, lambda _: rows[None]):
            return self._logits(token)[0]

    def _pieces_agree(self, probe: torch.Tensor, logits: torch.Tensor) -> bool:
        seen: list[torch.Size] = []

        def record(states: torch.Tensor) -> torch.Tensor:
            seen.append(states.shape)
            return states

        with _head_input(self._head, record):
            self._logits(probe)
        if len(seen) != 1 or len(seen[0]) != 3 or seen[0][:2] != probe.shape:
            return False
        rows, first = self._run(probe, probe.shape[1])
        replayed = self._replay(probe[:, :1], rows)
        return (
            first.shape == replayed.shape == logits.shape[1:] and _close(first, replayed) and _close(first, logits[0])
        )


def _output_head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    return head if isinstance(head, nn.Module) else None


@contextmanager
def _head_input(head: nn.Module | None, replace: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within the block, call `head` with `replace(states)` in place of its first argument."""
    if head is None:
        yield
        return

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (replace(args[0]), *args[1:]) if args else None

    handle = head.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _check_causal(
    run: Callable[[torch.Tensor], torch.Tensor], probe: torch.Tensor, logits: torch.Tensor, name: str
) -> None:
    other = probe.clone()
    last = int(probe[0, -1])
    other[0, -1] = last - 1 if last > 0 else 1
    if not _close(run(other)[:, :-1], logits[:, :-1]):
        raise UnsupportedFamilyError(
            f"{name} lets a token see later ones (a masked language model?), so what it gives is no perplexity."
        )


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two computations of the same logits agree up to the rounding of their dtype."""
    scale = float(right.float().nan_to_num(0.0, 0.0, 0.0).abs().max())
    tolerance = max(1e-5, 8 * torch.finfo(right.dtype).eps) * max(scale, 1e-30)
    return torch.allclose(left.float(), right.float(), rtol=0.0, atol=tolerance, equal_nan=True)
