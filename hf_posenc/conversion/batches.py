"""Rows of text for a conversion, and batches whose random part follows from the row alone.

A run that was killed, or that is spread over several processes, then masks and moves each row as any other would.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.collators import PoSE
from hf_posenc.conversion.training import IGNORED, causal_batch
from hf_posenc.data import PackedDataset, pack
from hf_posenc.errors import ConfigError, DataError
from hf_posenc.evaluation.documents import Documents, check_vocabulary, contents_of, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MASKED_SHARE = 0.15


def packed_rows(
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase | None,
    model: PreTrainedModel,
    *,
    length: int,
    seed: int | None,
) -> PackedDataset:
    """Return rows of `length` tokens of documents, in an order drawn by `seed`.

    A text gets the special tokens that its tokenizer adds. An end token follows it where that one would put it, and
    where no token says that it is the first of a text; it should be one that the model knows. Where there is no end
    token, that of the start does as well.

    Raises:
        DataError: no documents, neither texts nor token ids, texts without a tokenizer, tokens that the model does not
            know, or less than a row.
        ConfigError: nothing says which token stands between texts.
    """
    embedding: Any = model.get_input_embeddings()
    ids = []
    for index, document in enumerate(contents_of(documents)):
        row = token_ids(document, index, tokenizer, specials=True)
        check_vocabulary(row, index, len(embedding.weight))
        ids.append(row.tolist())
    if not ids:
        raise DataError("there are no documents to make rows of; give at least one.")
    start = _token(_STARTS, tokenizer, model.config)
    end = _token(_ENDS, tokenizer, model.config)
    end = start if end is None else end
    if end is None:
        raise ConfigError("neither tokenizer nor config names an end, separator or start token to put between texts.")
    frame = [] if tokenizer is None else tokenizer("")["input_ids"]
    closes = frame[-1:] == [end] and (end != start or len(frame) > 1)  # as encoders' tokenizers do, beside a start
    return pack(ids, length, eos_token_id=end, bos_token_id=None if closes else start, seed=seed)


_ENDS = ("eos_token_id", "sep_token_id")
_STARTS = ("bos_token_id",)


def _token(names: Sequence[str], *holders: Any) -> int | None:
    """Return the first of these tokens that one of the holders names."""
    named = (getattr(holder, name, None) for holder in holders for name in names)
    return next((token for token in named if isinstance(token, int)), None)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Collates packed rows; what is drawn at random depends on `seed` and the row alone.

    Attributes:
        causal: whether every token but the first is a target; otherwise masked ones are.
        mask_token_id: stands for the tokens that a masked model is to guess, 15 % of a row.
        special_ids: tokens that are never masked, unless a row has no others.
        reach: the length whose positions are drawn (`collators.PoSE`), None for those of the row.
        seed: of the draws.
    """

    causal: bool
    mask_token_id: int | None = None
    special_ids: tuple[int, ...] = ()
    reach: int | None = None
    seed: int = 0

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return `input_ids`, `labels` and, where positions are drawn, `position_ids`, each (b, n) int64."""
        batch = causal_batch(rows) if self.causal else self._masked(rows)
        if self.reach is not None:
            drawn = []
            for row in batch["input_ids"]:
                pose = PoSE(max_length=self.reach)
                pose.generator = self._draw(row)
                drawn.append(pose.positions(len(row)))
            batch["position_ids"] = torch.stack(drawn)
        return batch

    def _masked(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        input_ids = torch.tensor([row["input_ids"] for row in rows], dtype=torch.long)
        labels = torch.full_like(input_ids, IGNORED)
        hidden = max(1, round(MASKED_SHARE * input_ids.shape[1]))
        for row, label in zip(input_ids, labels, strict=True):
            order = torch.randperm(len(row), generator=self._draw(row))
            ordinary = order[~torch.isin(row[order], torch.tensor(self.special_ids, dtype=torch.long))]
            places = (ordinary if len(ordinary) else order)[:hidden]
            label[places] = row[places]
            row[places] = int(self.mask_token_id or 0)
        return {"input_ids": input_ids, "labels": labels}

    def _draw(self, row: Tensor) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(row.numpy().tobytes(), self.seed))
