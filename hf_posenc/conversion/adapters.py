"""LoRA through peft, with the position encoding's own parameters trained and saved beside the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import PreTrainedModel

ENCODING = "posenc"  # the name of the encoding's submodule in a patched base model


def add_lora(model: PreTrainedModel, *, rank: int) -> Any:
    """Return `model` inside peft, with adapters of `rank` on every linear layer but the head; scale alpha / r = 2.

    An encoding's own parameters are trained in full and saved with the adapter: peft on its own would freeze them,
    and leave them out of what it saves.
    """
    encoding = [name for name, module in model.named_modules() if _is_encoding(name) and _has_parameters(module)]
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        exclude_modules=rf"(.*\.)?{ENCODING}(\..*)?",
        modules_to_save=[ENCODING] if encoding else None,
        task_type=TaskType.CAUSAL_LM,
    )
    return get_peft_model(model, config)


def save_and_merge(model: Any, folder: Path | None) -> PreTrainedModel:
    """Save the adapter into `folder` (unless None), then return the plain model with the adapter merged in."""
    if folder is not None:
        model.save_pretrained(folder)
    return cast(PreTrainedModel, model.merge_and_unload())


def _is_encoding(name: str) -> bool:
    return name.rpartition(".")[2] == ENCODING


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
