"""Load a checkpoint, patched or not, as the class that it was saved as, after a look at what its files are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from hf_posenc.errors import CheckpointError
from hf_posenc.modeling import model_class
from hf_posenc.surgery import rebuild

WHERE = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code")
"""Arguments that say which checkpoint is meant, and so hold for its config too."""
INDEX = "model.safetensors.index.json"


def from_pretrained(path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load a model from a folder or the Hub, with its encoding in place if it was saved patched.

    Weights are read from safetensors files, which hold numbers and nothing that runs. No code that comes with the
    checkpoint runs either: the encoding is that of this package.

    Args:
        path: folder or repository name.
        **kwargs: handed to the `from_pretrained` of the class that the checkpoint names, for example `dtype=`,
            `device_map=` or `quantization_config=`; `use_safetensors=False` reads a stock checkpoint that has pickled
            weights only.

    Raises:
        CheckpointError: weights are missing, left over, of another shape, pickled, damaged, or not in the checkpoint.
        ConfigError: the spec of the encoding is of another version or holds an unknown field.
        OSError: there is no checkpoint at `path`.
    """
    where = {key: kwargs[key] for key in WHERE if key in kwargs}
    config = AutoConfig.from_pretrained(path, **where)
    spec = getattr(config, "posenc", None)
    name = (config.architectures or [""])[0]
    stock: Any = getattr(transformers, name.removeprefix("Posenc") if spec else name, None)
    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel)):
        stock = None
    if spec and stock is None:
        raise CheckpointError(f"{path} was saved by a class {name!r} that this transformers has no stock class for.")
    cls: Any = model_class(stock, rebuild) if spec else stock or AutoModelForCausalLM
    kwargs.setdefault("use_safetensors", True)
    if kwargs["use_safetensors"]:
        _check_files(path, where)
    asked = kwargs.pop("output_loading_info", False)
    try:
        model, info = cls.from_pretrained(path, output_loading_info=True, **kwargs)
    except SafetensorError as error:
        raise CheckpointError(f"the weights in {path} cannot be read: {error}; the file is damaged or cut.") from error
    body = "" if model.base_model is model else f"{model.base_model_prefix}."
    if {key for key in model.state_dict() if key.startswith(body)} <= set(info["missing_keys"]):
        raise CheckpointError(f"the weights in {path} hold nothing of {type(model).__name__}.")
    return (model, info) if asked else model  # type: ignore[return-value]


def _check_files(path: str | Path, where: dict[str, Any]) -> None:
    """Raise CheckpointError where a checkpoint has pickled weights only, or names files outside of itself."""
    folder = Path(path) / where.get("subfolder", "")
    if folder.is_dir():
        pickled = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
        if pickled and not any(folder.glob("*.safetensors*")):
            raise CheckpointError(
                f"{path} has its weights in {pickled[0]} only: a pickle, which may run code when it is read. Save the "
                "model again as safetensors where you trust it."
            )
    outside = [name for name in _indexed(path, where) if Path(name).name != name or "\\" in name]
    if outside:
        raise CheckpointError(f"{INDEX} of {path} names {outside[0]!r}, which is not a file of this checkpoint.")


def _indexed(path: str | Path, where: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the files over which weights are spread, where they are."""
    asked = {key: value for key, value in where.items() if key != "trust_remote_code"}
    index = cached_file(str(path), INDEX, _raise_exceptions_for_missing_entries=False, **asked)
    if index is None:
        return
    try:
        files = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{INDEX} of {path} does not say where the weights are: {error!r}") from error
    yield from map(str, files)
