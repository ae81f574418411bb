"""Rows of text for a conversion, and batches whose random part follows from the row alone.

A run that was killed, or that is spread over several processes, then masks and moves each row as any other would.

What is told from the past alone may have other texts before it, and rows are full. A masked model looks both ways, and
one that was trained on a text at a time is no teacher where several share a row, so there a row holds one text, or a
piece of it, and batches are padded.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_posenc.collators import PoSE
from hf_posenc.conversion.training import IGNORED, causal_batch
from hf_posenc.data import PackedDataset, PackingReport, pack
from hf_posenc.errors import ConfigError, DataError
from hf_posenc.evaluation.documents import Documents, check_vocabulary, contents_of, token_ids

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MASKED_SHARE = 0.15


def rows_of(
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase | None,
    model: PreTrainedModel,
    *,
    length: int,
    causal: bool,
    seed: int | None,
) -> PackedDataset:
    """Return rows of documents, in an order drawn by `seed`: of `length` tokens, or of one text each if not `causal`.

    A text gets the special tokens that its tokenizer adds. In full rows, an end token follows it where that one would
    put it, and where no token says that it is the first of a text; it should be one that the model knows. Where there
    is no end token, that of the start does as well.

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
    if not causal:
        return single_texts(ids, length, special_ids=getattr(tokenizer, "all_special_ids", ()), seed=seed)
    start = _token(_STARTS, tokenizer, model.config)
    end = _token(_ENDS, tokenizer, model.config)
    end = start if end is None else end
    if end is None:
        raise ConfigError("neither tokenizer nor config names an end, separator or start token to put between texts.")
    frame = [] if tokenizer is None else tokenizer("")["input_ids"]
    closes = frame[-1:] == [end] and (end != start or len(frame) > 1)  # as encoders' tokenizers do, beside a start
    return pack(ids, length, eos_token_id=end, bos_token_id=None if closes else start, seed=seed)


def single_texts(
    documents: Sequence[Sequence[int]], length: int, *, special_ids: Collection[int], seed: int | None
) -> PackedDataset:
    """Return a row for every text, and as many equal ones as it takes for a text of more than `length` tokens.

    Rows of nothing but special tokens are dropped. `seed` shuffles the texts; `None` keeps their order.

    Raises:
        DataError: no row is left.
    """
    from datasets import Dataset  # as in `pack`

    order = list(range(len(documents)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    pieces = []
    for index in order:
        text = np.asarray(documents[index], dtype=np.int64)
        pieces += [piece.tolist() for piece in np.array_split(text, max(1, math.ceil(len(text) / length)))]
    rows = [piece for piece in pieces if not set(piece).issubset(special_ids)]
    if not rows:
        raise DataError(f"{len(documents)} documents hold nothing but special tokens; give some text.")
    tokens_in, tokens_out = sum(map(len, pieces)), sum(map(len, rows))
    report = PackingReport(
        documents=len(documents),
        tokens_in=tokens_in,
        separators=0,
        tokens_out=tokens_out,
        dropped=tokens_in - tokens_out,
        sequences=len(rows),
        length=length,
    )
    return PackedDataset(dataset=Dataset.from_dict({"input_ids": rows}), report=report)


def longest(rows: Dataset, count: int) -> Dataset:
    """Return the longest `count` rows, the first of equals, cut to the length of the shortest among them."""
    from datasets import Dataset  # as in `pack`

    lengths = [len(row) for row in rows["input_ids"]]
    order = sorted(range(len(rows)), key=lambda index: -lengths[index])[:count]
    found = rows.select(order)["input_ids"]
    least = min(map(len, found))
    return Dataset.from_dict({"input_ids": [row[:least] for row in found]})


_ENDS = ("eos_token_id", "sep_token_id")
_STARTS = ("bos_token_id",)


def _token(names: Sequence[str], *holders: Any) -> int | None:
    """Return the first of these tokens that one of the holders names."""
    named = (getattr(holder, name, None) for holder in holders for name in names)
    return next((token for token in named if isinstance(token, int)), None)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Collates rows; what is drawn at random depends on `seed` and the row alone.

    Attributes:
        causal: whether every token but the first is a target; otherwise masked ones are.
        mask_token_id: stands for the tokens that a masked model is to guess, 15 % of those of a row.
        special_ids: tokens that are never masked.
        pad_token_id: fills shorter rows up.
        reach: the length whose positions are drawn (`collators.PoSE`), None for those of the row.
        seed: of the draws.
    """

    causal: bool
    mask_token_id: int | None = None
    special_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    reach: int | None = None
    seed: int = 0

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return `input_ids`, `labels` and, where positions are drawn, `position_ids`, each (b, n) int64.

        With rows of different lengths there is an `attention_mask` too, and nothing is asked where it is 0.
        """
        made = [self._row(row) for row in rows]
        fill = {"input_ids": self.pad_token_id, "labels": IGNORED}
        batch = {
            name: pad_sequence([row[name] for row in made], batch_first=True, padding_value=fill.get(name, 0))
            for name in made[0]
        }
        lengths = {len(row["input_ids"]) for row in made}
        if len(lengths) > 1:
            seen = [torch.ones_like(row["input_ids"]) for row in made]
            batch["attention_mask"] = pad_sequence(seen, batch_first=True)
        return batch

    def means(self, rows: Dataset) -> tuple[float, float]:
        """Return how many tokens rows have, and in how many of them something is asked for, in the mean."""
        if self.causal:
            return len(rows[0]["input_ids"]), len(rows[0]["input_ids"]) - 1
        asked = [self._masked(row)["labels"] != IGNORED for row in rows]
        return sum(map(len, asked)) / len(asked), sum(int(row.sum()) for row in asked) / len(asked)

    def _row(self, row: dict[str, Any]) -> dict[str, Tensor]:
        made = {name: value[0] for name, value in causal_batch([row]).items()} if self.causal else self._masked(row)
        if self.reach is not None:
            pose = PoSE(max_length=self.reach)
            pose.generator = self._draw(made["input_ids"])
            made["position_ids"] = pose.positions(len(made["input_ids"]))
        return made

    def _masked(self, row: dict[str, Any]) -> dict[str, Tensor]:
        input_ids = torch.tensor(row["input_ids"], dtype=torch.long)
        labels = torch.full_like(input_ids, IGNORED)
        order = torch.randperm(len(input_ids), generator=self._draw(input_ids))
        ordinary = order[~torch.isin(input_ids[order], torch.tensor(self.special_ids, dtype=torch.long))]
        places = ordinary[: max(1, round(MASKED_SHARE * len(ordinary)))]
        labels[places] = input_ids[places]
        input_ids[places] = int(self.mask_token_id or 0)
        return {"input_ids": input_ids, "labels": labels}

    def _draw(self, row: Tensor) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(row.numpy().tobytes(), self.seed))
