"""The diagnosis on models whose answer is known beforehand."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, T5Config, T5ForConditionalGeneration

import hf_posenc as posenc
from hf_posenc.errors import ConfigError, UnsupportedFamilyError
from hf_posenc.evaluation import position_table
from hf_posenc.evaluation.attention_record import (
    LayerEffect,
    attention_of,
    centred_scores,
    position_effects,
    reporting_attention,
)
from hf_posenc.evaluation.diagnosis import Diagnosis, diagnose
from hf_posenc.evaluation.score_terms import TERMS, input_parts, score_terms
from hf_posenc.evaluation.scoring import evaluation_mode
from hf_posenc.evaluation.shift import loss_by_shift
from tests.models import SUBJECTS, VARIANTS, tokens

WITH_TABLE = ["gpt2", "opt", "bert", "roberta", "bert-decoder", "opt-post-norm", "gpt2-unscaled", "roberta-base"]
DOCUMENTS = list(tokens(3, 90))


def subject(name: str, **fields: Any) -> Any:
    return {**SUBJECTS, **VARIANTS}[name].fresh(**fields).double()


def effects(model: Any, length: int = 32, rows: int = 64) -> list[LayerEffect]:
    with evaluation_mode(model), reporting_attention(model):
        return position_effects(model, tokens(rows, length, seed=9), batch_size=16)


def share(effect: LayerEffect) -> float:
    return float(effect.position.sum() / effect.variance.sum())


def ratio(effect: LayerEffect) -> float:
    return float(effect.distance.sum() / effect.position.sum())


def test_centred_scores_are_the_scores_up_to_a_constant_of_their_row() -> None:
    scores = 5 * torch.randn(2, 3, 6, 6, dtype=torch.float64)
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    found = centred_scores(scores.masked_fill(~visible, -math.inf).softmax(-1), visible)
    for row in range(6):
        seen = scores[:, :, row, : row + 1]
        torch.testing.assert_close(found[:, :, row, : row + 1], seen - seen.mean(-1, keepdim=True))
        assert not found[:, :, row, row + 1 :].any()


@pytest.mark.parametrize("name", WITH_TABLE)
def test_the_four_terms_add_up_to_the_scores_of_the_model(name: str) -> None:
    model = subject(name)
    rows = tokens(1, 20)
    with evaluation_mode(model), reporting_attention(model):
        content, position, _ = input_parts(model, rows)
        terms = score_terms(model, rows)
        reported = attention_of(model, rows)[0]
    causal = SUBJECTS[name].causal if name in SUBJECTS else VARIANTS[name].causal
    visible = ~torch.eye(20, dtype=torch.bool)
    scores = centred_scores(reported, visible.tril() if causal else visible)
    pairs = (visible.tril() if causal else visible).sum()
    torch.testing.assert_close(terms.total, (scores.square().sum((0, 2, 3)) / pairs).sqrt(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sum(terms.share.values()), torch.ones_like(terms.total))
    assert position.abs().max() > 0.1 < content.abs().max()


def by_hand(model: Any, rows: Tensor) -> dict[str, Tensor]:
    """The four terms of a GPT-2, from its weights: (h, n, n) less the mean of the row over the tokens before."""
    body, block = model.transformer, model.transformer.h[0]
    words, places = body.wte(rows)[0], body.wpe(torch.arange(rows.shape[1]))
    both = words + places
    scale = block.ln_1.weight / (both.var(-1, unbiased=False, keepdim=True) + block.ln_1.eps).sqrt()
    parts = {
        "content": (words - words.mean(-1, keepdim=True)) * scale + block.ln_1.bias,
        "position": (places - places.mean(-1, keepdim=True)) * scale,
    }
    weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias
    width, heads = words.shape[1], model.config.n_head

    def project(name: str, start: int) -> Tensor:
        there = parts[name] @ weight[:, start : start + width]
        there = there + (bias[start : start + width] if name == "content" else 0)
        return there.view(len(there), heads, -1).transpose(0, 1)

    found = {}
    for name in TERMS:
        query, key = name.split("_")
        scores = project(query, 0) @ project(key, width).mT / math.sqrt(width // heads)
        before = torch.ones(scores.shape[1:], dtype=torch.bool).tril(-1)
        mean = (scores * before).sum(-1, keepdim=True) / before.sum(-1, keepdim=True).clamp(min=1)
        found[name] = (scores - mean) * before
    return found


def test_each_term_is_what_the_weights_of_a_gpt2_say() -> None:
    model, rows = subject("gpt2"), tokens(1, 24)
    with evaluation_mode(model), reporting_attention(model):
        expected, found = by_hand(model, rows), score_terms(model, rows)
    pairs = 24 * 23 / 2
    for name, term in expected.items():
        torch.testing.assert_close(found.deviation[name], (term.square().sum((1, 2)) / pairs).sqrt())


def test_a_table_of_zeros_has_no_terms_and_explains_nothing_in_the_first_layer() -> None:
    model = subject("gpt2")
    nn.init.zeros_(model.transformer.wpe.weight)
    with (
        evaluation_mode(model),
        reporting_attention(model),
        pytest.raises(UnsupportedFamilyError, match="adds nothing for positions"),
    ):
        score_terms(model, tokens(2, 24))
    first = effects(model, rows=64)[0]  # so few that chance alone, not taken out, would explain 3 %
    assert abs(share(first)) < 0.01 < share(effects(subject("gpt2"))[0])
    assert first.toeplitz_r2 == [None] * 4


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_rotation_is_all_distance_in_the_first_layer_and_a_random_table_is_not(name: str) -> None:
    model = subject(name)
    with torch.no_grad():  # tokens share a direction, as trained ones do; else a rotation does nothing on average
        embedding = model.get_input_embeddings().weight
        embedding += 2 * embedding.std() * torch.randn(embedding.shape[1], generator=torch.Generator().manual_seed(1))
    rotary, learned = effects(model, rows=256)[0], effects(subject("gpt2"), rows=256)[0]
    assert share(rotary) > 0.05
    assert ratio(rotary) > 0.9
    assert ratio(learned) < 0.5


def profile_error(effect: LayerEffect, expected: Tensor) -> float:
    """The largest error of a profile against (h, m), both without their mean."""
    return float((effect.profile - (expected - expected.mean(-1, keepdim=True))).abs().max())


def test_the_profile_of_alibi_is_its_slopes() -> None:
    config = BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(0)
    model = BloomForCausalLM(config).double()
    first = effects(model)[0]
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None]
    assert first.distances.tolist() == list(range(1, 32))
    assert profile_error(first, -slopes * first.distances) < 0.02
    assert ratio(first) > 0.999


def test_a_patched_model_is_diagnosed_as_what_it_now_is() -> None:
    model = posenc.patch(SUBJECTS["gpt2"].fresh(), posenc.Alibi()).double()
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.mul_(0.05)
    first = effects(model)[0]
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None]
    assert profile_error(first, -slopes * first.distances) < 0.1
    assert ratio(first) > 0.99
    whole = diagnose(model, DOCUMENTS, length=16, sequences=8)
    assert whole.max_length is None
    assert "adds nothing for positions" in whole.reasons["terms"]


def test_the_profile_of_t5_is_its_bias_table() -> None:
    torch.manual_seed(0)
    small = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=61, relative_attention_num_buckets=8, **small)
    model = T5ForConditionalGeneration(config).double()
    attention = model.encoder.block[0].layer[0].SelfAttention
    nn.init.normal_(attention.relative_attention_bias.weight)
    nn.init.normal_(attention.q.weight, std=0.02)
    first = effects(model.eval(), rows=128)[0]
    bias = attention.compute_bias(32, 32)[0]  # (h, q, k)
    places = torch.arange(32)
    away = places[:, None] - places
    expected = torch.stack([bias[:, away == distance][:, 0] for distance in first.distances.tolist()], dim=1)
    assert sorted(set(away.flatten().tolist()) - {0}) == first.distances.tolist()
    assert profile_error(first, expected.detach()) < 0.1  # of a table of deviation 1
    assert ratio(first) > 0.999


def test_untrained_rows_are_found_where_they_begin() -> None:
    model = SUBJECTS["gpt2"].fresh()
    table = model.transformer.wpe.weight
    for trained in (0, 1, 37, 63, 64):
        nn.init.normal_(table, std=model.config.initializer_range)
        with torch.no_grad():
            table[:trained] *= 3
        report = position_table.table_report(model)
        assert report is not None
        assert report.trained == trained
        assert not report.fixed


def test_a_formula_is_not_taken_for_a_trained_table() -> None:
    model = posenc.patch(SUBJECTS["gpt2"].fresh(), posenc.Sinusoidal(theta=100.0))
    found = diagnose(model, DOCUMENTS, length=16, sequences=8)
    assert found.kind == "fixed table"
    assert found.table is not None
    assert found.table.trained is None
    assert found.rotation is not None
    assert len(found.rotation.wavelengths) == 16


def test_similarity_is_the_mean_cosine_of_all_pairs_at_a_distance() -> None:
    table = torch.randn(9, 5, dtype=torch.float64)
    found = position_table.mean_similarity(table)
    units = nn.functional.normalize(table - table.mean(0), dim=1)
    for distance in range(9):
        expected = (units[: 9 - distance] * units[distance:]).sum(1).mean()
        torch.testing.assert_close(found[distance], expected)


def test_frequencies_that_repeat_or_stand_still_are_counted() -> None:
    wavelengths = torch.tensor([8.0, 99.0, 101.0, 399.0, 401.0, 5000.0], dtype=torch.float64)
    found = position_table.describe_rotation(2 * math.pi / wavelengths, 100)
    assert (found.repeating, found.idle) == (2, 2)
    torch.testing.assert_close(found.wavelengths, wavelengths)
    assert position_table.closest_stranger(torch.linspace(1, 0, 50)) == (17, pytest.approx(1 - 17 / 49))


def test_moving_positions_costs_a_table_and_not_a_rotation() -> None:
    rows = tokens(4, 24)
    cost = {}
    for name in ("llama", "gpt2", "roberta"):
        model = subject(name)
        with evaluation_mode(model):
            mask = 3 if name == "roberta" else None
            cost[name] = loss_by_shift(model, rows, [0, 1, 9, 40], mask_token_id=mask).cost
    assert max(abs(value) for value in cost["llama"].values()) < 1e-6
    assert min(abs(cost[name][shift]) for name in ("gpt2", "roberta") for shift in (1, 9, 40)) > 1e-4


@pytest.mark.parametrize("name", ["gpt2", "opt", "roberta"])
def test_moved_positions_read_the_rows_that_lie_there(name: str) -> None:
    model = subject(name)
    moved, rows, shift = copy.deepcopy(model), tokens(3, 24), 11
    family = posenc.family.find_family(model.config.model_type)
    table = family.body_of(moved).get_submodule(family.table).weight
    start = position_table.table_start(family, model.config)
    with torch.no_grad():
        table[start:-shift] = table[start + shift :].clone()
    mask = 3 if name == "roberta" else None
    with evaluation_mode(model), evaluation_mode(moved):
        expected = loss_by_shift(moved, rows, [0], mask_token_id=mask).nll[0]
        assert loss_by_shift(model, rows, [shift], mask_token_id=mask).nll[shift] == pytest.approx(expected, rel=1e-12)


def test_the_loss_of_unmoved_text_is_the_model_s_own() -> None:
    model, rows = subject("gpt2"), tokens(4, 24)
    with evaluation_mode(model):
        expected = float(model(input_ids=rows, labels=rows).loss)
        assert loss_by_shift(model, rows, [0]).nll[0] == pytest.approx(expected, rel=1e-6)


def diagnosed(name: str, **arguments: Any) -> Diagnosis:
    return diagnose(SUBJECTS[name].fresh(), DOCUMENTS, **{"length": 16, "sequences": 8} | arguments)


def count_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_a_diagnosis_touches_nothing_and_repeats_itself() -> None:
    model = SUBJECTS["gpt2"].fresh(attn_implementation="eager")
    model(input_ids=tokens(1, 4), output_attentions=True)  # transformers leaves its own hooks behind
    model.set_attn_implementation("sdpa")
    model.train()
    hooks = count_hooks(model)
    state = copy.deepcopy(model.state_dict())
    first, second = (diagnose(model, DOCUMENTS, length=16, sequences=7) for _ in range(2))
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert count_hooks(model) == hooks
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert json.dumps(first.to_dict(), allow_nan=False) == json.dumps(second.to_dict())
    assert (first.sequences, first.reasons) == (8, {})


def test_what_cannot_be_measured_says_why() -> None:
    assert "no table" in diagnosed("llama").reasons["terms"]
    assert "mask token" in diagnosed("bert").reasons["shift"]
    base = diagnose(VARIANTS["gpt2-base"].fresh(), DOCUMENTS, length=16, sequences=8)
    assert "no language-modelling head" in base.reasons["shift"]
    assert base.terms is not None


@pytest.mark.parametrize(
    "arguments", [{"length": 65}, {"length": 2}, {"sequences": 1}, {"seed": -1}, {"length": True}, {"batch_size": 0}]
)
def test_numbers_that_cannot_be_used_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        diagnosed("gpt2", **arguments)


def test_half_precision_and_strangers_are_refused() -> None:
    with pytest.raises(ConfigError, match="float32"):
        diagnose(SUBJECTS["gpt2"].fresh().bfloat16(), DOCUMENTS)
    with pytest.raises(UnsupportedFamilyError):
        diagnose(nn.Linear(2, 2), DOCUMENTS)  # type: ignore[arg-type]
