"""Evaluation of saved models: the same texts or tasks for each, one model in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hf_posenc.errors import ConfigError, LengthError
from hf_posenc.evaluation.curve import LengthCurve
from hf_posenc.evaluation.documents import BOS_NONE
from hf_posenc.evaluation.key_tokens import KeyTokenPerplexity, key_token_perplexity
from hf_posenc.evaluation.loading import load, one_by_one
from hf_posenc.evaluation.masked import masked_perplexity_by_length
from hf_posenc.evaluation.perplexity import perplexity_by_length
from hf_posenc.evaluation.position import PositionCurve, perplexity_by_position
from hf_posenc.evaluation.protocols import (
    BY_POSITION,
    BY_SOURCE,
    KEY_TOKENS,
    NONOVERLAPPING,
    PSEUDO,
    protocol_named,
    shown_together,
)
from hf_posenc.evaluation.result import Result
from hf_posenc.evaluation.retrieval import check_settings, retrieval_by_length
from hf_posenc.evaluation.retrieval_grid import RetrievalGrid
from hf_posenc.evaluation.retrieval_tasks import task_named
from hf_posenc.evaluation.seq2seq import seq2seq_perplexity_by_length
from hf_posenc.evaluation.subject import check_batch_size, check_lengths

if TYPE_CHECKING:
    from accelerate import PartialState

R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Measured(Generic[R]):
    """Results of several models, and why some have none.

    Attributes:
        results: at least one, models in the order given.
        refused: a sentence for each model that cannot take a length.
    """

    results: Sequence[R]
    refused: Sequence[str] = ()


def evaluate_checkpoints(
    models: Mapping[str, str],
    texts: Sequence[Any],
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
            fills in masked tokens (`masked_perplexity_by_length`), for encoders; `"by_source"` alone, with (source,
            target) pairs as texts, is for encoder-decoders (`seq2seq_perplexity_by_length`).
        stride: for the protocols that take one; their own by default.
        texts, lengths, batch_size, bos_policy, partial: as in `perplexity_by_length`.
        processes: an accelerate `PartialState` whose processes share the texts.

    Returns:
        The curves, models in the order given, for each model its protocols.

    Raises:
        CheckpointError: as in `loading.load`.
        UnknownNameError, ConfigError, DataError, UnsupportedFamilyError, OutputError: as in `perplexity_by_length`.
    """
    names = _protocols(protocols, lengths, stride, bos_policy)
    check_batch_size(batch_size)

    def measure(label: str, model: Any, tokenizer: Any) -> Iterator[LengthCurve]:
        shared: dict[str, Any] = {"tokenizer": tokenizer, "name": label, "processes": processes, "partial": partial}
        for name in names:
            if name == BY_SOURCE:
                yield seq2seq_perplexity_by_length(model, texts, lengths, **shared)
                continue
            shared["batch_size"] = batch_size
            if name == PSEUDO:
                every = 1 if stride is None else stride
                yield masked_perplexity_by_length(model, texts, lengths, every=every, **shared)
                continue
            options: dict[str, Any] = {"protocol": name, "bos_policy": bos_policy}
            options["stride"] = stride if protocol_named(name).stride else None
            yield perplexity_by_length(model, texts, lengths, **options, **shared)

    return one_by_one(models, processes, measure, names[0])


def _protocols(asked: Sequence[str], lengths: Sequence[int], stride: int | None, bos_policy: str | None) -> list[str]:
    """Return the protocols to measure, checked before the first model is loaded, not after the last one was."""
    alone = list(asked) in ([PSEUDO], [BY_SOURCE])
    names = list(asked) if alone else shown_together(asked)
    for name in () if alone else names:
        protocol = protocol_named(name)
        protocol.strides(check_lengths(lengths), stride if protocol.stride else None)
        protocol.bos(bos_policy)
    if names == [BY_SOURCE] and (stride is not None or bos_policy is not None):
        raise ConfigError(f"stride and bos_policy mean nothing for protocol={BY_SOURCE!r}: leave them out.")
    if names == [PSEUDO] and bos_policy is not None:
        raise ConfigError(f"bos_policy means nothing for protocol={PSEUDO!r}: leave it out.")
    return names


def positions_of_checkpoints(
    models: Mapping[str, str],
    texts: Sequence[str],
    lengths: Sequence[int],
    *,
    bos_policy: str | None = None,
    stride: int | None = None,
    **shared: Any,
) -> Measured[PositionCurve]:
    """Measure the loss of each model (name -> folder or Hub id) by position; as `evaluate_checkpoints` loads.

    Args:
        models: the name in tables and plots -> where the model is saved.
        texts, bos_policy: as in `perplexity_by_position`.
        lengths: the length of the window, alone.
        stride: None, since nothing slides here.
        shared: its `batch_size`, `processes` and `partial`.

    Raises:
        CheckpointError: as in `loading.load`.
        LengthError: none of the models can take the length.
        PosencError: as in `perplexity_by_position`.
    """
    if len(lengths) > 1 or stride is not None:
        raise ConfigError(f"protocol={BY_POSITION!r} takes the length of one window, and no stride.")
    check_lengths(lengths)
    check_batch_size(shared.get("batch_size", 1))
    chosen: dict[str, Any] = {"bos_policy": bos_policy or BOS_NONE, **shared}

    def measure(model: Any, tokenizer: Any, length: int, name: str) -> PositionCurve:
        return perplexity_by_position(model, texts, length, tokenizer=tokenizer, name=name, **chosen)

    return _measured(models, lengths, measure, shared.get("processes"))


def key_tokens_of_checkpoints(
    models: Mapping[str, str],
    texts: Sequence[str],
    lengths: Sequence[int],
    *,
    evaluator: str | None = None,
    bos_policy: str | None = None,
    **shared: Any,
) -> Measured[KeyTokenPerplexity]:
    """Measure each model (name -> folder or Hub id) on key tokens, at each length; as `evaluate_checkpoints` loads.

    Args:
        models: the name in tables -> where the model is saved.
        texts, bos_policy: as in `key_token_perplexity`.
        lengths: of the long windows.
        evaluator: where the model that chooses the key tokens is saved; each model chooses its own otherwise.
        shared: its `stride`, `batch_size`, `processes` and `partial`.

    Raises:
        CheckpointError: as in `loading.load`.
        LengthError: none of the models can take any of the lengths.
        PosencError: as in `key_token_perplexity`.
    """
    lengths = check_lengths(lengths)
    check_batch_size(shared.get("batch_size", 1))
    judge = None if evaluator is None else load(evaluator, shared.get("processes"), KEY_TOKENS)[0]
    chosen: dict[str, Any] = {"bos_policy": bos_policy or BOS_NONE, "evaluator": judge, **shared}

    def measure(model: Any, tokenizer: Any, length: int, name: str) -> KeyTokenPerplexity:
        return key_token_perplexity(model, texts, length, tokenizer=tokenizer, name=name, **chosen)

    return _measured(models, lengths, measure, shared.get("processes"))


def _measured(
    models: Mapping[str, str],
    lengths: Sequence[int],
    measure: Callable[[Any, Any, int, str], R],
    processes: PartialState | None,
) -> Measured[R]:
    """Call `measure` with each model, its tokenizer, each length and the model's name."""
    refused: list[str] = []

    def measured(name: str, model: Any, tokenizer: Any) -> Iterator[R]:
        for length in lengths:
            try:
                yield measure(model, tokenizer, length, name)
            except LengthError as error:
                refused.append(f"{name}: {error}")

    results = one_by_one(models, processes, measured)
    if not results:
        raise LengthError("; ".join(refused))
    return Measured(results, refused)


def retrieve_checkpoints(
    models: Mapping[str, str],
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    depths: Sequence[float],
    trials: int,
    digits: int,
    seed: int,
    **shared: Any,
) -> list[RetrievalGrid]:
    """Measure how often each model (name -> folder or Hub id) finds what texts hold; as `evaluate_checkpoints` loads.

    Args:
        models: the name in tables and plots -> where the model is saved.
        tasks: names of tasks, each once.
        lengths, depths, trials, digits, seed: as in `retrieval_by_length`.
        shared: its `haystack`, `batch_size`, `processes` and `partial`.

    Returns:
        The grids, models in the order given, for each model its tasks.

    Raises:
        CheckpointError: as in `loading.load`.
        PosencError: as in `retrieval_by_length`.
    """
    names = [task_named(task).name for task in dict.fromkeys(tasks)]  # before the first model is loaded
    check_lengths(lengths)
    check_settings(depths, trials, digits, seed)
    check_batch_size(shared.get("batch_size", 1))
    settings: dict[str, Any] = {"depths": depths, "trials": trials, "digits": digits, "seed": seed}

    def measure(label: str, model: Any, tokenizer: Any) -> Iterator[RetrievalGrid]:
        for name in names:
            yield retrieval_by_length(model, tokenizer, lengths, task=name, name=label, **settings, **shared)

    return one_by_one(models, shared.get("processes"), measure)
