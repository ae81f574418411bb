"""Rows of text, what is drawn at random in a batch, and batches of rows that are not of one length."""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

import hf_posenc as posenc
from hf_posenc.conversion.batches import Batches, rows_of, single_texts
from hf_posenc.conversion.distillation import Lesson
from hf_posenc.conversion.layerwise import layer_paths, layerwise_loss
from hf_posenc.conversion.recipe import Calibrate, Distill, Layerwise
from hf_posenc.conversion.training import IGNORED
from hf_posenc.errors import ConfigError, DataError
from tests.conversion.small_models import LENGTH, SMALL, gpt2, masking, quick, texts

CLS, SEP, MASK = 1, 2, 5
SURE = {"initializer_range": 0.5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MASKED = Batches(causal=False, mask_token_id=MASK, special_ids=(CLS, SEP, MASK))


@pytest.mark.parametrize("number", [1, 5, 10])
def test_tokens_that_close_texts_are_not_guessed(number: int) -> None:
    """As transformers' collator spares them: there is nothing to learn from them."""
    words = 40 // number - 2
    row = [CLS, *range(10, 10 + words), SEP] * number
    batch = MASKED([{"input_ids": row}])
    (given,), (labels,) = batch["input_ids"], batch["labels"]
    hidden = labels != IGNORED
    assert int(hidden.sum()) == round(0.15 * words * number)
    assert bool((given[hidden] == MASK).all())
    assert set(labels[hidden].tolist()) <= set(range(10, 10 + words))
    assert given[~hidden].tolist() == torch.tensor(row)[~hidden].tolist()


def test_a_row_of_a_masked_model_holds_one_text() -> None:
    """Long texts are cut into equal pieces, so that no row is a last token or two; empty ones have nothing to guess."""
    documents = [[CLS, 10, 11, SEP], [CLS, SEP], [], [CLS, *range(10, 28), SEP]]
    packed = single_texts(documents, 8, special_ids=(CLS, SEP), seed=None)
    rows = packed.dataset["input_ids"][:]
    assert rows[0] == documents[0]
    assert [len(row) for row in rows] == [4, 7, 7, 6]
    assert list(chain.from_iterable(rows[1:])) == documents[3]
    report = packed.report
    assert (report.tokens_in, report.tokens_out, report.dropped, report.sequences) == (26, 24, 2, 4)
    drawn = [single_texts(documents, 8, special_ids=(CLS, SEP), seed=seed).dataset["input_ids"][:] for seed in range(9)]
    assert {tuple(map(len, each)) for each in drawn} == {(4, 7, 7, 6), (7, 7, 6, 4)}
    with pytest.raises(DataError, match="nothing but special tokens"):
        single_texts([[CLS, SEP], []], 8, special_ids=(CLS, SEP), seed=None)


@pytest.mark.parametrize("reach", [None, 64])
def test_a_row_is_drawn_alike_whatever_it_is_padded_to(reach: int | None) -> None:
    batches = dataclasses.replace(MASKED, reach=reach, pad_token_id=3)
    short, long = {"input_ids": [CLS, *range(10, 20), SEP]}, {"input_ids": [CLS, *range(10, 40), SEP]}
    alone, beside = batches([short]), batches([long, short])
    assert "attention_mask" not in alone
    assert beside["attention_mask"].sum(1).tolist() == [32, 12]
    for name, value in alone.items():
        assert torch.equal(beside[name][1, :12], value[0]), name
    assert set(beside["input_ids"][1, 12:].tolist()) == {3}
    assert set(beside["labels"][1, 12:].tolist()) == {IGNORED}


def ragged(rows: int = 40) -> list[list[int]]:
    """Texts of 4 to 16 tokens that end with token 0."""
    return [[*words[: 3 + number % (LENGTH - 3)], 0] for number, words in enumerate(texts(rows))]


def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SMALL, **SURE)).eval()
    torch.nn.init.normal_(model.bert.embeddings.position_embeddings.weight, std=0.5)
    return model


@pytest.mark.parametrize("stages", ["text", "distill"])
def test_halves_of_a_padded_batch_teach_what_the_whole_does(stages: str) -> None:
    """So that a run on two processes is one of the doubled batch, however many tokens each of them gets."""
    model, rows = bert(), [{"input_ids": text} for text in [*ragged(4), *ragged(13)[-4:]]]
    recipe = quick(distill=Distill(weight=0.5) if stages == "distill" else None)
    original = bert()
    torch.nn.init.normal_(original.bert.embeddings.position_embeddings.weight, std=0.5)
    batches = dataclasses.replace(MASKED, special_ids=(0, MASK))

    def loss(some: list[dict[str, Any]]) -> float:
        asked = sum(batches.means([row])[1] for row in rows) / len(rows)  # type: ignore[arg-type]
        lesson = Lesson(recipe=recipe, steps=9, targets=asked * len(some), causal=False, original=original)
        return float(lesson.loss(model, batches(some), 0))

    assert loss(rows) == pytest.approx((loss(rows[:4]) + loss(rows[4:])) / 2, rel=1e-5)


def test_what_is_padded_does_not_count_where_layers_are_taught() -> None:
    model, original, rows = bert(), bert(), [{"input_ids": text} for text in ragged(8)]
    posenc.patch(model, posenc.encoding("t5"))
    for weight in model.bert.posenc.parameters():
        torch.nn.init.normal_(weight)
    plan = posenc.plan(original, posenc.encoding("t5"))
    found = []
    for filler in (0, 9):
        given = dataclasses.replace(MASKED, pad_token_id=filler)(rows)
        inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
        paths = layer_paths(original, plan)
        found.append(float(layerwise_loss(model, inputs, original=original, paths=paths, positions=None)))
    assert found[0] == pytest.approx(found[1], rel=1e-5) != 0


@pytest.mark.parametrize("target", ["t5", "rope"])
def test_texts_of_all_lengths_are_measured_as_if_each_were_alone(target: str) -> None:
    model, held = bert(), ragged(5)
    recipe = quick(calibrate=Calibrate(rows=8), layerwise=Layerwise(share=0.5), tokens=600)
    done = posenc.convert(
        model, posenc.encoding(target), ragged(), recipe, tokenizer=masking(), held_out=held, length=LENGTH
    )
    batches, losses, count = dataclasses.replace(MASKED, special_ids=(0, MASK)), 0.0, 0
    for text in held:
        given = batches([{"input_ids": text}])
        losses += float(model(**given).loss) * int((given["labels"] != IGNORED).sum())
        count += int((given["labels"] != IGNORED).sum())
    assert done.record["stages"][-1]["after"] == pytest.approx(losses / count, rel=1e-5)
    lengths = [len(text) for text in ragged()]
    assert done.record["tokens_seen"] == pytest.approx(600, abs=4 * sum(lengths) / len(lengths))


def test_a_conversion_asks_the_tokenizer_what_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    guessed: set[int] = set()
    stock = Batches._masked

    def heard(self: Batches, row: Any) -> Any:
        made = stock(self, row)
        guessed.update(made["labels"].tolist())
        return made

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
        packed = rows_of(documents, None, model, length=4, causal=True, seed=None)
        assert packed.dataset["input_ids"][0][:4] == (documents[0] + [1, 9, 1])[:4]


@pytest.mark.parametrize("names", [{"bos_token": "<s>"}, {"bos_token": "<s>", "eos_token": "<s>"}])
def test_a_start_that_is_the_end_too_stands_once_between_texts(names: dict[str, str]) -> None:
    """As OPT's, whose tokenizer puts one token before a text and none after it."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 5, "b": 6}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    model = gpt2(bos_token_id=1, eos_token_id=None)
    packed = rows_of(["a b", "b", "a"], tokenizer, model, length=7, causal=True, seed=None)
    assert packed.dataset["input_ids"][:] == [[1, 5, 6, 1, 6, 1, 5]]


def test_texts_that_nothing_can_tell_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="names an end, separator or start token"):
        rows_of([[7, 8]], None, gpt2(bos_token_id=None, eos_token_id=None), length=4, causal=True, seed=None)
