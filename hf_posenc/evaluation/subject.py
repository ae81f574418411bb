"""The model under measurement: what its config and tables say, and the arguments checked against them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posenc.errors import ConfigError, UnsupportedFamilyError
from hf_posenc.evaluation.documents import Corpus, Documents, prepare
from hf_posenc.family import Family, find_family
from hf_posenc.length import max_length
from hf_posenc.length import trained_length as stated_length
from hf_posenc.provenance import versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STRANGER = Family(model_types=(), attention=())  # its config is read as most are


def check_lengths(lengths: Sequence[int]) -> list[int]:
    """Return the window lengths sorted and without duplicates, or raise `ConfigError` for one that is none."""
    given: Any = list(lengths) if isinstance(lengths, Iterable) else []
    if not given or any(isinstance(length, bool) or not isinstance(length, int) or length < 1 for length in given):
        raise ConfigError(f"lengths must be a list of positive integers, such as [128, 256, 512]; got {lengths!r}.")
    return sorted(set(given))


def check_batch_size(batch_size: int) -> None:
    """Raise `ConfigError` for a batch size that is not a positive integer."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size must be a positive integer; got {batch_size!r}.")


def prepare_for(
    model: nn.Module,
    documents: Documents,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    bos_policy: str,
    joined: bool = False,
) -> Corpus:
    """Return `documents` checked against this model's vocabulary and BOS token (`documents.prepare`)."""
    return prepare(
        documents,
        tokenizer=tokenizer,
        bos_policy=bos_policy,
        bos_token_id=getattr(text_config(model), "bos_token_id", None),
        vocab_size=vocab_size(model),
        joined=joined,
    )


def vocab_size(model: nn.Module) -> int | None:
    """Return how many tokens the model's input embedding knows, None where it has none."""
    find = getattr(model, "get_input_embeddings", None)
    embedding = find() if find is not None else None
    return getattr(embedding, "num_embeddings", None)


def position_refusal(model: nn.Module, length: int) -> str | None:
    """Return why the model cannot take `length` positions, None where no table of positions stops it."""
    limit = max_length(model)
    if limit is None or length <= limit:
        return None
    return f"no position {limit + 1}: its table has {limit} rows for positions"


def model_name(model: nn.Module) -> str:
    """Return the name or path the model was loaded from, or its class name."""
    return getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__


def published_name(model: nn.Module) -> str:
    """Return `model_name`, of a folder on this machine its last part alone."""
    return without_folders(model_name(model))


def dtype_name(model: nn.Module) -> str:
    """Return the dtype of the model's weights, such as "float32"."""
    first = next(model.parameters(), None)
    return "unknown" if first is None else str(first.dtype).removeprefix("torch.")


def trained_length(model: nn.Module) -> int | None:
    """Return the length a model was trained for as its config or its family's record says it, None where none does.

    Where a scaling or a patch records the original length, that one.
    """
    config = text_config(model)
    try:
        family = find_family(getattr(config, "model_type", ""))
    except UnsupportedFamilyError:
        family = _STRANGER
    try:
        stated = stated_length(family, config)
    except UnsupportedFamilyError:
        return None
    limit = max_length(model)  # RoBERTa's config counts the rows before position 0, and relatives without a record do
    return stated if limit is None else min(stated, limit)


def model_hash(model: nn.Module) -> str | None:
    """Return a SHA-256 over what a model computes with: names and bytes of its weights, and its position encoding.

    None where weights lie out of reach (on the meta device, offloaded).
    """
    digest = hashlib.sha256()
    config, text = getattr(model, "config", None), text_config(model)
    for stated in (config,) if text is config else (config, text):
        positions = {name: getattr(stated, name, None) for name in ("posenc", "rope_parameters")}
        digest.update(json.dumps(positions, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict(keep_vars=True).items()):
        if not isinstance(weight, torch.Tensor) or weight.is_meta:
            return None
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_name(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Return the Hub name a tokenizer was loaded from, the last part of its folder, or its class; None for none."""
    if tokenizer is None:
        return None
    return without_folders(str(getattr(tokenizer, "name_or_path", ""))) or type(tokenizer).__name__


def without_folders(name: str) -> str:
    """Return a Hub name as it is, of a folder on this machine its last part."""
    return Path(name).absolute().name if Path(name).is_dir() else name


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Return a SHA-256 over what a tokenizer makes of texts, the same after it was saved and loaded; None for none.

    Over vocabulary, merges and rules of a fast tokenizer, without the truncation and padding of its last call; over the
    vocabulary alone of any other.
    """
    if tokenizer is None:
        return None
    rules: Any = getattr(tokenizer, "backend_tokenizer", None)
    if rules is not None:
        content = json.loads(rules.to_str()) | {"truncation": None, "padding": None}
    else:
        vocabulary = getattr(tokenizer, "get_vocab", dict)
        content = {"class": type(tokenizer).__name__, "vocabulary": vocabulary()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def facts_of(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Return the fields of a result that say on what it was measured, by name, as in `result.Result`."""
    return {
        "trained_length": trained_length(model),
        "model_hash": model_hash(model),
        "tokenizer": tokenizer_name(tokenizer),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "dtype": dtype_name(model),
        "versions": versions(),
    }


def text_config(model: nn.Module) -> Any:
    """Return the config of the model's text side, None where it has no config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
