"""What stops a measurement at a length is said, length by length, and the other lengths keep their numbers."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration, BloomConfig, BloomForCausalLM, GPT2LMHeadModel

import hf_posenc as posenc
from hf_posenc.errors import ConfigError, DataError
from hf_posenc.evaluation import (
    key_token_perplexity,
    perplexity_by_length,
    perplexity_by_position,
    seq2seq_perplexity_by_length,
)
from hf_posenc.evaluation.scoring import token_nll
from hf_posenc.evaluation.seq2seq import _shortened
from hf_posenc.evaluation.subject import trained_length
from tests.evaluation.models import VOCABULARY, gpt2, llama, random_documents
from tests.families.models import fresh

DOCUMENTS = [[token % 60 for token in document] for document in random_documents(100, 3)]


@pytest.mark.parametrize("model_type", ["gptj", "codegen", "mpt"])
def test_a_rotation_or_a_bias_from_a_finite_table_ends_as_a_table_does(model_type: str) -> None:
    """Their code computes positions up to the stated length, and fails with an index or a shape past it."""
    model = fresh(model_type, "eager")
    with torch.no_grad():
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.tensor([DOCUMENTS[0][:65]]))
        model(input_ids=torch.tensor([DOCUMENTS[0][:64]]))
    curve = perplexity_by_length(model, DOCUMENTS, [64, 65])
    assert list(curve.ppl) == [64]
    assert curve.refused == {65: "no position 65: its table has 64 rows for positions"}
    assert curve.trained_length == 64


def test_the_trained_length_is_read_by_the_name_that_a_family_gives_it() -> None:
    assert (
        trained_length(
            BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2, seq_length=77))
        )
        == 77
    )


def test_experts_that_return_more_than_states_are_measured() -> None:
    """The feed-forward layer of gpt-oss also returns how its experts were chosen."""
    model = fresh("gpt_oss", "eager")
    curve = perplexity_by_length(model, DOCUMENTS, [99])
    with torch.no_grad():
        ids = torch.tensor([DOCUMENTS[0]])
        expected = float(model(input_ids=ids, labels=ids).loss) * 99
        ids = torch.tensor([DOCUMENTS[1]])
        expected += float(model(input_ids=ids, labels=ids).loss) * 2
    assert curve.nll_sum[99] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "do not fit into memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), "do not fit into memory"),
        (IndexError("index out of range in self"), "no place for so many tokens"),
    ],
)
def test_a_length_that_fails_is_refused_and_the_others_are_kept(error: Exception, reason: str) -> None:
    model = gpt2()
    whole = perplexity_by_length(model, DOCUMENTS, [16]).ppl[16]

    def fail(_: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] > 16:
            raise error

    model.register_forward_pre_hook(fail, with_kwargs=True)
    curve = perplexity_by_length(model, DOCUMENTS, [16, 32])
    assert curve.ppl == {16: whole}
    assert reason in curve.refused[32]


def test_a_mistake_in_a_model_is_not_taken_for_its_length() -> None:
    model = gpt2()

    def fail(*_: Any) -> None:
        raise IndexError("list index out of range")

    model.register_forward_pre_hook(fail)
    with pytest.raises(IndexError, match="list index"):
        perplexity_by_length(model, DOCUMENTS, [16])


def test_weights_on_no_device_are_refused_and_offloaded_ones_are_fetched() -> None:
    model = gpt2()
    expected = perplexity_by_length(model, DOCUMENTS, [32])
    offloaded = perplexity_by_length(
        accelerate.cpu_offload(model, execution_device=torch.device("cpu")), DOCUMENTS, [32]
    )
    assert offloaded.nll_sum == expected.nll_sum
    assert offloaded.model_hash is None
    with torch.device("meta"):
        empty = GPT2LMHeadModel(model.config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="meta device"):
        perplexity_by_length(empty, DOCUMENTS, [32])


def test_wrapped_models_give_the_numbers_of_what_they_wrap() -> None:
    model = gpt2()
    expected = perplexity_by_length(model, DOCUMENTS, [32, 128])
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))  # type: ignore[arg-type]
    found = perplexity_by_length(adapted, DOCUMENTS, [32, 128])
    assert (found.trained_length, found.refused) == (expected.trained_length, expected.refused)
    assert found.nll_sum == pytest.approx(expected.nll_sum)  # a fresh adapter adds nothing
    assert 128 in found.refused
    assert posenc.max_length(adapted) == 64  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_compiled_model_gives_the_numbers_of_what_was_compiled() -> None:
    torch.manual_seed(0)
    model = gpt2()
    expected = perplexity_by_length(model, DOCUMENTS, [32, 128])
    found = perplexity_by_length(torch.compile(model, backend="eager"), DOCUMENTS, [32, 128])  # type: ignore[arg-type]
    assert found.nll_sum == pytest.approx(expected.nll_sum)
    assert found.refused == expected.refused


def test_a_single_length_is_asked_to_be_put_into_a_list() -> None:
    with pytest.raises(ConfigError, match="list of positive integers"):
        perplexity_by_length(gpt2(), DOCUMENTS, 32)  # type: ignore[arg-type]


def test_a_shortened_source_keeps_what_ends_it_and_nothing_else_of_its_end() -> None:
    source = torch.tensor([5, 6, 7, 8, 1, 2])
    assert _shortened(source, 4, frozenset([1, 2])).tolist() == [5, 6, 1, 2]
    assert _shortened(source, 1, frozenset([1, 2])).tolist() == [2]
    assert _shortened(source, 4, frozenset([1])).tolist() == [5, 6, 7, 8]  # 2 is a word: its end is not seen
    assert _shortened(source, 9, frozenset([1, 2])).tolist() == source.tolist()


def test_a_target_longer_than_the_decoder_is_refused_before_any_work() -> None:
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, max_position_embeddings=32
    )
    model = BartForConditionalGeneration(config)
    with pytest.raises(DataError, match="A target has 40 tokens: no position 33"):
        seq2seq_perplexity_by_length(model, [([5, 6], list(range(4, 44)))], [2])


class NeighbourFeedForward(nn.Module):
    """Named as a feed-forward layer, and takes in the token before."""

    def forward(self, states: Tensor) -> Tensor:
        """Return (b, n, hidden) states, each with half of the one before it."""
        return states + nn.functional.pad(states, (0, 0, 1, 0))[:, :-1] / 2


class Neighbours(nn.Module):
    """A causal model of one such layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 60)
        self.mix = NeighbourFeedForward()

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        """Logits (b, n, vocabulary)."""
        return SimpleNamespace(logits=self.mix(self.embedding(input_ids)))


def test_layers_that_mix_tokens_are_not_cut_into_pieces_whatever_the_first_document() -> None:
    torch.manual_seed(0)
    model, long = Neighbours(), DOCUMENTS[0] * 25
    whole = token_nll(model(input_ids=torch.tensor([long[:-1]])).logits[0].detach(), torch.tensor(long[1:]))
    for documents in ([long], [[5, 6], long]):
        found = perplexity_by_length(model, documents, [3000])
        expected = whole.sum() + (len(documents) - 1) * perplexity_by_length(model, [[5, 6]], [8]).nll_sum[8]
        assert found.nll_sum[3000] == pytest.approx(float(expected), rel=1e-9)


def test_a_model_that_is_sure_and_wrong_has_an_infinite_perplexity_everywhere() -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e5)  # type: ignore[union-attr, operator]
    keys = key_token_perplexity(model, DOCUMENTS, 64)
    assert keys.plain_ppl == math.inf
    assert keys.to_dict()["plain_ppl"] is None
    positions = perplexity_by_position(model, DOCUMENTS, 64)
    assert math.inf in positions.ppl
    for result in (keys, positions, perplexity_by_length(model, DOCUMENTS, [64])):
        json.dumps(result.to_dict(), allow_nan=False)
