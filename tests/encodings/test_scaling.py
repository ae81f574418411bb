"""The scalings of issue 3 and both pairings, against twins, published values, and transformers' own tables."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_posenc as posenc
from hf_posenc.errors import ConfigError
from hf_posenc.rotation import interleaved_order, permuted_weight
from tests import naive_rotary as naive

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "rotary.json").read_text())
ORIGINAL = "original_max_position_embeddings"
TWO = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 4.0, 9.0, 16.0]}


def geometry(head_dim: int, length: int = 128) -> posenc.Geometry:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    return posenc.Geometry(hidden_size=4 * head_dim, max_position_embeddings=length, causal=True, **heads)


def built(head_dim: int, length: int = 128, **fields: Any) -> Any:
    return posenc.build(posenc.RoPE(**fields), geometry(head_dim, length))


def close(found: Any, expected: Any, relative: float = 1e-12) -> None:
    assert list(found) == pytest.approx(list(expected), rel=relative, abs=1e-300)


@pytest.mark.parametrize("mix", ["linear", "harmonic"])
@pytest.mark.parametrize(("dim", "theta", "length", "factor"), [(128, 1e4, 4096, 16.0), (64, 5e5, 1024, 2.0)])
def test_ramp_over_rotations(dim: int, theta: float, length: int, factor: float, mix: str) -> None:
    scaling = {"rope_type": "yarn", "factor": factor, "ramp": "rotations", "mix": mix}
    found = built(dim, length, theta=theta, scaling=scaling)
    close(found.inv_freq, naive.by_parts(theta, dim, length, factor, 1, 32, mix))
    assert found.attention_factor == pytest.approx(0.1 * math.log(factor) + 1)
    parts = built(dim, length, theta=theta, scaling={"rope_type": "ntk_by_parts", "factor": factor})
    close(parts.inv_freq, naive.by_parts(theta, dim, length, factor, 1, 32, "linear"))
    assert parts.attention_factor == 1.0


@pytest.mark.parametrize("name", list(GOLDEN["yarn_paper_ramp"]))
def test_published_ramp_over_rotations(name: str) -> None:
    case = GOLDEN["yarn_paper_ramp"][name]
    scaling = {"rope_type": "yarn", "factor": float(name.rsplit("_s", 1)[1]), ORIGINAL: case["L"]}
    paper = built(case["d"], theta=case["base"], scaling={**scaling, "ramp": "rotations"})
    shipped = built(case["d"], theta=case["base"], scaling={**scaling, "ramp": "dimension", "mix": "linear"})
    close(paper.inv_freq, case["inv_freq_paper_ramp"])
    close(shipped.inv_freq, case["inv_freq"])
    assert paper.inv_freq != shipped.inv_freq


def test_the_older_form_of_the_repository() -> None:
    scaling = {"rope_type": "ntk_by_parts", "factor": 4.0, "form": "repository", ORIGINAL: 2048}
    found = built(128, scaling=scaling).inv_freq
    close(found, naive.by_parts_of_the_repository(1e4, 128, 2048, 4.0))
    close([found[32], found[40], found[48]], [0.0062089674, 0.0011030759, 2.5e-4], 1e-7)


def test_long_factors_for_long_texts() -> None:
    encoding = built(8, 64, scaling={"rope_type": "longrope", "factor": 8.0, **TWO})
    plain = naive.frequencies(1e4, 8)
    assert encoding.rotation_grows_after == 64
    for length, kind in ((1, "short_factor"), (64, "short_factor"), (65, "long_factor"), (999, "long_factor")):
        close(encoding.at_length(length).inv_freq, [f / s for f, s in zip(plain, TWO[kind], strict=True)])
    for mode, length in (("hf_compat", None), ("frozen", 65)):
        fields = {"rope_type": "longrope", "factor": 8.0, **TWO, "mode": mode, "length": length}
        static = built(8, 64, scaling=fields)
        assert static.rotation_grows_after is None
        states, ids = torch.randn(1, 1, 2, 8, dtype=torch.float64), torch.tensor([[3, 70]])
        assert torch.equal(static.rotate(states, ids), encoding.at_length(71).rotate(states, ids))
    short = built(8, 64, scaling={"rope_type": "longrope", "factor": 8.0, **TWO, "mode": "frozen", "length": 64})
    close(short.inv_freq, encoding.at_length(64).inv_freq)


@pytest.mark.parametrize("name", [*GOLDEN["longrope_attention_factor"], "8192_16"])
def test_published_longrope_attention(name: str) -> None:
    length, factor = (int(part) for part in name.split("_"))
    found = built(8, length, scaling={"rope_type": "longrope", "factor": float(factor), **TWO})
    value = GOLDEN["longrope_attention_factor"].get(name, 1.1435437498)
    assert found.attention_factor == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_type": "longrope", "factor": 8.0, **TWO, ORIGINAL: 128},
        {"rope_type": "proportional"},
        {"rope_type": "proportional", "factor": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize(("partial", "length"), [(1.0, 100), (1.0, 1000), (0.5, 1000)])
def test_transformers_computes_the_same(fields: dict[str, Any], partial: float, length: int) -> None:
    if fields["rope_type"] == "longrope" and partial != 1.0:
        pytest.skip("four factors are for four pairs")
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=128)
    config.rope_parameters = {**fields, "rope_theta": 10000.0, "partial_rotary_factor": partial}
    theirs, factor = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config, device="cpu", seq_len=length)
    ours = built(8, partial_rotary_factor=partial, scaling=fields).at_length(length)
    close(ours.inv_freq, theirs.tolist(), 2e-6)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-9)


def test_both_denominators_of_a_partial_rotation() -> None:
    part = built(128, partial_rotary_factor=0.25)
    share = built(128, partial_rotary_factor=0.25, scaling={"rope_type": "proportional"})
    assert part.inv_freq[-1] == pytest.approx(1.7782794e-4, rel=1e-7)
    assert share.inv_freq[15] == pytest.approx(0.1154782, rel=1e-6)
    assert (len(part.inv_freq), len(share.inv_freq)) == (16, 64)
    assert share.inv_freq[16:] == (0.0,) * 48
    states = torch.randn(1, 1, 3, 128)
    turned = share.rotate(states, torch.tensor([[0, 5, 700]]))
    for still in (slice(16, 64), slice(80, 128)):
        assert torch.equal(turned[..., still], states[..., still])


def test_resonance_rounds_wavelengths() -> None:
    found = built(128, scaling={"rope_type": "default", "resonance": True}).inv_freq
    published = GOLDEN["resonance_wavelengths_d128_b1e4"]
    close([2 * math.pi / f for f in found], published)
    scaled = built(64, scaling={"rope_type": "yarn", "factor": 4.0, "resonance": True}).inv_freq
    plain = built(64, scaling={"rope_type": "yarn", "factor": 4.0}).inv_freq
    close(scaled, [2 * math.pi / round(2 * math.pi / f) for f in plain])


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 1.0},
        {"rope_type": "ntk", "factor": 1.0},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 3.0, "mode": "frozen", "length": 128},
        {"rope_type": "dynamic", "factor": 3.0, "mode": "hf_compat"},
        {"rope_type": "ntk_by_parts", "factor": 1.0},
        {"rope_type": "ntk_by_parts", "factor": 1.0, "form": "repository"},
        {"rope_type": "yarn", "factor": 1.0},
        {"rope_type": "yarn", "factor": 1.0, "ramp": "rotations", "mix": "harmonic"},
        {"rope_type": "llama3", "factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "factor": 1.0, "short_factor": [1.0] * 16, "long_factor": [1.0] * 16},
        {"rope_type": "proportional"},
    ],
    ids=str,
)
def test_a_neutral_scaling_is_plain_rope_to_the_bit(scaling: dict[str, Any]) -> None:
    states, ids = torch.randn(1, 2, 4, 32), torch.tensor([[0, 1, 77, 127]])
    assert torch.equal(built(32, scaling=scaling).rotate(states, ids), built(32).rotate(states, ids))


def test_three_modes_of_a_growing_base() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, ORIGINAL: 4096}
    states, ids = torch.randn(1, 1, 2, 128, dtype=torch.float64), torch.tensor([[5, 8191]])
    consistent = built(128, scaling=scaling)
    frozen = built(128, scaling={**scaling, "mode": "frozen", "length": 8192})
    compat = built(128, scaling={**scaling, "mode": "hf_compat"})
    assert (consistent.rotation_grows_after, frozen.rotation_grows_after, compat.rotation_grows_after) == (
        4096,
        None,
        None,
    )
    close(frozen.inv_freq, naive.frequencies(30527.7367488067, 128))
    at_length = consistent.at_length(8192).rotate(states, ids)
    assert torch.equal(frozen.rotate(states, ids), at_length)
    assert torch.equal(compat.rotate(states, ids), at_length)
    near = torch.tensor([[5, 4095]])
    assert torch.equal(compat.rotate(states, near), built(128).rotate(states, near))
    assert not torch.equal(frozen.rotate(states, near), built(128).rotate(states, near))
    known = posenc.RoPE(scaling={**scaling, "mode": "frozen", "length": 8192}).rope_parameters(geometry(128, 4096))
    assert known is not None
    assert known["rope_type"] == "default"
    assert known["rope_theta"] == pytest.approx(30527.7367488067)


def test_interleaved_pairs() -> None:
    encoding = built(4, pairing="interleaved")
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).expand(1, 1, 1, 4)
    one, query, key = (
        encoding.rotate(states, torch.tensor([[position]]))[0, 0, 0]
        for states, position in ((x, 1), (x, 5), (x.flip(-1), 2))
    )
    close(one.tolist(), [-1.142639664, 1.922075597, 2.959850668, 4.029799502], 1e-9)
    assert float(query @ key) == pytest.approx(-0.7600021698, rel=1e-9)


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_pairings_are_a_permutation_of_the_weights(partial: float) -> None:
    fields = {"theta": 500.0, "partial_rotary_factor": partial}
    half, interleaved = built(16, **fields), built(16, **fields, pairing="interleaved")
    ids = torch.tensor([[0, 3, 700]])
    states = torch.randn(1, 2, 3, 16, dtype=torch.float64)
    speeds = naive.frequencies(500.0, int(16 * partial))
    for n, position in enumerate(ids[0].tolist()):
        expected = naive.interleaved(states[0, 1, n].tolist(), position, speeds)
        close(interleaved.rotate(states, ids)[0, 1, n].tolist(), expected, 1e-10)
    order = interleaved_order(int(16 * partial), 16)
    weight, hidden = torch.randn(3 * 16, 24, dtype=torch.float64), torch.randn(1, 3, 24, dtype=torch.float64)
    plain, paired = (
        (hidden @ w.T).unflatten(-1, (3, 16)).transpose(1, 2) for w in (weight, permuted_weight(weight, order))
    )
    assert torch.equal(half.rotate(plain, ids)[..., order], interleaved.rotate(paired, ids))
    assert torch.equal(permuted_weight(permuted_weight(weight, order), order.argsort()), weight)
    bias = torch.randn(3 * 16)
    assert torch.equal(permuted_weight(bias, order).view(3, 16), bias.view(3, 16)[:, order])


def test_a_llama_says_the_same_in_the_other_pairing() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 31}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)).eval().double()
    other, ids, order = copy.deepcopy(model), torch.randint(31, (2, 20)), interleaved_order(8, 8)
    for layer in other.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data = permuted_weight(projection.weight.data, order)
    posenc.patch(other, posenc.RoPE(pairing="interleaved"))
    with torch.no_grad():
        # transformers takes phases in float32
        assert torch.allclose(other(ids).logits, model(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({"scaling": {"rope_type": "yarn", "factor": 2.0, "ramp": "rotations"}}, False),
        ({"scaling": {"rope_type": "yarn", "factor": 2.0, "mix": "harmonic"}}, False),
        ({"scaling": {"rope_type": "yarn", "factor": 2.0, "ramp": "dimension", "mix": "linear"}}, True),
        ({"scaling": {"rope_type": "linear", "factor": 2.0, "resonance": True}}, False),
        ({"scaling": {"rope_type": "ntk_by_parts", "factor": 2.0}}, False),
        ({"scaling": {"rope_type": "longrope", "factor": 2.0, **TWO}}, False),
        ({"scaling": {"rope_type": "longrope", "factor": 2.0, **TWO, "mode": "hf_compat"}}, True),
        ({"scaling": {"rope_type": "longrope", "factor": 2.0, **TWO, "mode": "frozen", "length": 999}}, True),
        ({"scaling": {"rope_type": "proportional"}, "partial_rotary_factor": 0.5}, True),
        ({"pairing": "interleaved"}, False),
    ],
    ids=str,
)
def test_transformers_is_given_only_what_it_knows(fields: dict[str, Any], known: bool) -> None:
    config = posenc.RoPE(**fields).for_model(geometry(8))
    parameters = config.rope_parameters(geometry(8))
    assert (parameters is not None) == known
    if parameters is not None and parameters["rope_type"] != "default":
        model = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=128)
        model.rope_parameters = parameters
        built_by_them = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        theirs = built_by_them(model, device="cpu", seq_len=999)[0].tolist()
        close(posenc.build(config, geometry(8)).at_length(999).inv_freq, theirs, 2e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pairing": "interleved"}, "did you mean 'interleaved'"),
        ({"scaling": {"rope_type": "yarn", "factor": 2.0, "ramp": "rotation"}}, "one of 'dimension', 'rotations'"),
        ({"scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}}, "one of True, False"),
        ({"scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0}}, "beta_fast above beta_slow"),
        ({"scaling": {"rope_type": "linear", "factor": 2.0, "resonance": "yes"}}, "one of True, False"),
        ({"scaling": {"rope_type": "dynamic", "factor": 2.0, "mode": "frozen"}}, "needs 'length'"),
        ({"scaling": {"rope_type": "dynamic", "factor": 2.0, "length": 9}}, "no other takes it"),
        ({"scaling": {"rope_type": "longrope", **TWO}}, "needs 'factor'"),
        ({"scaling": {"rope_type": "longrope", "factor": 2.0, **TWO, "long_factor": [0.0]}}, "positive numbers"),
        ({"scaling": {"rope_type": "longrope", "factor": 2.0, **TWO, "long_factor": [1.0]}}, "as many entries"),
        ({"scaling": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}}, "needs 4"),
        ({"scaling": {"rope_type": "proportional"}, "partial_rotary_factor": 0.1}, "turns no pair"),
        ({"scaling": {"rope_type": "proportional", "factor": 0.5}}, "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(8, **fields)
