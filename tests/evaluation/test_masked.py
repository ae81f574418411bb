"""Masked models and encoder-decoders by length, against slow loops, and on a real antibody model."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_posenc.errors import ConfigError, DataError, UnsupportedFamilyError
from hf_posenc.evaluation import masked_perplexity_by_length, seq2seq_perplexity_by_length
from tests.checkpoints import masked_accuracy, sapiens_roberta
from tests.evaluation.models import SMALL, VOCABULARY, random_documents, sharpened

CLS, SEP, MASK = 1, 2, 3
TOKENIZER: Any = SimpleNamespace(cls_token_id=CLS, sep_token_id=SEP, mask_token_id=MASK, bos_token_id=None)


def bert() -> Any:
    return sharpened(BertForMaskedLM(BertConfig(**SMALL)))


def _by_hand(model: Any, ids: list[int], inner: int, every: int) -> tuple[list[float], int]:
    nats, right = [], 0
    for at in range(0, len(ids), every):
        begin = at // inner * inner
        row = [CLS, *ids[begin : begin + inner], SEP]
        row[1 + at - begin] = MASK
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row])).logits[0, 1 + at - begin].double()
        nats.append(-logits.log_softmax(-1)[ids[at]].item())
        right += int(logits.argmax()) == ids[at]
    return nats, right


@pytest.mark.parametrize("every", [1, 3])
def test_each_token_is_hidden_alone_in_its_window(every: int) -> None:
    model, documents = bert(), random_documents(23, 9)
    curve = masked_perplexity_by_length(model, documents, [12, 64, 128], tokenizer=TOKENIZER, every=every, batch_size=4)
    for length in (12, 64):
        pairs = [_by_hand(model, ids, length - 2, every) for ids in documents]
        nats = [value for values, _ in pairs for value in values]
        assert curve.n_tokens[length] == len(nats) == sum(math.ceil(size / every) for size in (23, 9))
        assert curve.nll_sum[length] == pytest.approx(math.fsum(nats), rel=1e-6)
        assert curve.n_correct[length] == sum(right for _, right in pairs)
    assert curve.accuracy[12] == curve.n_correct[12] / curve.n_tokens[12]
    assert (curve.protocol, curve.bos_policy, curve.window[128]) == ("pseudo", "every_window", 25)
    assert curve.bits_per_byte is None  # no probability of the text


@pytest.mark.parametrize("document", [[CLS, 8, 9], [8, 9, SEP]])
def test_end_tokens_are_not_given_twice(document: list[int]) -> None:
    with pytest.raises(DataError, match="end tokens already"):
        masked_perplexity_by_length(bert(), [document], [12], tokenizer=TOKENIZER)


def test_a_uniform_masked_model_scores_its_vocabulary_and_a_table_ends() -> None:
    model = bert()
    for weight in (model.cls.predictions.decoder.weight, model.cls.predictions.decoder.bias):
        weight.data.zero_()
    curve = masked_perplexity_by_length(model, random_documents(100), [16, 64, 96], tokenizer=TOKENIZER)
    assert curve.ppl == pytest.approx({16: VOCABULARY, 64: VOCABULARY}, rel=1e-9)
    assert "no position 65" in curve.refused[96]


def test_the_trained_length_leaves_out_the_rows_before_position_zero() -> None:
    model = sharpened(RobertaForMaskedLM(RobertaConfig(**SMALL | {"pad_token_id": 1})))
    curve = masked_perplexity_by_length(model, random_documents(30), [16], tokenizer=TOKENIZER)
    assert curve.trained_length == 62


def test_what_cannot_be_masked_says_why() -> None:
    with pytest.raises(ConfigError, match="mask token"):
        masked_perplexity_by_length(bert(), random_documents(9), [8], tokenizer=SimpleNamespace())  # type: ignore[arg-type]
    for wrong in ({"lengths": [2]}, {"lengths": [8], "every": 0}):
        with pytest.raises(ConfigError, match="must exceed the 2 end tokens"):
            masked_perplexity_by_length(bert(), random_documents(9), tokenizer=TOKENIZER, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFamilyError, match="no logits for each token"):
        masked_perplexity_by_length(bert().bert, random_documents(9), [8], tokenizer=TOKENIZER)


def test_sapiens_fills_in_real_antibodies_as_the_plain_loop_does() -> None:
    model, tokenizer = sapiens_roberta()
    heavy = (
        "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSR"
        "WGGDGFYAMDYWGQGTLVTVSS"
    )
    curve = masked_perplexity_by_length(model, [heavy], [32, 144], tokenizer=tokenizer, batch_size=32)
    assert curve.accuracy[144] == pytest.approx(masked_accuracy(model, tokenizer, heavy), abs=1e-6)
    assert curve.ppl[144] < curve.ppl[32] < 30  # the whole domain helps; 20 amino acids


def t5() -> Any:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return sharpened(T5ForConditionalGeneration(config))


def test_targets_are_scored_under_the_first_tokens_of_their_source() -> None:
    model = t5()
    rows = random_documents(40, 7, 12, 5)
    pairs = [([*rows[0], 1], rows[1]), ([*rows[2], 1], rows[3])]  # 1 is EOS, which ends a shortened source too
    curve = seq2seq_perplexity_by_length(model, pairs, [8, 16, 64])
    for length in (8, 16, 64):
        total = 0.0
        for source, target in pairs:
            cut = source if len(source) <= length else [*source[: length - 1], 1]
            with torch.no_grad():
                logits = model(
                    input_ids=torch.tensor([cut]), decoder_input_ids=torch.tensor([[0, *target[:-1]]])
                ).logits[0]
            total += torch.nn.functional.cross_entropy(logits.double(), torch.tensor(target), reduction="sum").item()
        assert curve.nll_sum[length] == pytest.approx(total, rel=1e-6)
    assert set(curve.n_tokens.values()) == {12}
    assert (curve.protocol, curve.window[64]) == ("by_source", 41)
    with pytest.raises(DataError, match="Pair 0 has an empty"):
        seq2seq_perplexity_by_length(model, [([], [3])], [8])
