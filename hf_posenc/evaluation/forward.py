"""One forward pass of a model under measurement, with what commonly goes wrong in it said in words."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_posenc.errors import ConfigError, LengthError, UnsupportedFamilyError


def forward(model: nn.Module, **inputs: Any) -> Any:
    """Return what the model says of these inputs: an output with `logits` of shape (b, n, vocabulary).

    Raises:
        LengthError: the inputs are too long, for the model or for the memory of the device.
        UnsupportedFamilyError: the model returns no logits.
    """
    try:
        output = model(**inputs)
    except (IndexError, RuntimeError) as error:
        if reason := _limit(error):
            raise LengthError(f"{type(model).__name__}: {reason}") from error
        raise
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        raise UnsupportedFamilyError(
            f"{type(model).__name__} returns no logits for each token: load it with the auto class of a language "
            "model, such as AutoModelForCausalLM."
        )
    return output


def _limit(error: Exception) -> str | None:
    """Return what an error of torch says of the length of the inputs, None where it is about anything else."""
    said = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in said:
        return "so many tokens do not fit into memory"
    if isinstance(error, IndexError) and ("out of range in self" in said or "out of bounds for dimension" in said):
        return f"there is no place for so many tokens ({said})"
    return None


def device_of(model: nn.Module) -> torch.device:
    """Return where token ids must lie: beside the input embedding, which may differ from the other weights.

    Raises:
        ConfigError: the weights are on the meta device, and nothing fetches them.
    """
    find = getattr(model, "get_input_embeddings", None)
    embedding = find() if find is not None else None
    source = embedding if isinstance(embedding, nn.Module) else model
    first = next(source.parameters(), next(model.parameters(), None))
    if first is None:
        return torch.device("cpu")
    if not first.is_meta:
        return first.device
    if not any(hasattr(module, "_hf_hook") for module in (source, model)):
        raise ConfigError(f"the weights of {type(model).__name__} are on the meta device, which holds none: load them.")
    return torch.device("cpu")  # accelerate, which fetches offloaded weights, moves ids to where it puts them
