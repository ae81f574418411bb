"""Evaluation of saved models: one curve for each, all on the same texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc.errors import CheckpointError
from hf_posenc.evaluation.curve import LengthCurve
from hf_posenc.evaluation.documents import BOS_NONE
from hf_posenc.evaluation.perplexity import perplexity_by_length
from hf_posenc.evaluation.subject import check_batch_size, check_lengths
from hf_posenc.evaluation.windows import NONOVERLAPPING, check_protocol

if TYPE_CHECKING:
    from accelerate import PartialState


def evaluate_checkpoints(
    models: Mapping[str, str],
    texts: Sequence[str],
    lengths: Sequence[int],
    *,
    protocol: str = NONOVERLAPPING,
    stride: int | None = None,
    batch_size: int = 1,
    bos_policy: str = BOS_NONE,
    processes: PartialState | None = None,
) -> list[LengthCurve]:
    """Measure each model (name -> folder or Hub id) on the same texts, one model in memory at a time.

    A model is loaded with its own tokenizer, on the accelerator in the dtype it was saved in, on the CPU in float32.
    Importing `hf_posenc` has taught `AutoModelForCausalLM` to load patched models.

    Args:
        models: the name in tables and plots -> where the model is saved.
        texts, lengths, protocol, stride, batch_size, bos_policy: as in `perplexity_by_length`.
        processes: an accelerate `PartialState` whose processes share the texts.

    Raises:
        CheckpointError: a model or its tokenizer cannot be loaded.
        UnknownNameError, ConfigError, DataError, UnsupportedFamilyError: as in `perplexity_by_length`.
    """
    # Before the first model is loaded, not after the last one was.
    check_protocol(protocol, stride, check_lengths(lengths))
    check_batch_size(batch_size)
    device = processes.device if processes is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    curves = []
    for name, path in models.items():
        model, tokenizer = _load(path, device)
        curves.append(
            perplexity_by_length(
                model,
                texts,
                lengths,
                protocol=protocol,
                stride=stride,
                tokenizer=tokenizer,
                batch_size=batch_size,
                bos_policy=bos_policy,
                name=name,
                processes=processes,
            )
        )
    return curves


def _load(path: str, device: torch.device) -> tuple[Any, Any]:
    model: Any
    dtype = torch.float32 if device.type == "cpu" else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path!r} holds no causal language model with its tokenizer: {error}") from error
    return model.to(device), tokenizer
