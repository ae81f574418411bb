"""Laws of the collators that draw positions: what they may draw, how evenly, and that they leave the mask alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_posenc.collators import PoSE, RandomPositions
from hf_posenc.errors import ConfigError, DataError

COLLATORS = [RandomPositions, PoSE]
ROWS = [{"input_ids": [5 + i, 6, 7, 8, 9, 10]} for i in range(4)]


@pytest.mark.parametrize("collator", COLLATORS)
def test_a_batch_is_whole(collator: Any) -> None:
    batch = collator(max_length=50)(ROWS)
    assert list(batch) == ["input_ids", "labels", "position_ids", "attention_mask"]
    assert batch["input_ids"].tolist() == [row["input_ids"] for row in ROWS]
    assert batch["labels"][:, 0].tolist() == [-100] * 4
    assert torch.equal(batch["labels"][:, 1:], batch["input_ids"][:, 1:])
    assert (batch["attention_mask"] == 1).all()
    assert {value.dtype for value in batch.values()} == {torch.int64}
    own = collator(max_length=50)([{"input_ids": [1, 2, 3], "labels": [1, -100, 3]}])
    assert own["labels"].tolist() == [[-100, -100, 3]]


@pytest.mark.parametrize("length", [1, 2, 7, 40])
@pytest.mark.parametrize("collator", COLLATORS)
def test_positions_ascend_below_the_length_and_reach_its_end(collator: Any, length: int) -> None:
    draw = collator(max_length=40)
    drawn = torch.stack([draw.positions(length) for _ in range(400)])
    assert drawn.shape == (400, length)
    assert drawn.min() == 0
    assert drawn.max() == (39 if length > 1 or collator is RandomPositions else 0)
    assert (drawn.diff(dim=1) > 0).all()


@pytest.mark.parametrize("collator", COLLATORS)
def test_every_row_has_its_own_draw_and_a_seed_repeats_it(collator: Any) -> None:
    first, again, other = (collator(max_length=500, seed=seed) for seed in (1, 1, 2))
    batches = [first(ROWS)["position_ids"], first(ROWS)["position_ids"]]
    assert len({tuple(row) for batch in batches for row in batch.tolist()}) > 4
    assert all(torch.equal(batch, again(ROWS)["position_ids"]) for batch in batches)
    assert not torch.equal(batches[0], other(ROWS)["position_ids"])


def test_global_randomness_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    for collator in COLLATORS:
        collator(max_length=100)(ROWS)
    assert torch.equal(before, torch.random.get_rng_state())


def test_random_positions_are_uniform() -> None:
    draw = RandomPositions(max_length=10)
    counts = torch.stack([draw.positions(3) for _ in range(3000)]).flatten().bincount(minlength=10)
    assert ((counts - 900).abs() < 5 * 900**0.5).all()


def test_pose_has_two_chunks_and_every_break_and_skip() -> None:
    draw = PoSE(max_length=12)
    drawn = torch.stack([draw.positions(6) for _ in range(2000)])
    assert (drawn[:, 0] == 0).all(), "the first chunk starts at 0"
    jumps = drawn.diff(dim=1)
    assert ((jumps > 1).sum(dim=1) <= 1).all(), "no more than one skip"
    skips, breaks = jumps.amax(dim=1) - 1, (jumps > 1).float().argmax(dim=1)[(jumps > 1).any(dim=1)]
    assert skips.bincount().tolist() == pytest.approx([2000 / 7] * 7, abs=90)
    assert breaks.bincount(minlength=5).tolist() == pytest.approx([len(breaks) / 5] * 5, abs=100)


def test_all_positions_at_once_is_the_plain_row() -> None:
    for collator in COLLATORS:
        assert collator(max_length=6)(ROWS)["position_ids"].tolist() == [list(range(6))] * 4


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("collator", COLLATORS)
def test_skipped_positions_are_never_taken_for_packing(collator: Any, kind: str) -> None:
    """Every token sees all before it: a change of the first one reaches the last one's logits, on one side only."""
    torch.manual_seed(0)
    if kind == "gpt2":
        config: Any = GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=64)
        model: Any = GPT2LMHeadModel(config)
    else:
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **shape))
    batch = collator(max_length=64, seed=3)(ROWS)
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, 0] = 1
    later = {**batch, "input_ids": batch["input_ids"].clone()}
    later["input_ids"][:, -1] = 1
    with torch.no_grad():
        plain, first, last = (model.eval()(**inputs) for inputs in (batch, changed, later))
    assert ((plain.logits - first.logits).abs().amax(dim=-1)[:, -1] > 0).all()
    assert torch.equal(plain.logits[:, :-1], last.logits[:, :-1])
    assert plain.loss.isfinite()


@pytest.mark.parametrize("collator", COLLATORS)
def test_what_makes_no_sense_is_refused(collator: Any) -> None:
    for wrong in (1, 2.0, True):
        with pytest.raises(ConfigError, match="max_length"):
            collator(max_length=wrong)
    with pytest.raises(DataError, match="rows have 6 tokens"):
        collator(max_length=5)(ROWS)
    for rows in ([], [{"input_ids": [1, 2]}, {"input_ids": [1]}]):
        with pytest.raises(DataError, match="one length"):
            collator(max_length=5)(rows)
