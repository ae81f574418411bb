"""Plan, patch, unpatch, discover, verify: what they promise, and what they refuse before anything is touched."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import FlaubertConfig, FlaubertWithLMHeadModel, PreTrainedModel

import hf_posenc as posenc
from hf_posenc.config import Encoding, EncodingConfig
from hf_posenc.errors import (
    ConfigError,
    PatchStateError,
    UnsupportedEncodingError,
    UnsupportedFamilyError,
    VerificationError,
)
from hf_posenc.family import find_family
from tests.models import CORE, SPECS, SUBJECTS, TRAINED, VARIANTS, assert_same, cells, largest, logits, patched, tokens

ALL = {**SUBJECTS, **VARIANTS}


@pytest.mark.parametrize(("subject", "spec"), cells(list(ALL), ["alibi", "learned-tile", "rope"]))
def test_a_patch_passes_its_own_verification(subject: str, spec: str) -> None:
    model = ALL[subject].fresh()
    assert posenc.patch(model, SPECS[spec]) is model
    certificate = posenc.verify(model)
    assert certificate.plan.config.name == SPECS[spec].name
    findings = certificate.findings
    assert "left padding" in findings
    assert ("future" in findings) is ALL[subject].causal
    if certificate.plan.route == "interposer":
        assert findings["attention modules"] == str(len(certificate.plan.attention))
        assert len(certificate.plan.attention) == 2
        assert ("no positions" in findings) is (spec != "nope")
    assert all(line in str(certificate) for line in findings)


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "opt", "llama", "bert"], CORE))
def test_a_plan_says_what_happens_and_touches_nothing(subject: str, spec: str) -> None:
    model = SUBJECTS[subject].fresh()
    before = {name: type(module).__name__ for name, module in model.named_modules()}
    plan = posenc.plan(model, SPECS[spec])
    assert {name: type(module).__name__ for name, module in model.named_modules()} == before
    posenc.patch(model, SPECS[spec], verify=False)
    after = {name: type(module).__name__ for name, module in model.named_modules()}
    shown = {name: (now, then) for name, (now, then) in plan.changes.items()}
    for name, (now, then) in shown.items():
        assert now.startswith(before.get(name, "nothing"))
        assert then.startswith(after[name])
        assert name in str(plan)
    inside = {name for name in after if after[name] != before.get(name)}
    outside = inside - set(shown)
    assert all(isinstance(model.get_submodule(name), PreTrainedModel) for name in outside), "a change was not announced"


def test_a_plan_is_printed_path_by_path() -> None:
    text = str(posenc.plan(SUBJECTS["gpt2"].fresh(), posenc.Alibi()))
    assert "transformer.wpe" in text
    assert "Embedding -> PositionTable" in text
    assert "transformer.h.1.attn" in text
    assert "GPT2Attention -> AlibiGPT2Attention" in text


@pytest.mark.parametrize("subject", ["bert", "roberta", "bert-base", "bert-classifier"])
def test_an_encoder_refuses_to_lose_its_positions(subject: str) -> None:
    model = ALL[subject].fresh()
    said = logits(model, tokens(1, 9))
    with pytest.raises(UnsupportedEncodingError, match="bag of words"):
        posenc.patch(model, posenc.NoPE())
    assert not posenc.is_patched(model)
    assert torch.equal(logits(model, tokens(1, 9)), said)


@pytest.mark.parametrize("subject", ["bert", "roberta"])
def test_an_encoder_without_positions_sees_a_bag_of_words(subject: str) -> None:
    model = patched(subject, "nope")
    ids, order = tokens(1, 20), torch.randperm(20)
    assert_same(logits(model, ids[:, order]), logits(model, ids)[:, order])


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        (posenc.RoPE(partial_rotary_factor=0.4), "rotary width must be even"),
        (posenc.Learned(max_position_embeddings=TRAINED + 1), "extension='tile'"),
        ("rope", "expected an encoding config"),
        (posenc.RoPE, "expected an encoding config"),
    ],
)
@pytest.mark.parametrize("subject", ["gpt2", "llama", "bert"])
def test_what_does_not_fit_is_refused_before_anything_is_touched(subject: str, encoding: Any, message: str) -> None:
    model = SUBJECTS[subject].fresh()
    said = logits(model, tokens(1, 9))
    for act in (posenc.plan, posenc.patch):
        with pytest.raises(ConfigError, match=message):
            act(model, encoding)
    assert not posenc.is_patched(model)
    assert torch.equal(logits(model, tokens(1, 9)), said)


def flaubert() -> FlaubertWithLMHeadModel:
    return FlaubertWithLMHeadModel(FlaubertConfig(vocab_size=61, emb_dim=32, n_layers=2, n_heads=4))


def test_an_unknown_model_is_refused_with_the_closest_name() -> None:
    with pytest.raises(UnsupportedFamilyError, match="no family record describes model_type 'flaubert'"):
        posenc.patch(flaubert(), posenc.NoPE())
    with pytest.raises(UnsupportedFamilyError, match="did you mean 'gpt2'"):
        find_family("gtp2")


def test_a_record_that_does_not_describe_the_model_is_refused() -> None:
    model = SUBJECTS["gpt2"].fresh()
    for wrong in (
        find_family("llama"),
        dataclasses.replace(find_family("gpt2"), attention=("GPT2Block", "GPT2Attention")),
    ):
        with pytest.raises(UnsupportedFamilyError, match="2 layers"):
            posenc.patch(model, posenc.Alibi(), family=wrong)
    assert not posenc.is_patched(model)


@pytest.mark.parametrize("subject", list(SUBJECTS))
def test_discovery_finds_what_the_records_say(subject: str) -> None:
    model = SUBJECTS[subject].fresh()
    found, known = posenc.discover(model), find_family(model.config.model_type)
    assert set(found.attention) <= set(known.attention)  # the record holds those of related types too
    assert (found.rotary, found.token_type_buffer) == (known.rotary, known.token_type_buffer)
    body = f"{known.body}." if known.body else ""
    assert found.table == (body + known.table if known.table else None)
    assert found.table_offset == known.table_offset


def test_verification_is_for_patched_models() -> None:
    with pytest.raises(PatchStateError, match="not patched"):
        posenc.verify(SUBJECTS["gpt2"].fresh())
    with torch.device("meta"):
        model = SUBJECTS["gpt2"].fresh()
    with pytest.raises(VerificationError, match="meta device"):
        posenc.patch(model, posenc.Alibi())
    assert not posenc.is_patched(model)


class Broken(Encoding):
    """A bias that is wrong in the way its config says."""

    def __init__(self, config: Any, geometry: posenc.Geometry) -> None:
        super().__init__()
        self.how = config.how

    def bias(self, query: Tensor, key: Tensor, positions: posenc.Positions) -> Tensor | None:
        """Return (1|b, 1, q, k)."""
        distance = positions.distance()[:, None].float()
        wrong = {
            "silent": torch.zeros_like(distance),
            "infinite": torch.full_like(distance, torch.nan),
            "by slot": torch.arange(key.shape[2]).float().sin()[None, None, None] * 3 + 0 * distance,
            "by call": distance.sin() * query.shape[2],
        }
        return wrong[self.how]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrokenConfig(EncodingConfig):
    """Names the way in which the bias is wrong."""

    how: str = "silent"
    name = "broken"
    label = "Broken"
    module = Broken


@pytest.mark.parametrize(
    ("how", "message"),
    [("silent", "no effect"), ("infinite", "NaN"), ("by slot", "padding"), ("by call", "later token|cache")],
)
@pytest.mark.parametrize("subject", ["gpt2", "llama"])
def test_verification_catches_a_broken_encoding_and_undoes_the_patch(subject: str, how: str, message: str) -> None:
    model = SUBJECTS[subject].fresh()
    said = logits(model, tokens(1, 9))
    with pytest.raises(VerificationError, match=message):
        posenc.patch(model, BrokenConfig(how=how))
    assert not posenc.is_patched(model)
    assert torch.equal(logits(model, tokens(1, 9)), said)


def test_verification_catches_a_patch_that_was_half_undone() -> None:
    model = posenc.patch(SUBJECTS["gpt2"].fresh(), posenc.Alibi())
    layer = model.transformer.h[1].attn
    layer.__class__ = type(layer).posenc_stock
    with pytest.raises(VerificationError, match="1 attention modules were replaced, 2 were planned"):
        posenc.verify(model)


def test_a_new_encoding_needs_no_registration_to_be_tried() -> None:
    """The hooks meet: an encoding that embeds, rotates and biases at once is heard in all three."""

    class Everything(Encoding):
        def __init__(self, config: Any, geometry: posenc.Geometry) -> None:
            super().__init__()
            self.width = geometry.hidden_size

        def embed(self, position_ids: Tensor) -> Tensor:
            return (position_ids[..., None] * torch.arange(self.width)).float().sin()

        def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
            return states * (1 + 0.01 * position_ids[:, None, :, None]).to(states.dtype)

        def bias(self, query: Tensor, key: Tensor, positions: posenc.Positions) -> Tensor:
            return -0.1 * positions.distance().abs().float()[:, None]

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class EverythingConfig(EncodingConfig):
        name, label, module = "everything", "Everything", Everything

    for subject in ("gpt2", "llama"):
        model = posenc.patch(SUBJECTS[subject].fresh(), EverythingConfig())
        whole = logits(model, tokens(1, 20))
        for hook in ("embed", "rotate", "bias"):
            kept = getattr(Everything, hook)
            setattr(Everything, hook, getattr(Encoding, hook))
            assert largest(logits(model, tokens(1, 20)) - whole) > 1e-4
            setattr(Everything, hook, kept)
