"""Fits against least squares by hand, and what they do to a real model before it is trained."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc as posenc
from hf_posenc.conversion.absorption import absorb, position_rows
from hf_posenc.conversion.calibration import calibrate, can_calibrate, fit
from hf_posenc.conversion.training import packed_perplexity
from hf_posenc.data import Document, pack, tokenize
from hf_posenc.positions import Geometry, Positions
from hf_posenc.quickstart import BASE
from tests.families.models import fresh

N, HEADS = 24, 2
GEOMETRY = Geometry(
    hidden_size=8,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    head_dim=4,
    max_position_embeddings=N,
    causal=True,
)
VISIBLE = torch.ones(N, N, dtype=torch.bool).tril()
DISTANCE = (torch.arange(N)[:, None] - torch.arange(N)).double()


def centred(scores: Tensor) -> Tensor:
    """Return scores (h, n, n) less the mean of their row over what is visible, zero elsewhere."""
    counts = VISIBLE.sum(-1, keepdim=True)
    return (scores - (scores * VISIBLE).sum(-1, keepdim=True) / counts) * VISIBLE


def bias_of(encoding: Any) -> Tensor:
    places, nothing = torch.arange(N)[None], torch.zeros(1, HEADS, N, 4, dtype=torch.float64)
    bias: Tensor = encoding.bias(nothing, nothing, Positions(query=places, key=places))[0].detach()
    return bias


def test_a_slope_is_the_best_line() -> None:
    target = centred(torch.randn(HEADS, N, N, dtype=torch.float64) - 0.3 * DISTANCE)
    encoding: Any = posenc.build(posenc.Alibi(trainable=True), GEOMETRY)
    fit(encoding, target, GEOMETRY, VISIBLE)
    line = centred(-DISTANCE[None])[0]
    by_hand = (target * line).sum((1, 2)) / line.square().sum()
    assert torch.allclose(encoding.slopes.double(), by_hand, rtol=1e-4)


def test_a_slope_that_would_grow_with_the_distance_stays_at_none() -> None:
    encoding: Any = posenc.build(posenc.Alibi(trainable=True), GEOMETRY)
    fit(encoding, centred(0.2 * DISTANCE.expand(HEADS, N, N)), GEOMETRY, VISIBLE)
    assert encoding.slopes.tolist() == [0, 0]


def test_a_table_is_the_least_squares_solution() -> None:
    target = centred(torch.randn(HEADS, N, N, dtype=torch.float64) - DISTANCE.clamp(min=0).sqrt())
    encoding: Any = posenc.build(posenc.encoding("t5", num_buckets=8, max_distance=16), GEOMETRY)
    fit(encoding, target, GEOMETRY, VISIBLE)
    indicators = torch.nn.functional.one_hot(encoding.buckets(DISTANCE.long().clamp(min=0)), 8).double()
    columns = torch.stack([centred(indicators[None, ..., bucket])[0].flatten() for bucket in range(8)], dim=1)
    best = columns @ torch.linalg.lstsq(columns, target.flatten(1).T, driver="gelsd").solution  # (n n, h)
    assert torch.allclose(centred(bias_of(encoding)).flatten(1).T, best, atol=1e-4)


@pytest.mark.parametrize("name", ["kerple", "fire"])
def test_a_curve_of_its_kind_is_found_again(name: str) -> None:
    torch.manual_seed(1)
    wanted, encoding = (posenc.build(posenc.encoding(name), GEOMETRY) for _ in range(2))
    for weight in wanted.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    target = centred(bias_of(wanted))
    fit(encoding, target, GEOMETRY, VISIBLE)
    missed = (centred(bias_of(encoding)) - target).square().mean() / target.square().mean()
    assert float(missed) < 1e-3


def test_what_can_be_fitted_has_parameters_and_looks_at_no_token() -> None:
    can = {name for name in ("alibi", "nope", "rope", "t5", "kerple", "fire", "fox", "cope", "shaw") if _can(name)}
    assert can == {"t5", "kerple", "fire"}


def _can(name: str) -> bool:
    return can_calibrate(posenc.build(posenc.encoding(name), GEOMETRY))


@pytest.mark.parametrize(("sides", "can"), [("symmetric", True), ("split", False)])
def test_what_is_hidden_from_a_head_is_nothing_to_fit(sides: str, can: bool) -> None:
    two_sided = dataclasses.replace(GEOMETRY, causal=False)
    assert can_calibrate(posenc.build(posenc.Alibi(trainable=True, sides=sides), two_sided)) is can


def before_training(name: str, rows: int, **fields: Any) -> tuple[float, float, float]:
    """Return how far a real model is from the original, in nats: zeroed, absorbed, absorbed and calibrated."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    sources = [Document(module.__name__, Path(str(module.__file__)).read_text()) for module in (argparse, textwrap)]
    text = pack(tokenize(sources, tokenizer), 128, eos_token_id=0).dataset
    model = AutoModelForCausalLM.from_pretrained(BASE)
    original, table = copy.deepcopy(model), position_rows(model)
    measured = text.select(range(24))
    least = math.log(packed_perplexity(original, measured))
    posenc.patch(model, posenc.encoding(name, **fields), verify=False)
    distances = [math.log(packed_perplexity(model, measured)) - least]
    assert table is not None
    absorb(model, table[1:].mean(0))
    distances.append(math.log(packed_perplexity(model, measured)) - least)
    calibrate(model, original, torch.tensor(text[24 : 24 + rows]["input_ids"]), model.posenc_record.plan.geometry)
    distances.append(math.log(packed_perplexity(model, measured)) - least)
    return distances[0], distances[1], distances[2]


def test_a_real_model_starts_less_than_half_as_far_away() -> None:
    zeroed, absorbed, calibrated = before_training("t5", 8, per_layer=True)
    assert calibrated < absorbed < zeroed
    assert calibrated < zeroed / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [("alibi", {"trainable": True, "per_layer": True}), ("kerple", {"per_layer": True}), ("fire", {"per_layer": True})],
)
def test_every_trained_bias_starts_less_than_half_as_far_away(name: str, fields: dict[str, Any]) -> None:
    zeroed, _, calibrated = before_training(name, 64, **fields)
    assert calibrated < zeroed / 2


def test_layers_that_share_an_encoding_are_fitted_together() -> None:
    """ALBERT has one attention module for all layers, and so one encoding, also where each layer may have its own."""
    rows, found = torch.arange(32).reshape(2, 16) + 6, []
    for per_layer in (False, True):
        model = fresh("albert")
        plan, original = posenc.plan(model, posenc.encoding("t5", per_layer=per_layer)), copy.deepcopy(model)
        posenc.patch(model, plan.config, verify=False)
        calibration = calibrate(model, original, rows, plan.geometry)
        assert len(calibration.lost) == model.config.num_hidden_layers == 2
        found.append(next(plan.body_of(model).posenc.parameters()).detach())
    assert torch.equal(*found)
    assert found[0].abs().max() > 0
