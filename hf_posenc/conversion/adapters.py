"""LoRA through peft, with the position encoding's own parameters trained and saved beside the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from peft import LoraConfig, TaskType, get_peft_model
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

ENCODING = "posenc"  # the name of the encoding's submodule in a patched base model


def add_lora(model: PreTrainedModel, *, rank: int) -> Any:
    """Return `model` inside peft, with adapters of `rank` on every linear layer but the head; scale alpha / r = 2.

    An encoding's own parameters are trained in full and saved with the adapter: peft on its own would freeze them,
    and leave them out of what it saves.
    """
    encodings = [module for name, module in model.named_modules() if name.rpartition(".")[2] == ENCODING]
    learned = any(next(module.parameters(), None) is not None for module in encodings)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        exclude_modules=rf"(.*\.)?{ENCODING}(\..*)?" if encodings else None,
        modules_to_save=[ENCODING] if learned else None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 stores (in, out)
        task_type=TaskType.CAUSAL_LM,
    )
    return get_peft_model(model, config)


def save_and_merge(model: Any, folder: Path | None) -> PreTrainedModel:
    """Save the adapter into `folder` (unless None), then return the plain model with the adapter merged in."""
    if folder is not None:
        model.save_pretrained(folder)
    return cast(PreTrainedModel, model.merge_and_unload())
