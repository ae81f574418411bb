"""Explicit position ids win, with and without a cache, and never alter who sees whom."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hf_posenc as posenc
from hf_posenc.errors import LengthError
from tests.models import (
    CAUSAL,
    CORE,
    SPECS,
    SUBJECTS,
    TRAINED,
    assert_same,
    cells,
    in_steps,
    largest,
    logits,
    patched,
    tokens,
)

LENGTH = 30
EXPLICIT = {
    "skipped": torch.arange(LENGTH) * 2,
    "repeated": torch.arange(LENGTH) // 2,
    "reversed": torch.arange(LENGTH).flip(0),
    "restarting": torch.arange(LENGTH) % 10,
}


def spelled(model: PreTrainedModel, positions: Tensor) -> Tensor:
    """Positions from 0 as this model wants them: RoBERTa counts from behind its padding index."""
    return positions + (model.config.pad_token_id + 1 if "roberta" in model.config.model_type else 0)


@pytest.mark.parametrize(("subject", "spec"), cells(list(SUBJECTS), CORE))
def test_counting_ids_change_nothing(subject: str, spec: str) -> None:
    model = patched(subject, spec)
    ids = tokens(2, LENGTH)
    counted = spelled(model, torch.arange(LENGTH)[None])
    assert_same(logits(model, ids, position_ids=counted), logits(model, ids))


@pytest.mark.parametrize("kind", list(EXPLICIT))
@pytest.mark.parametrize(("subject", "spec"), cells(CAUSAL, [name for name in CORE if name != "nope"]))
def test_explicit_ids_win_and_leave_the_mask_alone(subject: str, spec: str, kind: str) -> None:
    model = patched(subject, spec)
    ids, positions = tokens(2, LENGTH), spelled(model, EXPLICIT[kind][None].expand(2, -1))
    said = logits(model, ids, position_ids=positions)
    if (spec, kind) != ("alibi", "reversed"):  # the distances are the same ones
        assert largest(said - logits(model, ids)) > 1e-3, "the ids were not heard"
    masked = logits(model, ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    assert_same(said, masked)
    if posenc.verify(model).plan.route == "interposer":
        # without mask and cache, transformers by itself takes ids that start again for packed sequences
        assert_same(logits(model, ids, position_ids=positions, use_cache=False), said)
    other = ids.clone()
    other[:, 20] = (other[:, 20] - 2 + 7) % 50 + 2
    changed = (logits(model, other, position_ids=positions) - said).abs().amax((0, 2)) > 1e-6
    assert not changed[:20].any(), "a token was heard before it came"
    assert changed[20:].all(), "a token was not heard after it came"
    cache = DynamicCache(config=model.config)
    assert_same(in_steps(model, ids, [9, 1, 1, 10, 9], cache, position_ids=positions), said)


@pytest.mark.parametrize("kind", list(EXPLICIT))
@pytest.mark.parametrize(("subject", "spec"), cells(["bert", "roberta"], [name for name in CORE if name != "nope"]))
def test_an_encoder_goes_by_the_ids_and_not_by_the_slots(subject: str, spec: str, kind: str) -> None:
    """Tokens shuffled together with their positions say what they said before, in their new places."""
    model = patched(subject, spec)
    ids, positions = tokens(1, LENGTH), spelled(model, EXPLICIT[kind][None])
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(5))
    said = logits(model, ids, position_ids=positions)
    shuffled = logits(model, ids[:, order], position_ids=positions[:, order])
    assert_same(shuffled, said[:, order])
    if (spec, kind) != ("alibi", "reversed"):
        assert largest(said - logits(model, ids)) > 1e-3


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama"], ["alibi", "rope", "rope-yarn", "rope-partial"]))
def test_relative_encodings_do_not_see_a_shift(subject: str, spec: str) -> None:
    model = patched(subject, spec)
    ids, positions = tokens(2, LENGTH), torch.arange(LENGTH)[None]
    assert_same(logits(model, ids, position_ids=positions + 1000), logits(model, ids), 1e-4)


@pytest.mark.parametrize("subject", ["gpt2", "opt", "bert", "roberta"])
@pytest.mark.parametrize("wrong", [TRAINED, -1])
def test_a_position_without_a_row_is_refused(subject: str, wrong: int) -> None:
    model = patched(subject, "learned")
    positions = torch.arange(10)
    positions[4] = wrong
    if wrong < 0 and subject == "roberta":  # the rows below the first position are those of padding
        assert logits(model, tokens(1, 10), position_ids=spelled(model, positions[None])).isfinite().all()
        return
    with pytest.raises(LengthError, match="position"):
        logits(model, tokens(1, 10), position_ids=spelled(model, positions[None]))


@pytest.mark.parametrize("subject", list(SUBJECTS))
@pytest.mark.parametrize("spec", list(SPECS))
def test_max_length_is_the_length_that_still_runs(subject: str, spec: str) -> None:
    model = patched(subject, spec)
    expected = {"learned": TRAINED, "learned-tile": 4 * TRAINED, "learned-interpolate": 4 * TRAINED}.get(spec)
    assert posenc.max_length(model) == expected
    if expected is not None:
        logits(model, tokens(1, expected))
        with pytest.raises(LengthError, match=f"no position {expected + 1}: learned table has {expected} rows"):
            logits(model, tokens(1, expected + 1))
