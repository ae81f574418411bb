"""Rotary positions against a naive twin, published values, and transformers' own tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_posenc as posenc
from hf_posenc.errors import ConfigError
from tests import naive

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "golden.json").read_text())
ORIGINAL = "original_max_position_embeddings"
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "ntk", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0, ORIGINAL: 128},
    {"rope_type": "yarn", "factor": 8.0, ORIGINAL: 128},
    {"rope_type": "yarn", "factor": 1.0, ORIGINAL: 128},
    {"rope_type": "yarn", "factor": 8.0, ORIGINAL: 128, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 40.0, ORIGINAL: 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 8.0, ORIGINAL: 128, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 8},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 256},
]


def geometry(head_dim: int, length: int = 128) -> posenc.Geometry:
    return posenc.Geometry(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=length,
        causal=True,
    )


def built(head_dim: int, length: int = 128, **fields: Any) -> Any:
    return posenc.build(posenc.RoPE(**fields), geometry(head_dim, length))


def close(found: Any, expected: Any, relative: float = 1e-12) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert math.isclose(one, other, rel_tol=relative), (one, other)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(("head_dim", "partial", "theta"), [(16, 1.0, 10000.0), (32, 0.5, 500.0), (64, 0.25, 1e6)])
def test_rotation_equals_the_naive_one(head_dim: int, partial: float, theta: float, scaling: Any) -> None:
    encoding = built(head_dim, theta=theta, partial_rotary_factor=partial, scaling=scaling)
    positions = torch.tensor([[0, 1, 127, 128, 700, 4095]])
    states = torch.randn(1, 2, 6, head_dim, dtype=torch.float64)
    dim = int(head_dim * partial)
    frequencies, factor = naive.rope_frequencies(theta, dim, scaling, length=4096)
    turned = encoding.rotate(states, positions)
    for head in range(2):
        for n, position in enumerate(positions[0].tolist()):
            expected = naive.rotated(states[0, head, n].tolist(), position, frequencies, factor)
            assert torch.allclose(turned[0, head, n], torch.tensor(expected, dtype=torch.float64), atol=1e-10, rtol=0)
    assert torch.equal(turned[..., dim:], states[..., dim:])
    single = encoding.rotate(states.float(), positions)
    assert single.dtype == torch.float32
    assert torch.allclose(single.double(), turned, atol=1e-6, rtol=1e-6)
    assert torch.equal(single[..., dim:], states.float()[..., dim:])


@pytest.mark.parametrize("length", [1, 100, 128, 129, 200, 5000])
def test_dynamic_grows_with_the_length_of_the_text(length: int) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, ORIGINAL: 128}
    encoding = built(16, scaling=scaling)
    assert encoding.rotation_grows_after == 128
    close(encoding.at_length(length).inv_freq, naive.rope_frequencies(10000.0, 16, scaling, length)[0])
    assert encoding.at_length(length).rotation_grows_after is None
    close(built(16).at_length(length).inv_freq, built(16).inv_freq)


def test_a_known_rotation() -> None:
    encoding = built(4)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    one = encoding.rotate(x.expand(1, 1, 1, 4), torch.tensor([[1]]))[0, 0, 0]
    close(one.tolist(), [-1.984110649, 1.959900667, 2.462377902, 4.019799668], 1e-8)
    query = encoding.rotate(x.expand(1, 1, 1, 4), torch.tensor([[5]]))[0, 0, 0]
    key = encoding.rotate(x.flip(0).expand(1, 1, 1, 4), torch.tensor([[2]]))[0, 0, 0]
    assert math.isclose(float(query @ key), -1.6155797111, rel_tol=1e-9)


@pytest.mark.parametrize("name", list(GOLDEN["rope_inv_freq"]))
def test_published_frequencies(name: str) -> None:
    dim, theta = (int(part[1:]) for part in name.split("_"))
    close(built(dim, theta=float(theta)).inv_freq, GOLDEN["rope_inv_freq"][name])


@pytest.mark.parametrize("name", list(GOLDEN["ntk_base"]))
def test_published_ntk_bases(name: str) -> None:
    dim, theta, factor = (float(part[1:]) for part in name.split("_"))
    scaled = built(int(dim), theta=theta, scaling={"rope_type": "ntk", "factor": factor})
    close(scaled.inv_freq, built(int(dim), theta=GOLDEN["ntk_base"][name]).inv_freq)
    assert math.isclose(scaled.inv_freq[-1] * factor, built(int(dim), theta=theta).inv_freq[-1], rel_tol=1e-12)


@pytest.mark.parametrize("name", list(GOLDEN["dynamic_ntk_base_d128_L4096"]))
def test_published_dynamic_bases(name: str) -> None:
    factor, length = (int(part[1:]) for part in name.split("_"))
    encoding = built(128, scaling={"rope_type": "dynamic", "factor": float(factor), ORIGINAL: 4096})
    expected = built(128, theta=GOLDEN["dynamic_ntk_base_d128_L4096"][name])
    close(encoding.at_length(length).inv_freq, expected.inv_freq)


@pytest.mark.parametrize("name", list(GOLDEN["yarn"]))
def test_published_yarn(name: str) -> None:
    case = GOLDEN["yarn"][name]
    scaling = {"rope_type": "yarn", "factor": float(name.rsplit("_s", 1)[1]), ORIGINAL: case["L"]}
    encoding = built(case["d"], theta=case["base"], scaling=scaling)
    close(encoding.inv_freq, case["inv_freq"])
    assert math.isclose(encoding.attention_factor, case["attention_factor"], rel_tol=1e-12)


@pytest.mark.parametrize("name", list(GOLDEN["llama3"]))
def test_published_llama3(name: str) -> None:
    dim, factor = int(name.split("_")[0][1:]), float(name.split("fac")[1])
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
    close(built(dim, theta=500000.0, scaling=scaling).inv_freq, GOLDEN["llama3"][name])


@pytest.mark.parametrize(
    ("dim", "theta", "length", "factor", "index", "value"),
    [
        (128, 1e4, 4096, 16.0, 33, 0.0046004355),
        (128, 1e4, 4096, 32.0, 63, 3.6086937e-6),
        (128, 1e4, 2048, 8.0, 28, 0.010314021),
        (64, 1e4, 1024, 4.0, 11, 0.027572464),
        (128, 1e4, 8192, 16.0, 37, 0.0026783214),
        (128, 1e6, 32768, 4.0, 31, 8.0295973e-4),
        (64, 1.5e5, 4096, 32.0, 13, 0.0040695547),
    ],
)
def test_known_yarn_samples(dim: int, theta: float, length: int, factor: float, index: int, value: float) -> None:
    encoding = built(dim, theta=theta, scaling={"rope_type": "yarn", "factor": factor, ORIGINAL: length})
    assert math.isclose(encoding.inv_freq[index], value, rel_tol=1e-7)


@pytest.mark.parametrize("scaling", [s for s in SCALINGS if s and s["rope_type"] not in ("ntk", "default")], ids=str)
@pytest.mark.parametrize("dim", [16, 64])
def test_transformers_computes_the_same(scaling: dict[str, Any], dim: int) -> None:
    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, max_position_embeddings=128)
    config.rope_parameters = {**scaling, "rope_theta": 10000.0}
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, device="cpu", seq_len=1000)
    ours = built(dim, scaling=scaling).at_length(1000)
    close(ours.inv_freq, theirs.tolist(), 2e-6)
    assert math.isclose(ours.attention_factor, factor, rel_tol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_angles_hold_far_out(dtype: torch.dtype) -> None:
    """At position 131072 the angle is off by less than the states' own rounding, in every dtype."""
    encoding = built(64).to(dtype)
    positions = torch.tensor([[131072, 131071, 100003]])
    states = torch.zeros(1, 1, 3, 64, dtype=dtype)
    states[..., :32] = 1
    turned = encoding.rotate(states, positions).double()
    for n, position in enumerate(positions[0].tolist()):
        for k, frequency in enumerate(naive.rope_frequencies(10000.0, 64, None)[0]):
            angle = math.atan2(float(turned[0, 0, n, 32 + k]), float(turned[0, 0, n, k]))
            error = (angle - position * frequency + math.pi) % (2 * math.pi) - math.pi
            assert abs(error) <= 5e-3


def test_the_memo_never_outlives_its_positions() -> None:
    encoding = built(16)
    states, positions = torch.randn(1, 1, 3, 16), torch.arange(3)[None]
    first = encoding.rotate(states, positions)
    positions += 5
    later = encoding.rotate(states, positions)
    assert torch.equal(later, encoding.rotate(states, torch.arange(5, 8)[None]))
    assert not torch.equal(later, first)
    assert encoding.rotate(states.double(), positions).dtype == torch.float64
    assert torch.equal(encoding.rotate(states, positions), later)
    with torch.inference_mode():
        fresh = torch.arange(3)[None]
        assert torch.equal(encoding.rotate(states, fresh), first)
        fresh += 5
        assert torch.equal(encoding.rotate(states, fresh), later)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"theta": 1.0}, "theta"),
        ({"theta": math.nan}, "theta"),
        ({"theta": True}, "theta"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"scaling": "yarn"}, "must be a dict"),
        ({"scaling": {"rope_type": "yarm", "factor": 2.0}}, "did you mean 'yarn'"),
        ({"scaling": {"factor": 2.0}}, "unknown rope_type None"),
        ({"scaling": {"rope_type": "yarn"}}, "needs the key 'factor'"),
        ({"scaling": {"rope_type": "yarn", "factor": 0.5}}, "at least 1"),
        ({"scaling": {"rope_type": "yarn", "factor": "4"}}, "positive number"),
        ({"scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fst": 32}}, "did you mean 'beta_fast'"),
        ({"scaling": {"rope_type": "linear", "factor": 4.0, ORIGINAL: 128}}, "has no key"),
        ({"scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 128.5}}, "whole number"),
        ({"scaling": {"rope_type": "default", "factor": 2.0}}, "has no key"),
        ({"scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
        (
            {"scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            "above low_freq_factor",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_when_written_down(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        posenc.RoPE(**fields)


@pytest.mark.parametrize(("head_dim", "partial"), [(15, 1.0), (16, 0.2), (16, 0.05)])
def test_an_odd_rotary_width_is_refused(head_dim: int, partial: float) -> None:
    with pytest.raises(ConfigError, match="rotary width must be even"):
        built(head_dim, partial_rotary_factor=partial)


def test_the_original_length_is_read_from_the_model_and_recorded() -> None:
    config = posenc.RoPE(scaling={"rope_type": "yarn", "factor": 4.0}).for_model(geometry(16, 777))
    assert config.scaling == {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 777}
    assert (config.theta, config.partial_rotary_factor) == (10000.0, 1.0)


def test_none_keeps_what_the_model_has() -> None:
    own = {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_type": "linear", "factor": 3.0}
    kept = posenc.RoPE().for_model(geometry(16), own)
    scaling = {"rope_type": "linear", "factor": 3.0}
    assert kept == posenc.RoPE(theta=5e5, partial_rotary_factor=0.5, scaling=scaling, pairing="half_split")
    dropped = posenc.RoPE(theta=7.0, scaling={"rope_type": "default"}).for_model(geometry(16), own)
    plain = {"rope_type": "default"}
    assert dropped == posenc.RoPE(theta=7.0, partial_rotary_factor=0.5, scaling=plain, pairing="half_split")
    legacy = posenc.RoPE(scaling={"type": "linear", "factor": 3.0})
    assert legacy.scaling == {"rope_type": "linear", "factor": 3.0}


@pytest.mark.parametrize("pairing", ["half_split", "interleaved"])
def test_gradients_are_turned_back(pairing: str) -> None:
    """Against finite differences, twice, with a part of the head left alone; in half precision against float64."""
    encoding, ids = built(8, pairing=pairing, partial_rotary_factor=0.5), torch.tensor([[0, 3, 700]])
    states = torch.randn(2, 3, 3, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: encoding.rotate(x, ids), states)
    assert torch.autograd.gradgradcheck(lambda x: encoding.rotate(x, ids).square(), states)
    rounded = states.detach().bfloat16()
    assert torch.allclose(encoding.rotate(rounded, ids).double(), encoding.rotate(rounded.double(), ids), rtol=0.01)
