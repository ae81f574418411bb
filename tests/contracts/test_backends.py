"""Every attention backend either computes the same or refuses."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.errors import BackendError
from tests.models import (
    ATTENDING,
    CAUSAL,
    CORE,
    SPECS,
    SUBJECTS,
    TRAINED,
    VARIANTS,
    assert_same,
    cells,
    logits,
    patched,
    reach,
    tokens,
)

ALL = {**SUBJECTS, **VARIANTS}
BIASED = ["alibi", "rope-dynamic"]
DROPPING = ["flash_attention_2", "flex_attention", "paged|sdpa"]
CARRIED = [("alibi", "flash_attention_2"), ("alibi", "flex_attention")]


@pytest.mark.parametrize(("subject", "spec"), cells(list(ALL), ["alibi", "rope-dynamic"]))
def test_eager_equals_sdpa(subject: str, spec: str) -> None:
    ids = tokens(2 if "classifier" not in subject else 1, reach(spec, TRAINED + 20))
    assert_same(logits(patched(subject, spec, "eager"), ids), logits(patched(subject, spec, "sdpa"), ids))


@pytest.mark.parametrize(("subject", "spec"), cells(list(SUBJECTS), ATTENDING))
def test_the_backend_can_be_changed_after_patching(subject: str, spec: str) -> None:
    model = patched(subject, spec, "sdpa", own=True)
    said = logits(model, tokens(2, 30))
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    assert_same(logits(model, tokens(2, 30)), said)
    posenc.unpatch(model)


@pytest.mark.parametrize(
    ("spec", "backend"),
    [pair for pair in product(BIASED, DROPPING) if pair not in CARRIED],
)
@pytest.mark.parametrize("subject", ["gpt2", "opt", "llama", "bert"])
def test_a_backend_that_would_drop_the_scores_is_refused(subject: str, spec: str, backend: str) -> None:
    model = patched(subject, spec, own=True)
    for change in (backend, {"": backend}):
        with pytest.raises(BackendError, match="use one of eager, sdpa"):
            model.set_attn_implementation(change)
    with pytest.raises(BackendError, match="use one of eager, sdpa"):
        model.base_model.set_attn_implementation(backend)
    assert model.config._attn_implementation == "sdpa"
    model.config._attn_implementation_internal = backend  # behind our back
    with pytest.raises(BackendError, match="use one of eager, sdpa"):
        logits(model, tokens(1, 9), attention_mask=torch.ones(1, 1, 9, 9))


@pytest.mark.parametrize(("subject", "spec"), [("gpt2", "rope-dynamic"), ("bert", "alibi")])
def test_a_model_on_such_a_backend_is_refused_before_anything_changes(subject: str, spec: str) -> None:
    model = SUBJECTS[subject].fresh()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(BackendError, match="use one of eager, sdpa"):
        posenc.patch(model, SPECS[spec])
    assert not posenc.is_patched(model)


@pytest.mark.slow  # flex attention compiles itself, even on a CPU
@pytest.mark.parametrize(("subject", "spec"), cells(["llama", "gpt_neox"], ["rope-partial"]))
def test_flex_attention_carries_a_rotation(subject: str, spec: str) -> None:
    model = patched(subject, spec, own=True)
    said = logits(model, tokens(2, 30))
    model.set_attn_implementation("flex_attention")
    assert_same(logits(model, tokens(2, 30)), said, 1e-4)


@pytest.mark.parametrize(("subject", "spec"), cells(list(SUBJECTS), CORE))
def test_attention_maps_are_the_ones_that_were_used(subject: str, spec: str) -> None:
    model = patched(subject, spec, "eager")
    length = reach(spec, TRAINED + 6)
    ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
    mask[0, -5:] = 0
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, output_attentions=True)
    assert_same(output.logits, logits(model, ids, attention_mask=mask))
    assert len(output.attentions) == 2
    for weights in output.attentions:
        assert weights.shape == (2, 4, length, length)
        assert_same(weights[:, :, : length - 5].sum(-1), torch.ones(2, 4, length - 5))
        assert not weights[0, :, : length - 5, -5:].any(), "padding was looked at"
        if SUBJECTS[subject].causal:
            assert not weights.triu(1)[1].any(), "the future was looked at"
    if spec != "nope" and subject in CAUSAL:
        plain = SUBJECTS[subject].fresh(attn_implementation="eager")
        with torch.no_grad():
            first = plain(input_ids=ids[:, :TRAINED], output_attentions=True).attentions[0]
        same = (
            spec.startswith("learned")
            and spec != "learned-interpolate"
            and plain.config.model_type
            not in (
                "llama",
                "gpt_neox",
            )
        )
        found = output.attentions[0][1, :, :TRAINED, :TRAINED]
        assert torch.allclose(found, first[1], atol=1e-5) is same


def test_a_long_call_is_attended_in_blocks_that_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(2, 100)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    for subject in ("gpt2", "llama", "bert"):
        model = patched(subject, "alibi", "eager")
        whole, masked = logits(model, ids), logits(model, ids, attention_mask=mask)
        with torch.no_grad():
            maps = model(input_ids=ids, output_attentions=True).attentions
        for size in (1, 800, 2 * 4 * 100 * 7, 2 * 4 * 100 * 99):
            monkeypatch.setattr("hf_posenc.scores.SCORES_AT_ONCE", size)
            assert_same(logits(model, ids), whole)
            assert_same(logits(patched(subject, "alibi"), ids), whole)
            assert_same(logits(model, ids, attention_mask=mask)[1, 30:], masked[1, 30:])
            with torch.no_grad():
                again = model(input_ids=ids, output_attentions=True).attentions
            for one, other in zip(again, maps, strict=True):
                assert_same(one, other)
        monkeypatch.undo()
