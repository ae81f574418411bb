"""Saved models as they are measured: whole, with a tokenizer that has words, and in the class that a protocol needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

from hf_posenc.errors import CheckpointError, PosencError
from hf_posenc.evaluation.protocols import BY_SOURCE, NONOVERLAPPING, PSEUDO

if TYPE_CHECKING:
    from accelerate import PartialState

R = TypeVar("R")
_REASON = 300  # characters of what other libraries raise, some of it pages long
_CAUSAL: tuple[Any, str] = (AutoModelForCausalLM, "causal language model")
_OTHERS: dict[str, tuple[Any, str]] = {
    PSEUDO: (AutoModelForMaskedLM, "masked language model"),
    BY_SOURCE: (AutoModelForSeq2SeqLM, "encoder-decoder"),
}


def one_by_one(
    models: Mapping[str, str],
    processes: PartialState | None,
    measure: Callable[[str, Any, Any], Iterable[R]],
    protocol: str = NONOVERLAPPING,
) -> list[R]:
    """Return all that `measure` makes of each name, model and tokenizer; no model is loaded beside another.

    `models`: name -> where it is saved; the other arguments and errors as in `load`.
    """
    found: list[R] = []
    for name, path in models.items():
        found += measure(name, *load(path, processes, protocol))  # a variable would keep it while the next is loaded
    return found


def load(path: str, processes: PartialState | None, protocol: str) -> tuple[Any, Any]:
    """Return a saved model and its tokenizer: on the accelerator in the dtype it was saved in, on the CPU in float32.

    Args:
        path: folder or Hub name.
        processes: whose device is taken; None for the accelerator where there is one.
        protocol: decides which head the model needs.

    Raises:
        CheckpointError: the model or its tokenizer cannot be loaded, weights are missing, so that transformers would
            draw them at random, or a protocol for decoders is given an encoder-decoder.
    """
    kind, called = _OTHERS.get(protocol, _CAUSAL)
    device = processes.device if processes is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else "auto"
    try:
        if kind is AutoModelForCausalLM and AutoConfig.from_pretrained(path).is_encoder_decoder:
            raise CheckpointError(f"{path!r} holds an encoder-decoder, and no {called}: give protocol {BY_SOURCE!r}.")
        model, info = kind.from_pretrained(path, dtype=dtype, output_loading_info=True)
    except Exception as error:  # transformers, safetensors and the Hub's client raise what they like
        raise not_loaded(path, called, error) from error
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{path!r} holds no {called}: {missing[0]} and {len(missing) - 1} other weights of one are missing."
        )
    return model.to(device), load_tokenizer(path)


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer that was saved with a model.

    Raises:
        CheckpointError: there is none, or, as transformers makes up of nothing for some models, one without words.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # as above
        raise not_loaded(path, "tokenizer", error) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise CheckpointError(f"{path!r} holds no tokenizer: save that of the model there.")
    return tokenizer


def not_loaded(path: str, called: str, error: Exception) -> PosencError:
    """Return an error of one line for what loading a part of a checkpoint raised."""
    if isinstance(error, PosencError):
        return error
    reason = shorten(str(error), _REASON) or type(error).__name__
    return CheckpointError(f"{path!r} holds no {called}: {reason}")
