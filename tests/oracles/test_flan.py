"""A T5 that was really trained, by its own bias and by others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.evaluation.attention_record import position_effects, reporting_attention
from hf_posenc.evaluation.scoring import evaluation_mode
from tests.oracles.flan import flan_t5_small

pytestmark = pytest.mark.slow
ENGLISH, GERMAN = "translate English to German: The house is small.", "Das Haus ist klein."
TRAINED = 512
"""Source tokens of T5's pretraining; nothing in the model ends there."""


def perplexity(model: Any, source: torch.Tensor, target: torch.Tensor) -> float:
    """Of the target behind the source, (1, n) each."""
    with torch.no_grad():
        return math.exp(model(input_ids=source, labels=target).loss.item())


@pytest.fixture(scope="module")
def flan() -> tuple[Any, torch.Tensor, torch.Tensor]:
    model, tokenizer = flan_t5_small()
    return model, *(tokenizer(text, return_tensors="pt").input_ids for text in (ENGLISH, GERMAN))


def test_it_translates(flan: Any) -> None:
    """The weights came through: the translation is the likely one, and its words are not in another order."""
    model, english, german = flan
    own = perplexity(model, english, german)
    print(f"perplexity of the translation: {own:.2f}")
    assert own < 10 < perplexity(model, english, german.roll(2, dims=1))


def test_its_own_bias_put_back_changes_nothing(flan: Any) -> None:
    model, english, german = flan
    given = {"input_ids": english, "labels": german}
    with torch.no_grad():
        before = model(**given).logits
        posenc.patch(model, posenc.encoding("t5", num_buckets=32, max_distance=128))
        found = model(**given).logits
        posenc.unpatch(model)
        after = model(**given).logits
    print(f"largest difference of a logit: {(found - before).abs().max():.1e}")
    assert (found - before).abs().max() <= 1e-5 * before.abs().max()
    assert torch.equal(after, before)


@pytest.mark.parametrize("name", ["alibi", "rope"])
def test_it_runs_at_four_times_its_length_with_another_encoding(flan: Any, name: str) -> None:
    model, english, german = flan
    long = english[:, :-1].repeat(1, 4 * TRAINED // english.shape[1] + 1)[:, : 4 * TRAINED]
    own = perplexity(model, english, german)
    posenc.patch(model, posenc.encoding(name))
    within, beyond = perplexity(model, english, german), perplexity(model, long, german)
    posenc.unpatch(model)
    print(f"{name}, untrained: {own:.2f} -> {within:.2f}, {beyond:.2f} behind {4 * TRAINED} tokens")
    assert math.isfinite(beyond)
    assert within > own


def test_the_profile_of_the_first_layer_is_its_bias_table(flan: Any) -> None:
    """Buckets are for distances; every head's profile follows from its table."""
    model, *_ = flan
    rows = torch.randint(100, 30_000, (64, 64), generator=torch.Generator().manual_seed(0))
    with evaluation_mode(model), reporting_attention(model):
        first = position_effects(model, rows)[0]
    bias = model.encoder.block[0].layer[0].SelfAttention.compute_bias(64, 64)[0].double()  # (h, q, k)
    away = torch.arange(64)[:, None] - torch.arange(64)
    expected = torch.stack([bias[:, away == d].mean(-1) for d in first.distances.tolist()], dim=1).detach()
    expected = expected - expected.mean(-1, keepdim=True)
    alike = torch.nn.functional.cosine_similarity(first.profile, expected, dim=-1)
    print(f"likeness of profile and table by head: {[round(value, 4) for value in alike.tolist()]}")
    assert alike.min() > 0.98
