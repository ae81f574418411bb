"""What becomes of the loss when all positions are moved: nothing, for a model that hears distances only."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedFamilyError
from hf_posenc.evaluation.scoring import token_nll
from hf_posenc.family import find_family
from hf_posenc.length import table_start

TOLERATED = 0.1
"""Nats a token by which the loss may grow before positions count as unusable."""
_MASK_EVERY = 7


@dataclass(frozen=True, kw_only=True)
class ShiftCurve:
    """Mean loss of the same tokens at moved positions.

    Attributes:
        window: tokens in each row.
        nll: shift in positions -> mean nats per scored token.
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
        """Positions up to the end of the last window before one whose loss has grown more than `TOLERATED`."""
        good = 0
        for shift in sorted(self.nll):
            if self.cost[shift] > TOLERATED:
                break
            good = shift
        return good + self.window


def shifts_up_to(last: int) -> list[int]:
    """Return 0, 1, 2, 4, 8, ... and from 64 on steps of at most a sixteenth of the way, up to `last`, ascending."""
    fine = {round(last * part / 16) for part in range(17)}
    return sorted({0, last} | fine | {2**power for power in range(last.bit_length()) if 2**power <= last})


def loss_by_shift(
    model: PreTrainedModel, rows: Tensor, shifts: Sequence[int], *, mask_token_id: int | None = None
) -> ShiftCurve:
    """Measure the loss of the same rows with all positions moved by each of these shifts.

    Args:
        model: in eval mode, without gradients.
        rows: (b, n) token ids.
        shifts: non-negative, 0 among them; the model must have n positions from each of them on.
        mask_token_id: for masked language models: every seventh token is replaced by it, and these are scored.

    Raises:
        UnsupportedFamilyError: the model takes no `position_ids`, so that its positions cannot be moved, or it returns
            no logits for every token.
    """
    body: Any = model.base_model
    if model.config.is_encoder_decoder or "position_ids" not in inspect.signature(body.forward).parameters:
        raise UnsupportedFamilyError(f"{type(model).__name__} takes no position_ids, so that they cannot be moved.")
    start = _start(model)
    rows = rows.to(model.device)
    scored = torch.arange(rows.shape[1], device=rows.device) % _MASK_EVERY == _MASK_EVERY // 2
    inputs = rows if mask_token_id is None else rows.masked_fill(scored, mask_token_id)
    places = torch.arange(rows.shape[1], device=rows.device)[None].expand(len(rows), -1) + start
    nll = {}
    for shift in shifts:
        total, count = 0.0, 0
        for part, ids, positions in zip(inputs.split(4), rows.split(4), places.split(4), strict=True):
            mask = torch.ones_like(part)
            output: Any = model(input_ids=part, attention_mask=mask, position_ids=positions + shift)
            logits = getattr(output, "logits", None)
            if logits is None or logits.shape[:2] != part.shape:
                raise UnsupportedFamilyError(f"{type(model).__name__} returns no logits for every token.")
            said, meant = (logits[:, :-1], ids[:, 1:]) if mask_token_id is None else (logits[:, scored], ids[:, scored])
            found = token_nll(said.flatten(0, 1), meant.flatten())
            total, count = total + float(found.sum()), count + len(found)
        nll[shift] = total / count
    return ShiftCurve(window=rows.shape[1], nll=nll, masked=mask_token_id is not None)


def _start(model: PreTrainedModel) -> int:
    """Return the number that this model gives to the first position: more than 0 where padding is counted (RoBERTa)."""
    try:
        family = find_family(model.config.model_type)
    except UnsupportedFamilyError:
        return 0
    return table_start(family, model.config) if family.counts_padding else 0
