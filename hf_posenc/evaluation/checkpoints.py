"""Evaluation of saved models: one curve for each model and protocol, all on the same texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from hf_posenc.errors import CheckpointError
from hf_posenc.evaluation.curve import LengthCurve
from hf_posenc.evaluation.masked import masked_perplexity_by_length
from hf_posenc.evaluation.perplexity import perplexity_by_length
from hf_posenc.evaluation.protocols import NONOVERLAPPING, PSEUDO, protocol_named, shown_together
from hf_posenc.evaluation.subject import check_batch_size, check_lengths

if TYPE_CHECKING:
    from accelerate import PartialState


def evaluate_checkpoints(
    models: Mapping[str, str],
    texts: Sequence[str],
    lengths: Sequence[int],
    *,
    protocols: Sequence[str] = (NONOVERLAPPING,),
    stride: int | None = None,
    batch_size: int = 1,
    bos_policy: str | None = None,
    processes: PartialState | None = None,
    partial: Path | str | None = None,
) -> list[LengthCurve]:
    """Measure each model (name -> folder or Hub id) on the same texts, one model in memory at a time.

    A model is loaded with its own tokenizer, on the accelerator in the dtype it was saved in, on the CPU in float32.
    Importing `hf_posenc` has taught transformers' auto classes to load patched models.

    Args:
        models: the name in tables and plots -> where the model is saved.
        protocols: names of protocols; windows with and without overlap are always measured both. `"pseudo"` alone
            fills in masked tokens (`masked_perplexity_by_length`), for encoders.
        stride: for the protocols that take one; their own by default.
        texts, lengths, batch_size, bos_policy, partial: as in `perplexity_by_length`.
        processes: an accelerate `PartialState` whose processes share the texts.

    Returns:
        The curves, models in the order given, for each model its protocols.

    Raises:
        CheckpointError: a model or its tokenizer cannot be loaded.
        UnknownNameError, ConfigError, DataError, UnsupportedFamilyError, OutputError: as in `perplexity_by_length`.
    """
    # Before the first model is loaded, not after the last one was.
    names = [PSEUDO] if list(protocols) == [PSEUDO] else shown_together(protocols)
    for name in names if names != [PSEUDO] else ():
        protocol = protocol_named(name)
        protocol.strides(check_lengths(lengths), stride if protocol.stride else None)
        protocol.bos(bos_policy)
    check_batch_size(batch_size)
    device = processes.device if processes is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    curves = []
    for label, path in models.items():
        model, tokenizer = _load(path, device, masked=names == [PSEUDO])
        shared: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": batch_size, "name": label}
        shared |= {"processes": processes, "partial": partial}
        for name in names:
            if name == PSEUDO:
                curves.append(masked_perplexity_by_length(model, texts, lengths, every=stride or 1, **shared))
                continue
            options: dict[str, Any] = {"protocol": name, "bos_policy": bos_policy}
            options["stride"] = stride if protocol_named(name).stride else None
            curves.append(perplexity_by_length(model, texts, lengths, **options, **shared))
    return curves


def _load(path: str, device: torch.device, *, masked: bool) -> tuple[Any, Any]:
    model: Any
    dtype = torch.float32 if device.type == "cpu" else "auto"
    kind, called = (AutoModelForMaskedLM, "masked") if masked else (AutoModelForCausalLM, "causal")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = kind.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path!r} holds no {called} language model with its tokenizer: {reason}") from error
    return model.to(device), tokenizer
