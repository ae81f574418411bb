"""What is drawn at random in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

import hf_posenc as posenc
from hf_posenc.conversion.batches import Batches, packed_rows
from hf_posenc.conversion.training import IGNORED
from hf_posenc.errors import ConfigError
from tests.conversion.small_models import LENGTH, SMALL, gpt2, masking, quick

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


def test_a_model_that_knows_no_end_token_has_its_start_token_between_texts() -> None:
    model = gpt2(bos_token_id=1, eos_token_id=None)
    for documents in ([[1, 7, 8], [1, 9]], [[7, 8], [9]]):
        packed = packed_rows(documents, None, model, length=4, seed=None)
        assert packed.dataset["input_ids"][0][:4] == (documents[0] + [1, 9, 1])[:4]


@pytest.mark.parametrize("names", [{"bos_token": "<s>"}, {"bos_token": "<s>", "eos_token": "<s>"}])
def test_a_start_that_is_the_end_too_stands_once_between_texts(names: dict[str, str]) -> None:
    """As OPT's, whose tokenizer puts one token before a text and none after it."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 5, "b": 6}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    model = gpt2(bos_token_id=1, eos_token_id=None)
    packed = packed_rows(["a b", "b", "a"], tokenizer, model, length=7, seed=None)
    assert packed.dataset["input_ids"][:] == [[1, 5, 6, 1, 6, 1, 5]]


def test_texts_that_nothing_can_tell_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="names an end, separator or start token"):
        packed_rows([[7, 8]], None, gpt2(bos_token_id=None, eos_token_id=None), length=4, seed=None)
