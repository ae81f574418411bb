"""Neither padding nor the other rows of a batch change what is said about a row."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

import hf_posenc as posenc
from hf_posenc.errors import ConfigError
from tests.models import (
    CAUSAL,
    CORE,
    SUBJECTS,
    TRAINED,
    VARIANTS,
    assert_same,
    cells,
    logits,
    padding_of,
    patched,
    reach,
    tokens,
)

PAD = 7


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(("subject", "spec"), cells(list(SUBJECTS), CORE))
def test_padded_rows_equal_rows_alone(subject: str, spec: str, backend: str) -> None:
    model = patched(subject, spec, backend)
    row = tokens(1, reach(spec, TRAINED + 20) - 2 * PAD)
    full = tokens(1, row.shape[1] + PAD, seed=1)
    pads, ones = torch.full((1, PAD), padding_of(model)), torch.ones_like(row)
    none = torch.zeros_like(pads)
    ids = torch.cat([torch.cat([pads, row], 1), torch.cat([row, pads], 1), full])
    mask = torch.cat([torch.cat([none, ones], 1), torch.cat([ones, none], 1), torch.ones_like(full)])
    said, alone = logits(model, ids, attention_mask=mask), logits(model, row)
    assert said.isfinite().all()
    assert_same(said[:1, PAD:], alone)
    assert_same(said[1:2, :-PAD], alone)
    assert_same(said[2:], logits(model, full))


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("spec", ["alibi", "rope", "rope-dynamic"])
def test_variants_take_padding_alike(variant: str, spec: str) -> None:
    model = patched(variant, spec)
    row = tokens(1, TRAINED)
    pads = torch.full((1, PAD), padding_of(model))
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(row)], 1)
    if "classifier" in variant:
        model = model.base_model
    assert_same(logits(model, torch.cat([pads, row], 1), attention_mask=mask)[:, PAD:], logits(model, row))


@pytest.mark.parametrize("mask", ["none", "ones", "bool", "bool-4d", "float-4d"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama", "bert"], ["alibi", "rope", "rope-dynamic"]))
def test_every_spelling_of_no_padding_means_the_same(subject: str, spec: str, backend: str, mask: str) -> None:
    ids = tokens(2, 40)
    seen = torch.ones(40, 40, dtype=torch.bool)
    seen = (seen.tril() if SUBJECTS[subject].causal else seen).expand(2, 1, 40, 40)
    spelled = {
        "none": None,
        "ones": torch.ones_like(ids),
        "bool": torch.ones_like(ids).bool(),
        "bool-4d": seen,
        "float-4d": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf),
    }[mask]
    if mask == "bool-4d" and backend == "eager":
        pytest.skip("transformers' eager attention takes no boolean mask")
    expected = logits(patched(subject, spec, "eager"), ids)
    assert_same(logits(patched(subject, spec, backend), ids, attention_mask=spelled), expected)


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama", "bert"], CORE))
def test_a_row_with_nothing_but_padding_harms_nobody(subject: str, spec: str) -> None:
    model = patched(subject, spec)
    ids = tokens(2, 20)
    mask = torch.stack([torch.ones(20), torch.zeros(20)]).long()
    said = logits(model, ids, attention_mask=mask)
    assert said.isfinite().all()
    assert_same(said[:1], logits(model, ids[:1]))


@pytest.mark.parametrize(("subject", "spec"), cells(list(SUBJECTS), CORE))
def test_call_history_leaves_no_trace(subject: str, spec: str) -> None:
    model = patched(subject, spec)
    short = tokens(2, 20)
    before = logits(model, short)
    logits(model, tokens(3, reach(spec, 3 * TRAINED), seed=1))
    assert torch.equal(logits(model, short), before)


@pytest.mark.parametrize(("subject", "spec"), cells(CAUSAL, CORE))
def test_a_mask_may_be_as_long_as_a_static_cache_but_not_too_short(subject: str, spec: str) -> None:
    model, ids = patched(subject, spec), tokens(2, 40)
    expected = logits(model, ids)
    cache, mask = StaticCache(config=model.config, max_cache_len=50), torch.zeros(2, 50, dtype=torch.long)
    for start, end in ((0, 30), (30, 40)):
        mask[:, :end] = 1
        said = logits(model, ids[:, start:end], attention_mask=mask, past_key_values=cache)
        assert_same(said, expected[:, start:end])
    if posenc.verify(model).plan.route == "interposer":
        with pytest.raises(ConfigError, match="the attention mask covers 2 tokens, but 40 are in the cache"):
            logits(model, ids[:, :2], attention_mask=torch.ones(2, 2), past_key_values=cache)
