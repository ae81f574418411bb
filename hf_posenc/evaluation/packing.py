"""Whether several documents in one row are kept apart when only their positions say where each begins."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedFamilyError
from hf_posenc.evaluation.scoring import evaluation_mode
from hf_posenc.evaluation.shift import first_position

_LENGTHS = (7, 5)
TOLERATED = 1e-4
"""Share of the largest output by which packing may change an output, for rounding."""


def packing_leak(model: PreTrainedModel) -> float:
    """Return how much two documents in one row hear of each other: 0 where they are kept apart.

    Two rows of random tokens run alone, then joined, with `position_ids` that start again and no mask: transformers'
    convention for packed rows. The largest difference is given as a share of the largest output.

    Raises:
        UnsupportedFamilyError: the model takes no `position_ids`, so that nothing tells it where a document begins.
    """
    takes: Any = model.base_model.forward
    if model.config.is_encoder_decoder or "position_ids" not in inspect.signature(takes).parameters:
        raise UnsupportedFamilyError("it takes no position_ids, so that nothing tells it where a document begins")
    embedding: Any = model.get_input_embeddings()
    size = int(embedding.weight.shape[0])
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(min(8, size // 2), size, (1, length), generator=draw) for length in _LENGTHS]
    places = [torch.arange(length)[None] + first_position(model) for length in _LENGTHS]
    with evaluation_mode(model):
        apart = torch.cat([_output(model, *one) for one in zip(documents, places, strict=True)], dim=1)
        joined = _output(model, torch.cat(documents, dim=1), torch.cat(places, dim=1))
    return float((joined - apart).abs().max() / apart.abs().max())


def _output(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> Tensor:
    """Return what the body says of each token, (1, n, hidden)."""
    base: Any = model.base_model
    states: Tensor = base(input_ids=ids.to(model.device), position_ids=positions.to(model.device), use_cache=False)[0]
    return states
