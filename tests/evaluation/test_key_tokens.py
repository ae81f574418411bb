"""Key tokens are those that need the long context, and nothing else counts."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_posenc.errors import ConfigError, DataError, LengthError
from hf_posenc.evaluation import key_token_perplexity, perplexity_by_length
from hf_posenc.evaluation.key_tokens import key_tokens
from tests.evaluation.models import VOCABULARY, gpt2, llama, naive_nll, random_documents
from tests.evaluation.retrievers import Copier


def test_the_published_example() -> None:
    long, short = np.array([0.5, 1.9, 2.1, 0.1]), np.array([2.6, 3.8, 4.5, 2.0])
    keys = key_tokens(long, short)
    assert keys.tolist() == [True, False, False, False]
    assert math.exp(long[keys].mean()) == pytest.approx(1.6487, abs=1e-4)


def repeating(seed: int) -> list[int]:
    """100 tokens none of which is twice there, and the first 20 of them again at the end."""
    once = (2 + torch.randperm(80, generator=torch.Generator().manual_seed(seed))).tolist()
    return [*once, *once[:20]]


def test_what_only_the_long_context_holds_is_key() -> None:
    copier = Copier(VOCABULARY, rows=10**6)
    found = key_token_perplexity(copier, [repeating(0), repeating(1)], 99, short=40, stride=10)
    # The first repeated token follows nothing that was there before; all others are copied from 80 tokens back.
    assert found.n_keys == 2 * 19
    assert found.ppl == pytest.approx(1 + (VOCABULARY - 1) * math.exp(-9), rel=1e-6)
    assert found.plain_ppl == pytest.approx(perplexity_by_length(copier, [repeating(0), repeating(1)], [99]).ppl[99])
    assert found.plain_ppl > 100 * found.ppl
    assert key_token_perplexity(copier, [repeating(0)], 99, short=95, stride=1).n_keys == 0
    assert key_token_perplexity(copier, [repeating(0)], 99, short=95, stride=1).ppl is None


def test_another_model_is_measured_on_the_keys_that_an_evaluator_chose() -> None:
    model, evaluator, document = llama(), Copier(VOCABULARY, rows=10**6), repeating(2)
    found = key_token_perplexity(model, [document], 99, evaluator=evaluator, short=40, stride=10)
    losses = naive_nll(model, document, [(0, at) for at in range(80, 99)])
    assert found.key_nll_sum == pytest.approx(sum(losses), rel=1e-5)
    assert (found.n_keys, found.n_tokens, found.evaluator) == (19, 99, "Copier")
    assert "itself" not in found.variant
    assert "short context 40 by 10" in found.variant


def sure(seed: int) -> Any:
    """A model that is sure of what it says next."""
    torch.manual_seed(seed)
    model: Any = llama()
    model.lm_head.weight.data.mul_(4.0)
    return model


def said_by(model: Any, starts: list[list[int]], size: int) -> list[list[int]]:
    """Texts that go on as the model would have it, drawn at random: it needs all of what stands before."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_new_tokens": size, "do_sample": True, "pad_token_id": 0, "eos_token_id": None}
    return [model.generate(torch.tensor([start]), **options)[0].tolist() for start in starts]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_short_contexts_are_those_of_sliding_windows(batch_size: int) -> None:
    model = sure(0)
    documents = said_by(model, random_documents(10, 12), 30)
    found = key_token_perplexity(model, documents, 33, short=8, stride=3, batch_size=batch_size)
    n_keys = nats = 0.0
    for ids in documents:
        long = np.array(naive_nll(model, ids, [(0, at) for at in range(33)]))
        begins = [0 if at < 8 else 3 * math.ceil((at - 7) / 3) for at in range(33)]
        short = np.array(naive_nll(model, ids, list(zip(begins, range(33), strict=True))))
        keys = key_tokens(long, short)
        n_keys, nats = n_keys + keys.sum(), nats + long[keys].sum()
    assert n_keys > 5
    assert (found.n_keys, found.n_documents) == (n_keys, 2)
    assert found.key_nll_sum == pytest.approx(nats, rel=1e-5)
    assert found.interval is not None
    again = key_token_perplexity(model, documents[::-1], 33, short=8, stride=3, batch_size=batch_size)
    assert again.interval == pytest.approx(found.interval)


def test_defaults_are_scaled_and_named_and_json_holds_it_all() -> None:
    found = key_token_perplexity(llama(), random_documents(70, 65), 64)
    assert (found.short, found.stride) == (8, 2)
    assert found.variant == "LongPPL variant: short context 8 by 2, keys chosen by the model itself"
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["variant"] == found.variant
    assert data["ppl"] == found.ppl


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"length": 0}, ConfigError, "positive integers"),
        ({"short": 32}, ConfigError, "short must be an integer from 1 to 31"),
        ({"stride": 5}, ConfigError, "stride must be an integer from 1 to 4"),
        ({"length": 64}, DataError, "No document has 65 tokens"),
        ({"evaluator": nn.Embedding(3, 2)}, DataError, "knows 3 tokens"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    values: dict[str, Any] = {"length": 32} | options
    if "evaluator" in values:
        values["evaluator"].get_input_embeddings = lambda: values["evaluator"]
    with pytest.raises(error, match=message):
        key_token_perplexity(gpt2(), random_documents(60), **values)


def test_models_that_cannot_go_there_are_refused() -> None:
    with pytest.raises(LengthError, match="no position 65"):
        key_token_perplexity(gpt2(), random_documents(90), 70)
    broken = llama()
    broken.lm_head.weight.data.fill_(float("nan"))  # type: ignore[union-attr, operator]
    with pytest.raises(LengthError, match="not finite"):
        key_token_perplexity(broken, random_documents(60), 32)
