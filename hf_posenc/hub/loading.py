"""Load a checkpoint, patched or not, as the class that it was saved as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_posenc.errors import CheckpointError
from hf_posenc.modeling import model_class
from hf_posenc.surgery import rebuild

WHERE = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code")
"""Arguments that say which checkpoint is meant, and so hold for its config too."""


def from_pretrained(path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load a model from a folder or the Hub, with its encoding in place if it was saved patched.

    Args:
        path: folder or repository name.
        **kwargs: handed to the `from_pretrained` of the class that the checkpoint names, for example `dtype=`.

    Raises:
        CheckpointError: weights are missing, left over, of another shape, or cannot be read.
        ConfigError: the spec of the encoding is of another version or holds an unknown field.
        OSError: there is no checkpoint at `path`.
    """
    config = AutoConfig.from_pretrained(path, **{key: kwargs[key] for key in WHERE if key in kwargs})
    spec = getattr(config, "posenc", None)
    name = (config.architectures or [""])[0]
    stock = getattr(transformers, name.removeprefix("Posenc") if spec else name, None)
    if spec and stock is None:
        raise CheckpointError(f"{path} was saved by a class {name!r} that this transformers has no stock class for.")
    cls: Any = model_class(stock, rebuild) if spec else stock or AutoModelForCausalLM
    try:
        model: PreTrainedModel = cls.from_pretrained(path, **kwargs)
    except SafetensorError as error:
        raise CheckpointError(f"the weights in {path} cannot be read: {error}; the file is damaged or cut.") from error
    return model
