"""What becomes of the loss when all positions are moved: nothing, for a model that hears distances only."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import LengthError, UnsupportedFamilyError
from hf_posenc.evaluation.forward import forward
from hf_posenc.evaluation.scoring import token_nll
from hf_posenc.family import find_family
from hf_posenc.length import table_start

TOLERATED = 0.5
"""Nats a token by which the loss may grow before positions count as unusable."""
_MASK_EVERY = 7
_MASKED_ROWS = 32  # copies of few rows with other masks, up to so many
_BATCH = 4


@dataclass(frozen=True, kw_only=True)
class ShiftCurve:
    """Mean loss of the same tokens at moved positions.

    Attributes:
        window: tokens in each row.
        nll: shift in positions -> mean nats per scored token, as far as the model has positions.
        masked: True where masked tokens are scored, False where every next token is.
    """

    window: int
    nll: dict[int, float]
    masked: bool

    @property
    def cost(self) -> dict[int, float]:
        """Shift -> nats per token by which the loss grows."""
        return {shift: value - self.nll[0] for shift, value in self.nll.items()}

    @property
    def usable(self) -> int:
        """Positions up to the end of the furthest window whose loss has not grown more than `TOLERATED`."""
        return max(shift for shift, cost in self.cost.items() if cost <= TOLERATED) + self.window


def shifts_up_to(last: int) -> list[int]:
    """Return 0, the powers of two and the sixteenths of the way up to `last`, ascending."""
    return sorted({round(last * part / 16) for part in range(17)} | {2**power for power in range(last.bit_length())})


def loss_by_shift(
    model: PreTrainedModel, rows: Tensor, shifts: Sequence[int], *, mask_token_id: int | None = None
) -> ShiftCurve:
    """Measure the loss of the same rows with all positions moved by each of these shifts.

    Args:
        model: in eval mode, without gradients.
        rows: (b, n) token ids.
        shifts: non-negative, 0 among them; those from which on the model has not n positions are left out.
        mask_token_id: for masked language models: every seventh token is replaced by it, and these are scored. Few
            rows are taken several times, with other tokens masked.

    Raises:
        LengthError: the model has not even n positions.
        UnsupportedFamilyError: the model takes no `position_ids`, so that its positions cannot be moved, or it returns
            no logits for every token.
    """
    body: Any = model.base_model
    if model.config.is_encoder_decoder or "position_ids" not in inspect.signature(body.forward).parameters:
        raise UnsupportedFamilyError(f"{type(model).__name__} takes no position_ids, so that they cannot be moved.")
    start = first_position(model)
    inputs, targets = _next_tokens(rows) if mask_token_id is None else _masked_tokens(rows, mask_token_id)
    places = torch.arange(rows.shape[1]).expand(len(inputs), -1) + start
    nll: dict[int, float] = {}
    for shift in sorted(shifts):
        batches = zip(inputs.split(_BATCH), (places + shift).split(_BATCH), targets.split(_BATCH), strict=True)
        try:
            found = [_nll(model, *(part.to(model.device) for part in batch)) for batch in batches]
        except LengthError:
            if not nll:
                raise
            break  # a table that grows with the text, and not with its positions
        nll[shift] = float(torch.cat(found).mean())
    return ShiftCurve(window=rows.shape[1], nll=nll, masked=mask_token_id is not None)


def _next_tokens(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and what to score at each of them, (b, n) both; -1 where nothing is."""
    return rows, torch.cat([rows[:, 1:], torch.full_like(rows[:, :1], -1)], dim=1)


def _masked_tokens(rows: Tensor, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """As `_next_tokens`; the first token of a row is never masked, since it may be one that stands in front of all."""
    copies = max(1, min(_MASK_EVERY, _MASKED_ROWS // len(rows)))
    phases = torch.arange(copies).repeat_interleave(len(rows))[:, None]
    places = torch.arange(rows.shape[1])
    scored = ((places + phases) % _MASK_EVERY == _MASK_EVERY // 2) & (places > 0)
    rows = rows.repeat(copies, 1)
    return rows.masked_fill(scored, mask_token_id), rows.masked_fill(~scored, -1)


def _nll(model: PreTrainedModel, ids: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
    """Return the nats of every target, (number of targets,) float64 on the CPU; the other arguments are (b, n)."""
    logits = forward(model, input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions).logits
    if logits.shape[:2] != ids.shape:
        raise UnsupportedFamilyError(f"{type(model).__name__} returns no logits for every token.")
    return token_nll(logits[targets >= 0], targets[targets >= 0])


def first_position(model: PreTrainedModel) -> int:
    """Return the number that this model gives to the first position: more than 0 where padding is counted (RoBERTa)."""
    try:
        family = find_family(model.config.model_type).as_built(model)
    except UnsupportedFamilyError:
        return 0
    return table_start(family, model.config) if family.counts_padding else 0
