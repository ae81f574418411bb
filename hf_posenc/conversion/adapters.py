"""LoRA through peft on patched models: the encoding's own parameters are trained and saved, and so is its spec.

An adapter means nothing without the positions that it was trained on. `adapter_config.json` says which, under `posenc`,
and `load_adapter` patches a base that has others or refuses. Plain peft loads the adapter onto whatever it is given.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from hf_posenc.config import from_dict
from hf_posenc.errors import CheckpointError, ConfigError
from hf_posenc.patching import patch
from hf_posenc.surgery import record_of

ENCODING = "posenc"  # the name of the encoding's submodule in a patched base model
CONFIG_NAME = "adapter_config.json"


@dataclass
class PatchedLoraConfig(LoraConfig):
    """peft's LoRA config with the spec of the encoding that the base model had, None where it was not patched."""

    posenc: dict[str, Any] | None = None


def add_lora(model: PreTrainedModel, *, rank: int) -> Any:
    """Return `model` inside peft, with adapters of `rank` on every linear layer but the head; scale alpha / r = 2.

    An encoding's own parameters are trained in full and saved with the adapter: peft on its own would freeze them,
    and leave them out of what it saves.
    """
    encodings = [module for name, module in model.named_modules() if name.rpartition(".")[2] == ENCODING]
    learned = any(next(module.parameters(), None) is not None for module in encodings)
    record = record_of(model)
    config = PatchedLoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        exclude_modules=rf"(.*\.)?{ENCODING}(\..*)?" if encodings else None,
        modules_to_save=[ENCODING] if learned else None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 stores (in, out)
        task_type=TaskType.CAUSAL_LM if model.can_generate() else None,  # peft has none for masked models
        posenc=record.plan.config.to_dict() if record is not None else None,
    )
    return get_peft_model(model, config)


def load_adapter(model: PreTrainedModel, path: str | Path, **kwargs: Any) -> Any:
    """Return `model` inside peft with a saved adapter, on the positions that the adapter was trained on.

    Args:
        model: the base; one that is not patched is patched as the adapter says.
        path: folder or Hub name of the adapter.
        **kwargs: handed to `PeftModel.from_pretrained`, for example `is_trainable=True`.

    Raises:
        CheckpointError: there is no adapter of a LoRA at `path`.
        ConfigError: the model has another encoding than the adapter was trained on, which names both; or the spec is of
            another version.
        PosencError: what `patch` raises.
    """
    found = cached_file(str(path), CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    try:
        fields = json.loads(Path(str(found)).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} holds no {CONFIG_NAME} that can be read: {error}") from error
    if fields.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} holds an adapter of type {fields.get('peft_type')!r}; only LORA is known here.")
    spec = fields.get("posenc")
    asked, record = from_dict(spec) if spec else None, record_of(model)
    if record is not None and record.plan.config != asked:
        raise ConfigError(
            f"the adapter in {path} was trained on {asked or 'the positions of an unpatched model'}, and this model "
            f"has {record.plan.config}; unpatch it, or load the base as it was."
        )
    if record is None and asked is not None:
        patch(model, asked)
    known = {field.name for field in dataclasses.fields(PatchedLoraConfig) if field.init}
    config = PatchedLoraConfig(**{key: value for key, value in fields.items() if key in known})
    return PeftModel.from_pretrained(model, str(path), config=config, **kwargs)


def save_and_merge(model: Any, folder: Path | None) -> PreTrainedModel:
    """Save the adapter into `folder` (unless None), then return the plain model with the adapter merged in."""
    if folder is not None:
        model.save_pretrained(folder)
    return cast(PreTrainedModel, model.merge_and_unload())
