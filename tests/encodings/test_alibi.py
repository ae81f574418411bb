"""ALiBi beyond its plain form: both sides apart, interpolated, trained, and as BLOOM, MPT and Falcon build it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_alibi

import hf_posenc as posenc
from hf_posenc.encodings.alibi import slopes
from hf_posenc.errors import ConfigError, UnsupportedEncodingError

STEPS = torch.arange(9)[None]


def geometry(heads: int, causal: bool = True) -> posenc.Geometry:
    return posenc.Geometry(
        hidden_size=16,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=16,
        causal=causal,
    )


def bias(heads: int, causal: bool = True, at: torch.Tensor = STEPS, **fields: Any) -> torch.Tensor:
    encoding = posenc.build(posenc.Alibi(**fields), geometry(heads, causal))
    states = torch.zeros(1, heads, at.shape[1], 16)
    found = encoding.bias(states, states[:, :1], posenc.Positions(query=at, key=at))
    assert found is not None
    return found


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 20, 25, 40])
def test_bloom_builds_the_same(heads: int) -> None:
    mask = torch.tensor([[1] * 9, [0, 0, 0, 1, 1, 1, 1, 1, 1]])
    theirs = bloom_alibi(mask, heads, torch.float32).reshape(2, heads, 1, 9)
    at = (mask.cumsum(-1) - 1).clamp(min=0)
    assert torch.allclose(bias(heads, at=at, form="bloom"), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 20, 25, 40])
@pytest.mark.parametrize("bias_max", [8, 16, 4])
def test_mpt_builds_the_same(heads: int, bias_max: int) -> None:
    theirs = mpt_alibi(heads, 9, alibi_bias_max=bias_max)
    assert torch.allclose(bias(heads, form="mpt", bias_max=float(bias_max))[0], theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", [2, 8, 12, 71])
def test_falcon_builds_the_same(heads: int) -> None:
    at = torch.arange(700)[None]
    theirs = falcon_alibi(torch.ones(1, 700, dtype=torch.long), heads, torch.float32).reshape(1, heads, 1, 700)
    assert torch.equal(bias(heads, at=at, form="falcon"), theirs * 16**-0.5)
    assert not torch.allclose(bias(heads, at=at, form="falcon"), bias(heads, at=at, form="bloom") * 16**-0.5)


@pytest.mark.parametrize("form", ["bloom", "mpt"])
def test_parity_forms_differ_by_what_softmax_does_not_see(form: str) -> None:
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    one, other = (b.expand(1, 12, 9, 9).masked_fill(~seen, -1e30).softmax(-1) for b in (bias(12), bias(12, form=form)))
    assert torch.allclose(one, other, atol=1e-6)


def test_relative_bias_has_no_ties_far_out_in_bfloat16() -> None:
    """The nearest 256 keys at 32k stay apart in the slowest head; slope times key position makes them alike."""
    query, key = torch.tensor([[32768]]), torch.arange(32768 - 255, 32769)[None]

    def nearest(form: str) -> torch.Tensor:
        encoding = posenc.build(posenc.Alibi(form=form), geometry(8))
        states = torch.zeros(1, 8, 256, 16, dtype=torch.bfloat16)
        found = encoding.bias(states[:, :, :1], states[:, :1], posenc.Positions(query=query, key=key))
        assert found is not None
        return found[0, -1, 0].bfloat16()

    assert len(nearest("relative").unique()) == 256
    assert len(nearest("bloom").unique()) < 8


def test_sides_apart_give_half_of_the_heads_to_each() -> None:
    found = bias(4, causal=False, sides="split")[0]
    whole = bias(2)[0]
    behind, ahead = torch.ones(9, 9).tril().bool(), torch.ones(9, 9).triu().bool()
    for head, seen in ((0, behind), (1, behind), (2, ahead), (3, ahead)):
        assert torch.equal(found[head][seen], whole[head % 2][seen])
        assert (found[head][~seen] == torch.finfo(torch.float32).min).all()
    assert not torch.equal(bias(4, causal=False), found)


def test_interpolation_is_positions_closer_together() -> None:
    assert torch.allclose(bias(8, at=4 * STEPS, interpolation_factor=4.0), bias(8))
    assert torch.equal(bias(8, interpolation_factor=1.0), bias(8))
    assert float(bias(8, interpolation_factor=4.0)[0, 0, 1, 0]) == -0.125


def test_trained_slopes_start_as_fixed_ones() -> None:
    encoding = posenc.build(posenc.Alibi(trainable=True), geometry(12))
    assert encoding.get_parameter("slopes").tolist() == pytest.approx(slopes(12), rel=1e-6)
    assert torch.allclose(bias(12, trainable=True), bias(12), rtol=1e-6)
    assert not list(posenc.build(posenc.Alibi(), geometry(12)).parameters())


@pytest.mark.parametrize(
    ("fields", "causal", "error", "message"),
    [
        ({"sides": "splitt"}, True, ConfigError, "did you mean 'split'"),
        ({"form": "blom"}, True, ConfigError, "did you mean 'bloom'"),
        ({"interpolation_factor": 0.0}, True, ConfigError, "interpolation_factor"),
        ({"bias_max": float("inf")}, True, ConfigError, "bias_max"),
        ({"trainable": 1}, True, ConfigError, "trainable must be True or False"),
        ({"per_layer": True}, True, ConfigError, "trainable=True"),
        ({"form": "falcon", "trainable": True}, True, ConfigError, "bfloat16"),
        ({"sides": "split"}, True, ConfigError, "half of the heads"),
        ({"form": "mpt"}, False, UnsupportedEncodingError, "form='relative'"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: Any, causal: bool, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bias(8, causal, **fields)


def test_an_odd_number_of_heads_has_no_halves() -> None:
    with pytest.raises(ConfigError, match="even number of heads"):
        bias(3, causal=False, sides="split")
