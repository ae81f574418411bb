"""Patches on models that somebody really trained: identity is identity, and a scaling does what its paper says."""

from __future__ import annotations

import math
from pydoc_data.topics import topics

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.evaluation.scoring import Scorer, evaluation_mode
from tests import checkpoints
from tests.oracles.test_checkpoints import HEAVY_CHAIN, REACTIONS, STORY, perplexity


def test_stories_llama_keeps_its_own_rotation_and_loses_others() -> None:
    model, tokenizer = checkpoints.stories260k()
    ids = tokenizer(STORY, return_tensors="pt").input_ids
    before = model(ids).logits
    own = perplexity(model, ids)
    posenc.patch(model, posenc.RoPE())  # its own theta, carried over
    assert torch.equal(model(ids).logits, before)
    posenc.unpatch(model)
    for config, at_least in ((posenc.Alibi(), 2.0), (posenc.NoPE(), 5.0)):
        posenc.patch(model, config)
        assert perplexity(model, ids) > at_least * own  # without training, each loses much
        posenc.unpatch(model)
        assert torch.equal(model(ids).logits, before)


def test_roberta_keeps_what_it_says_when_its_own_table_is_put_back() -> None:
    model, tokenizer = checkpoints.sapiens_roberta()
    inputs = tokenizer([HEAVY_CHAIN, HEAVY_CHAIN[:50]], return_tensors="pt", padding=True)
    before = model(**inputs).logits
    assert posenc.max_length(model) == 144
    posenc.patch(model, posenc.Learned())
    real = inputs["attention_mask"].bool()
    assert torch.equal(model(**inputs).logits[real], before[real])
    ids = inputs["input_ids"][:1, 5:6].expand(1, 145)
    assert model(ids[:, :144]).logits.isfinite().all()
    with pytest.raises(posenc.errors.LengthError, match="no position 145: learned table has 144 rows"):
        model(ids)


def test_roberta_gets_positions_beyond_its_table() -> None:
    model, _ = checkpoints.sapiens_roberta()
    posenc.patch(model, posenc.Alibi())
    assert model(torch.randint(5, 25, (1, 600))).logits.isfinite().all()


def test_albert_keeps_what_it_says_when_its_own_table_is_put_back() -> None:
    model, tokenizer = checkpoints.rxnmapper_albert()
    inputs = tokenizer(REACTIONS, return_tensors="pt", padding=True)
    before, real = model(**inputs).logits, inputs["attention_mask"].bool()
    assert posenc.max_length(model) == 512
    posenc.patch(model, posenc.Learned())
    assert torch.equal(model(**inputs).logits[real], before[real])
    posenc.unpatch(model)
    assert torch.equal(model(**inputs).logits, before)


def test_albert_gets_positions_beyond_its_table() -> None:
    model, _ = checkpoints.rxnmapper_albert()
    posenc.patch(model, posenc.RoPE())
    assert model(torch.randint(5, 500, (1, 4 * 512))).logits.isfinite().all()


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_keeps_its_own_rotation_and_runs_at_four_times_its_length_with_another() -> None:
    model, tokenizer = checkpoints.smollm2()
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : 4 * 8192 + 1]
    before, own = model(ids[:, :512]).logits, perplexity(model, ids[:, :512])
    posenc.patch(model, posenc.RoPE())
    assert torch.equal(model(ids[:, :512]).logits, before)
    assert perplexity(model, ids[:, :512]) == own
    posenc.unpatch(model)
    posenc.patch(model, posenc.Alibi())
    with evaluation_mode(model):
        assert Scorer(model, ids[0]).nll(ids, 1024).isfinite().all()
    posenc.unpatch(model)
    assert torch.equal(model(ids[:, :512]).logits, before)


@pytest.mark.slow
def test_smollm2_reads_past_its_length_with_yarn() -> None:
    """At 12,288 tokens, half as much again as it was trained on, the last 1,024 tokens of English prose."""
    model, tokenizer = checkpoints.smollm2()
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :12_289]
    assert ids.shape[1] == 12_289

    def last_block() -> float:
        with evaluation_mode(model):
            return math.exp(Scorer(model, ids[0]).nll(ids, 1024).mean().item())

    unpatched = last_block()
    posenc.patch(model, posenc.RoPE(scaling={"rope_type": "yarn", "factor": 2.0}))
    assert model.config.rope_parameters["rope_theta"] == 100_000
    assert model.config.rope_parameters["original_max_position_embeddings"] == 8192
    patched = last_block()
    print(f"last 1,024 of 12,288 tokens: {unpatched:.2f} unpatched, {patched:.2f} with YaRN x2")
    assert unpatched > 30
    assert patched <= 17.5
