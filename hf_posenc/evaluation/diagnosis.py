"""Why absolute positions fail, measured on one model: everything that `hf-posenc diagnose` knows of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import ConfigError, DataError, LengthError, UnsupportedFamilyError
from hf_posenc.evaluation.attention_record import LayerEffect, check_precision, position_effects, reporting_attention
from hf_posenc.evaluation.documents import BOS_NONE, Corpus, Documents
from hf_posenc.evaluation.position_table import RotationReport, TableReport, rotation_report, table_report
from hf_posenc.evaluation.result import Result
from hf_posenc.evaluation.score_terms import ScoreTerms, score_terms
from hf_posenc.evaluation.scoring import evaluation_mode
from hf_posenc.evaluation.shift import ShiftCurve, loss_by_shift, shifts_up_to
from hf_posenc.evaluation.subject import check_batch_size, facts_of, model_name, prepare_for, trained_length
from hf_posenc.length import max_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
LENGTH = 128
"""Tokens of a sequence in which scores are measured, where nothing else is asked for."""
SEQUENCES = 64
"""Sequences of random tokens over which scores are averaged, where nothing else is asked for."""
_WINDOW, _WINDOWS = 64, 16
_TERM_WINDOWS = 4
_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Result):
    """What positions do in one model.

    Attributes:
        kind: `learned table`, `fixed table`, `rotary`, or `in the scores or none`, by what was found in the model.
        max_length: positions the model can express, None where no table ends.
        length, sequences, seed: of the random tokens in which `layers` were measured.
        terms: the four terms of the first layer, exact, on text; None with a reason.
        layers: what positions do to the scores of every layer, estimated from random tokens.
        table, rotation: what the table or the rotary frequencies show by themselves; None where there are none.
        shift: the loss of text at moved positions; None with a reason.
        reasons: what was not measured -> why.
        text_hash: as in `LengthCurve`.
    """

    kind: str
    max_length: int | None
    length: int
    sequences: int
    seed: int
    terms: ScoreTerms | None
    layers: tuple[LayerEffect, ...]
    table: TableReport | None
    rotation: RotationReport | None
    shift: ShiftCurve | None
    reasons: Mapping[str, str]
    text_hash: str

    @property
    def position_share(self) -> list[float]:
        """Share of the variance of scores that positions explain, for every layer, all heads together."""
        return [float(e.position.sum().clamp(min=0) / e.variance.sum().clamp(min=1e-300)) for e in self.layers]

    @property
    def toeplitz_r2(self) -> float | None:
        """Share of the position-dependent variance that distance alone explains, over all layers and heads.

        Heads in which positions explain next to nothing are left out; None where there is no other.
        """
        heard = [
            (float(distance), float(position))
            for effect in self.layers
            for distance, position, ratio in zip(effect.distance, effect.position, effect.toeplitz_r2, strict=True)
            if ratio is not None
        ]
        whole = sum(position for _, position in heard)
        return min(1.0, sum(distance for distance, _ in heard) / whole) if whole else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data, numbers of six digits, with the shares that are derived from it."""
        data = {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        for effect, entry in zip(self.layers, data["layers"], strict=True):
            entry |= {"position_share": _plain(effect.position_share), "toeplitz_r2": _plain(effect.toeplitz_r2)}
        if self.shift is not None:
            data["shift"] |= {"cost": _plain(self.shift.cost), "usable": self.shift.usable}
        return data | {"position_share": _plain(self.position_share), "toeplitz_r2": _plain(self.toeplitz_r2)}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def diagnose(
    model: PreTrainedModel,
    documents: Documents,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    length: int | None = None,
    sequences: int = SEQUENCES,
    batch_size: int = 8,
    name: str | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Measure what positions do in a model, patched or not, with or without a language-modelling head.

    Exact are the four terms of the first layer, the rows of the table, the frequencies, and the loss at moved
    positions on these texts. Estimated, from sequences of random tokens of these texts, is what positions do to the
    scores of every layer; of an encoder-decoder, of its encoder. The model's modes and its attention backend are
    restored; nothing else of it is touched.

    Args:
        model: in float32 or float64, on any device.
        documents: token-id lists, 1-D tensors, or texts (then give `tokenizer`).
        tokenizer: needed for texts, and for the mask token of a masked language model.
        length: tokens of a sequence in which scores are measured; 128, or what the model can take, by default.
        sequences: sequences of random tokens, at least 2; rounded up to an even number.
        batch_size: sequences in one forward pass.
        name: what to call the model in tables; its checkpoint's name by default.
        seed: of the random tokens.

    Raises:
        ConfigError: half precision, weights that are not finite, or a length, number of sequences, batch size or seed
            that cannot be used.
        DataError: the documents cannot be used.
        UnsupportedFamilyError: the model reports no attention probabilities.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedFamilyError(
            f"expected a transformers PreTrainedModel, got: {type(model).__name__}; merge adapters first."
        )
    check_precision(model)
    _check_weights(model)
    check_batch_size(batch_size)
    check_settings(length, sequences, seed)
    limit = max_length(model)
    length = _length(length, limit)
    corpus = prepare_for(model, documents, tokenizer=tokenizer, bos_policy=BOS_NONE)
    rows = _random_rows(corpus, length, sequences, seed)
    return Diagnosis(
        name=name or model_name(model),
        max_length=limit,
        length=length,
        sequences=len(rows),
        seed=seed,
        text_hash=corpus.digest,
        **facts_of(model, tokenizer),
        **_measured(model, rows, _windows(corpus, limit), tokenizer, batch_size),
    )


def text_when_moved(
    model: PreTrainedModel, documents: Documents, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> ShiftCurve:
    """Return only what moving all positions does to the loss of a little text, which takes a few forward passes.

    Arguments as in `diagnose`.

    Raises:
        UnsupportedFamilyError: the positions of this model cannot be moved, or it has no loss.
        DataError: the documents cannot be used, or a masked language model has no mask token.
    """
    corpus, limit = prepare_for(model, documents, tokenizer=tokenizer, bos_policy=BOS_NONE), max_length(model)
    with evaluation_mode(model):
        return _shift(model, _windows(corpus, limit)[:_TERM_WINDOWS], limit, tokenizer)


def _measured(
    model: PreTrainedModel, rows: Tensor, windows: Tensor, tokenizer: PreTrainedTokenizerBase | None, batch_size: int
) -> dict[str, Any]:
    """Return the fields that come from running the model on random rows, (N, n), and on windows of text, (b, m)."""
    reasons: dict[str, str] = {}
    limit = max_length(model)
    with evaluation_mode(model):
        with reporting_attention(model):
            layers = position_effects(model, rows, batch_size=batch_size)
            terms = _or_reason("terms", reasons, lambda: score_terms(model, windows[:_TERM_WINDOWS]))
        shift = _or_reason("shift", reasons, lambda: _shift(model, windows, limit, tokenizer))
        table = table_report(model)
        rotation = rotation_report(model, limit or trained_length(model) or rows.shape[1])
    return {
        "kind": _kind(table, rotation),
        "layers": tuple(layers),
        "terms": terms,
        "shift": shift,
        "table": table,
        "rotation": rotation,
        "reasons": reasons,
    }


def _check_weights(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model out of which nothing could come but NaN."""
    for name, weight in model.named_parameters():
        if not weight.is_meta and not bool(weight.isfinite().all()):
            raise ConfigError(f"the weight {name} holds numbers that are not finite; the checkpoint is damaged.")


def check_settings(length: int | None, sequences: int, seed: int) -> None:
    """Raise ConfigError for numbers that no model could be diagnosed with."""
    for what, value, least in (("length", length, 3), ("sequences", sequences, 2), ("seed", seed, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConfigError(f"{what} must be an integer of at least {least}; got {value!r}.")


def _length(length: int | None, limit: int | None) -> int:
    """Return the length to measure scores at, or raise ConfigError where the model has fewer positions."""
    if length is not None and limit is not None and length > limit:
        raise ConfigError(f"length={length} was asked for, and the model has {limit} positions; give at most that.")
    return length or min(LENGTH, limit or LENGTH)


def _kind(table: TableReport | None, rotation: RotationReport | None) -> str:
    if table is not None:
        return "fixed table" if table.fixed else "learned table"
    return "in the scores or none" if rotation is None else "rotary"


def _or_reason(what: str, reasons: dict[str, str], measure: Callable[[], T]) -> T | None:
    try:
        return measure()
    except (UnsupportedFamilyError, ConfigError, DataError, LengthError) as error:
        reasons[what] = str(error)
        return None


def _random_rows(corpus: Corpus, length: int, sequences: int, seed: int) -> Tensor:
    """Return tokens drawn from the texts one by one, as often as they occur there, (sequences, length), even."""
    pool = torch.cat(corpus.documents)
    draw = torch.Generator().manual_seed(seed)
    return pool[torch.randint(len(pool), (sequences + sequences % 2, length), generator=draw)]


def _windows(corpus: Corpus, limit: int | None) -> Tensor:
    """Return stretches of text, (b, n): the beginning of every document first, then what follows there."""
    usual = sorted(len(document) for document in corpus.documents)[len(corpus.documents) // 2]
    size = min(_WINDOW, usual, _WINDOW if limit is None else max(limit // 2, 2))
    cuts = [document.unfold(0, size, size) for document in corpus.documents if len(document) >= size]
    deepest = max(len(cut) for cut in cuts)
    found = [cut[depth] for depth in range(deepest) for cut in cuts if depth < len(cut)]
    return torch.stack(found[:_WINDOWS])


def _shift(
    model: PreTrainedModel, windows: Tensor, limit: int | None, tokenizer: PreTrainedTokenizerBase | None
) -> ShiftCurve:
    """Return the loss at moved positions, as far as the model has any; raise UnsupportedFamilyError or DataError."""
    masked = not _looks_back_only(model, windows[:1])
    mask = getattr(tokenizer, "mask_token_id", None) if masked else None
    if masked and mask is None:
        raise DataError("the model sees later tokens, and no tokenizer with a mask token was given to score it by.")
    first = getattr(tokenizer, "cls_token_id", None) if masked else None
    if first is not None:  # an encoder has always seen it in front
        windows = torch.cat([torch.full_like(windows[:, :1], first), windows[:, :-1]], dim=1)
    reach = limit or 2 * (trained_length(model) or LENGTH)
    return loss_by_shift(model, windows, shifts_up_to(max(reach - windows.shape[1], 0)), mask_token_id=mask)


def _looks_back_only(model: PreTrainedModel, row: Tensor) -> bool:
    """Tell whether no logit of a row, (1, n), changes with a later token."""
    if model.config.is_encoder_decoder:
        raise UnsupportedFamilyError(f"{type(model).__name__} is an encoder-decoder, whose positions cannot be moved.")
    row = row.to(model.device)
    other = row.clone()
    other[0, -1] = row[0, 0] if row[0, 0] != row[0, -1] else (row[0, -1] + 1) % 2
    outputs: list[Any] = [model(input_ids=ids) for ids in (row, other)]
    if any(getattr(output, "logits", None) is None for output in outputs):
        raise UnsupportedFamilyError(f"{type(model).__name__} has no language-modelling head, and so no loss.")
    before, after = (output.logits[:, :-1] for output in outputs)
    return bool((before - after).abs().max() <= 1e-4 * before.abs().max())
