"""The model under measurement: what its config and tables say, and the arguments checked against them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_posenc.errors import ConfigError
from hf_posenc.evaluation.documents import Corpus, Documents, prepare
from hf_posenc.length import max_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_lengths(lengths: Sequence[int]) -> list[int]:
    """Return the window lengths sorted and without duplicates, or raise `ConfigError` for one that is none."""
    wrong = [length for length in lengths if isinstance(length, bool) or not isinstance(length, int) or length < 1]
    if wrong or not lengths:
        raise ConfigError(f"lengths must be positive integers, such as [128, 256, 512]; got {list(lengths)!r}.")
    return sorted(set(lengths))


def check_batch_size(batch_size: int) -> None:
    """Raise `ConfigError` for a batch size that is not a positive integer."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size must be a positive integer; got {batch_size!r}.")


def prepare_for(
    model: nn.Module, documents: Documents, *, tokenizer: PreTrainedTokenizerBase | None, bos_policy: str
) -> Corpus:
    """Return `documents` checked against this model's vocabulary and BOS token (`documents.prepare`)."""
    find = getattr(model, "get_input_embeddings", None)
    embedding = find() if find is not None else None
    return prepare(
        documents,
        tokenizer=tokenizer,
        bos_policy=bos_policy,
        bos_token_id=getattr(_text_config(model), "bos_token_id", None),
        vocab_size=getattr(embedding, "num_embeddings", None),
    )


def position_refusal(model: nn.Module, length: int) -> str | None:
    """Return why the model cannot take `length` positions, None where no table of positions stops it."""
    unwrap = getattr(model, "get_base_model", None)  # a PEFT wrapper hides where the table is
    limit = max_length(model if unwrap is None else unwrap())
    if limit is None or length <= limit:
        return None
    return f"no position {limit + 1}: learned table has {limit} rows for positions"


def model_name(model: nn.Module) -> str:
    """Return the name or path the model was loaded from, or its class name."""
    return getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__


def dtype_name(model: nn.Module) -> str:
    """Return the dtype of the model's weights, such as "float32"."""
    first = next(model.parameters(), None)
    return "unknown" if first is None else str(first.dtype).removeprefix("torch.")


def trained_length(model: nn.Module) -> int | None:
    """Return the length the config says the model was trained for: the original one where a scaling records it."""
    config = _text_config(model)
    rope = getattr(config, "rope_parameters", None)
    scaled = rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None
    original = getattr(config, "original_max_position_embeddings", None) or scaled
    stated = original or getattr(config, "max_position_embeddings", None)
    return int(stated) if isinstance(stated, (int, float)) and stated > 0 else None


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
