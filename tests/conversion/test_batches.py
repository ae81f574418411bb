"""What is drawn at random in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import hf_posenc as posenc
from hf_posenc.conversion.batches import Batches
from hf_posenc.conversion.training import IGNORED
from tests.conversion.small_models import LENGTH, SMALL, masking, quick

CLS, SEP, MASK = 1, 2, 5
MASKED = Batches(causal=False, mask_token_id=MASK, special_ids=(CLS, SEP, MASK))


@pytest.mark.parametrize("texts", [1, 5, 10])
def test_tokens_that_close_texts_are_not_guessed(texts: int) -> None:
    """As transformers' collator spares them: there is nothing to learn from them, and texts are told apart by them."""
    words = 40 // texts - 2
    row = [CLS, *range(10, 10 + words), SEP] * texts
    batch = MASKED([{"input_ids": row}])
    (given,), (labels,) = batch["input_ids"], batch["labels"]
    hidden = labels != IGNORED
    assert int(hidden.sum()) == 6  # 15 % of 40
    assert bool((given[hidden] == MASK).all())
    assert set(labels[hidden].tolist()) <= set(range(10, 10 + words))
    assert given[~hidden].tolist() == torch.tensor(row)[~hidden].tolist()


def test_a_row_of_nothing_else_still_has_something_to_guess() -> None:
    labels = MASKED([{"input_ids": [CLS, SEP] * 4}])["labels"]
    assert int((labels != IGNORED).sum()) == 1


def test_a_conversion_asks_the_tokenizer_what_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    guessed: set[int] = set()
    stock = Batches._masked

    def heard(self: Batches, rows: Any) -> Any:
        batch = stock(self, rows)
        guessed.update(batch["labels"].flatten().tolist())
        return batch

    monkeypatch.setattr(Batches, "_masked", heard)
    tokenizer = masking()
    assert tokenizer.all_special_ids == [0, MASK]
    documents = [[10 + number % 40, 0] * (LENGTH // 2) for number in range(80)]
    posenc.convert(BertForMaskedLM(BertConfig(**SMALL)), posenc.RoPE(), documents, quick(), tokenizer=tokenizer)
    assert len(guessed) > 20
    assert guessed.isdisjoint({0, MASK})
