"""The classes of a patched model and of its config.

A patched `GPT2LMHeadModel` is a `PosencGPT2LMHeadModel` with a config of `model_type` `posenc_gpt2` that holds the spec
of its encoding. Plain transformers does not know that type and refuses it, instead of loading a GPT-2 with a random
table.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hf_posenc.declared import check_declared_backend
from hf_posenc.errors import CheckpointError
from hf_posenc.inputs import positioned_forward, unpacked_forward
from hf_posenc.interposer import check_backend
from hf_posenc.length import table_start
from hf_posenc.positions import checkpointed

PREFIX = "posenc_"
Rebuild = Callable[[PreTrainedModel], None]
_readers: list[Callable[[type[PreTrainedConfig]], None]] = []
_writers: list[Callable[[PreTrainedConfig, Path], None]] = []


def when_read(reader: Callable[[type[PreTrainedConfig]], None]) -> None:
    """Have `reader` called with the stock config class whenever the config of a patched model is made or read."""
    _readers.append(reader)


def announce(stock: type[PreTrainedConfig]) -> None:
    """Call whoever waits for the configs of patched models: one of this stock class exists now."""
    for reader in _readers:
        reader(stock)


def when_written(writer: Callable[[PreTrainedConfig, Path], None]) -> None:
    """Have `writer` called with the config of a patched model and the folder that it is about to be saved into."""
    _writers.append(writer)


def _save_config(self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
    """Save a config as transformers does, after whatever has to stand beside it."""
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    for writer in _writers:
        writer(self, folder)
    self.posenc_stock.save_pretrained(self, save_directory, *args, **kwargs)


def _keep_auto_class(cls: Any, auto_class: Any = None) -> None:
    """Leave the code of this class to `when_written`: transformers would copy this file and name what is not in it."""


def _from_dict(cls: Any, /, config_dict: dict[str, Any], **kwargs: Any) -> Any:
    """Read a config as transformers does, and announce its type."""
    announce(cls.posenc_stock)
    return cls.posenc_stock.from_dict.__func__(cls, config_dict, **kwargs)


@functools.cache
def config_class(stock: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return the config class of the patched models of one stock config class: `posenc`, a plain-JSON dict, added."""
    body = {
        "__doc__": f"{stock.__name__} of a model whose position encoding was replaced; `posenc` says by what.",
        "__module__": __name__,
        "__annotations__": {"posenc": dict[str, Any] | None},
        "posenc": None,
        "model_type": PREFIX + stock.model_type,
        "posenc_stock": stock,
        "from_dict": classmethod(_from_dict),
        "save_pretrained": _save_config,
        "register_for_auto_class": classmethod(_keep_auto_class),
        "__reduce_ex__": lambda self, protocol: (_blank, (config_class, stock), self.__dict__),
    }
    return type(f"Posenc{stock.__name__}", (stock,), body)


@functools.cache
def model_class(stock: type[PreTrainedModel], rebuild: Rebuild) -> type[PreTrainedModel]:
    """Return the class of the patched models of one stock model class, and of the base models inside them.

    Args:
        stock: a transformers model class, with or without a head.
        rebuild: called on a freshly constructed model whose config holds a spec; patches it in place.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        stock.__init__(self, config, *args, **kwargs)
        rebuild(self)

    body = {
        "__doc__": f"{stock.__name__} with another position encoding.",
        "__module__": __name__,
        "__init__": __init__,
        "forward": positioned_forward(stock),
        "config_class": config_class(stock.config_class),  # type: ignore[arg-type]
        "posenc_stock": stock,
        "set_attn_implementation": _set_attn_implementation,
        "_set_gradient_checkpointing": _set_gradient_checkpointing,
        "from_pretrained": classmethod(_from_pretrained),
        "register_for_auto_class": classmethod(_keep_auto_class),
        "_prepare_position_ids_for_generation": _positions_for_generation,
        "__reduce_ex__": lambda self, protocol: (_blank, (model_class, stock, rebuild), self.__dict__),
    }
    cls = type(f"Posenc{stock.__name__}", (stock,), body)
    # transformers looks up what `output_attentions` and the like capture by the printed name of the exact class
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(cls), stock._can_record_outputs)
    return cls


@functools.cache
def native_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class of a model whose encoding transformers computes: the stock one in name and in what is saved."""
    body = {
        "__doc__": stock.__doc__,
        "__module__": stock.__module__,
        "forward": unpacked_forward(stock),
        "posenc_stock": stock,
        "__reduce_ex__": lambda self, protocol: (_blank, (native_class, stock), self.__dict__),
    }
    return type(stock.__name__, (stock,), body)


def _blank(factory: Callable[..., Any], *arguments: Any) -> Any:
    """Return an empty instance of a class made here, for copy and pickle to fill."""
    cls = factory(*arguments)
    return cls.__new__(cls)


def _set_attn_implementation(self: Any, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Set the attention backend, as transformers does; raises BackendError where it cannot carry the encoding."""
    asked = attn_implementation if isinstance(attn_implementation, dict) else {"": attn_implementation}
    declared = self.posenc_joints[-1].body.posenc_family.declared
    for backend in asked.values():
        for joint in self.posenc_joints:
            check_backend(joint.encoding, backend)
        if declared is not None:
            check_declared_backend(declared, backend, type(self).__name__)
    if declared is not None:  # for transformers its attention has one backend, and cannot be given another
        self.config._attn_implementation = asked.get("", self.config._attn_implementation)
        return
    self.posenc_stock.set_attn_implementation(self, attn_implementation, *args, **kwargs)


def _set_gradient_checkpointing(self: Any, *args: Any, **kwargs: Any) -> None:
    """Set the checkpointing function, as transformers does, for layers that may not hand positions down."""
    if "gradient_checkpointing_func" in kwargs:
        kwargs["gradient_checkpointing_func"] = partial(checkpointed, kwargs["gradient_checkpointing_func"])
    self.posenc_stock._set_gradient_checkpointing(self, *args, **kwargs)


def _positions_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the `position_ids` of `generate`, which starts at 0 whatever the model's own convention is."""
    ids = self.posenc_stock._prepare_position_ids_for_generation(self, *args, **kwargs)
    family = self.posenc_joints[-1].body.posenc_family
    return ids + table_start(family, self.config) if family.counts_padding else ids


def _from_pretrained(cls: Any, /, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
    """Load as transformers does, from safetensors; raises CheckpointError where weights of the model do not match.

    A part of the body that the checkpoint has nothing of is new in this class, as BERT's pooler is where a classifier
    is made of a language model: transformers starts it at random and says so.
    """
    if kwargs.setdefault("use_safetensors", True) is False:
        raise CheckpointError("the model is patched, and such models are read from safetensors only.")
    load = cls.posenc_stock.from_pretrained.__func__
    model, info = load(cls, *args, output_loading_info=True, **kwargs)
    body = "" if model.base_model is model else f"{cls.base_model_prefix}."
    absent = {key for key in info["missing_keys"] if key.startswith(body)}
    present = {_part(key, body) for key in model.state_dict() if key.startswith(body) and key not in absent}
    if not present:
        absent = set()  # a file that holds nothing of this model: transformers has listed what is missing
    whole = model.config.architectures == [cls.__name__]  # loaded as what it was saved as
    mismatched = {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]}
    wrong = {
        "missing": {key for key in absent if whole or "posenc." in key or _part(key, body) in present},
        "unexpected": {key for key in info["unexpected_keys"] if "posenc." in key},
        "of another shape": {key for key in mismatched if "posenc." in key},  # others only if asked to ignore them
    }
    found = "; ".join(f"{kind}: {', '.join(sorted(keys))}" for kind, keys in wrong.items() if keys)
    if found:
        raise CheckpointError(f"the weights do not fit the model that the config describes ({found})")
    return (model, info) if output_loading_info else model


def _part(key: str, body: str) -> str:
    """Return the name of the body's child to which a weight belongs."""
    return key.removeprefix(body).partition(".")[0]
