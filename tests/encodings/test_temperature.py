"""Temperatures of encodings, and DroPE, against a naive twin and the sheet's values."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.config import from_dict
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from hf_posenc.temperature import SCALES, TRAINED, Temperature
from tests import naive_rotary as naive

HOOKS = ("embed", "remap", "rotate", "rotate_key", "bias", "distance_bias", "gate", "score", "output_bias")


def geometry(**fields: Any) -> posenc.Geometry:
    plain = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return posenc.Geometry(**{**plain, "max_position_embeddings": 16, "causal": True, **fields})


def built(kind: str, inner: Any = None, shape: posenc.Geometry | None = None, **fields: Any) -> Any:
    inner = inner or posenc.NoPE(allow_bidirectional=True)
    return posenc.build(dataclasses.replace(inner, temperature=Temperature(kind=kind, **fields)), shape or geometry())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", list(SCALES))
def test_every_kind_equals_the_naive_one(kind: str, causal: bool) -> None:
    fields = {} if kind == "log_n" else {"scale": 0.7}
    encoding = built(kind, shape=geometry(causal=causal), length=10, **fields)
    rows = [[0, 8, 9, 10, 99], [3, 3, 20, 5000, 131072]]
    factor = encoding.factor(torch.tensor(rows))
    assert factor.dtype == torch.float32
    assert factor.shape[0] in (1, 2)
    assert factor.shape[1] in (1, 4)
    assert factor.shape[2] == 5
    for b, row in enumerate(rows):
        for n, position in enumerate(row):
            seen = position + 1 if causal else max(row) + 1
            offset = 1.0 if kind == "ssmax" else 0.0
            expected = naive.temperature(kind, position, seen, 0.7, 10, offset)
            assert factor.expand(2, 4, 5)[b, 3, n].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "scale", "length", "position", "value"),
    [
        ("llama4", 0.1, 8192, 8190, 1.0),
        ("llama4", 0.1, 8192, 8191, 1.0693147181),
        ("llama4", 0.1, 8192, 16383, 1.1098612289),
        ("llama4", 0.1, 8192, 131071, 1.2833213344),
        ("ministral3", 0.1, 16384, 16383, 1.0),
        ("ministral3", 0.1, 16384, 16384, 1.0693147181),
        ("ministral3", 0.1, 16384, 262143, 1.2772588722),
        ("beam", 0.1, 2048, 2047, 1.0717734625),
        ("log_n", None, 512, 1023, 1.1111111111),
        ("log_n", None, 512, 4095, 1.3333333333),
        ("log_n", None, 4096, 8191, 1.0833333333),
        ("log_n", None, 4096, 65535, 1.3333333333),
        ("log_n", None, 512, 100, 1.0),
    ],
)
def test_published_values(kind: str, scale: float | None, length: int, position: int, value: float) -> None:
    found = built(kind, scale=scale, length=length).factor(torch.tensor([[position]]))
    assert found.item() == pytest.approx(value, rel=2e-7)


@pytest.mark.parametrize(("n", "sharp"), [(1024, 0.99965519), (65536, 0.99999711)])
def test_published_softmax(n: int, sharp: float) -> None:
    """A peak among n keys keeps its weight under scalable softmax: scores from -2 to 3, scale 0.43."""
    factor = built("ssmax_paper", scale=0.43).factor(torch.tensor([[n - 1]]))[0, 0].item()
    scores = torch.full((n,), -2.0, dtype=torch.float64)
    scores[-1] = 3.0
    assert (scores * factor).softmax(0)[-1].item() >= sharp - 1e-8
    assert scores.softmax(0)[-1].item() < 0.13


def test_identity_starts_change_nothing() -> None:
    ids = torch.arange(4000)[None]
    for kind in ("constant", "per_head", "ssmax"):
        assert (built(kind).factor(ids) == 1).all()
    paper = built("ssmax_paper").factor(ids)[0, 0]
    assert paper[15].item() == pytest.approx(1.0), "a text of the trained length is left as it is"
    assert paper[255].item() == pytest.approx(2.0)


@pytest.mark.parametrize("kind", TRAINED)
def test_gradients_reach_every_trained_number(kind: str) -> None:
    encoding = built(kind).to(torch.bfloat16)
    factor = encoding.factor(torch.arange(3, 40)[None])
    assert factor.dtype == torch.float32
    factor.square().sum().backward()
    names = ["tempering.scale", "tempering.offset"] if kind == "ssmax" else ["tempering.scale"]
    assert [name for name, _ in encoding.named_parameters()] == names
    for parameter in encoding.parameters():
        assert parameter.shape == (4,)
        assert (parameter.grad != 0).all()


@pytest.mark.parametrize("name", [name for name in posenc.encodings() if name not in ("layered", "stacks")])
def test_every_encoding_takes_one_and_is_what_it_was_beside_it(name: str) -> None:
    plain, spec = posenc.encoding(name), {"kind": "ssmax"}
    warm = dataclasses.replace(plain, temperature=spec)
    assert warm.temperature == Temperature(kind="ssmax")
    assert dataclasses.replace(warm, temperature=None) == plain
    shape = geometry(max_position_embeddings=512)
    alone, tempered = posenc.build(plain, shape), posenc.build(warm, shape)
    assert [tempered.overrides(hook) for hook in HOOKS] == [alone.overrides(hook) for hook in HOOKS]
    assert tempered.overrides("temperature")
    own = {name for name, _ in tempered.named_parameters()} - {name for name, _ in alone.named_parameters()}
    assert own == {"tempering.scale", "tempering.offset"}
    assert from_dict(json.loads(json.dumps(warm.for_model(shape).to_dict()))) == warm.for_model(shape)
    with pytest.raises(ConfigError, match="did you mean 'ssmax'"):
        dataclasses.replace(plain, temperature={"kind": "ssmx"})


def test_a_growing_rotation_stays_tempered() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    encoding = built("ssmax", posenc.RoPE(scaling=scaling))
    alone = posenc.build(posenc.RoPE(scaling=scaling), geometry())
    assert encoding.rotation_grows_after == alone.rotation_grows_after == 16
    states, ids = torch.randn(1, 4, 2, 8), torch.tensor([[3, 49]])
    assert torch.equal(encoding.at_length(50).rotate(states, ids), alone.at_length(50).rotate(states, ids))
    assert (encoding.factor(ids) == 1).all()


def test_the_encodings_own_temperature_is_multiplied() -> None:
    drope = posenc.encoding("drope", factor=4.0, coefficient=0.412)
    found = built("constant", drope, scale=2.0).factor(torch.arange(2)[None])
    assert found.tolist() == [[pytest.approx([2 * (1 + 0.412 * math.log(4))] * 2)]]


def test_the_spec_is_filled_in_from_the_model() -> None:
    config = posenc.RoPE(temperature={"kind": "ssmax_paper"})
    filled = config.for_model(geometry(max_position_embeddings=128), {"rope_theta": 5e5})
    plain = filled.to_dict()
    assert plain["theta"] == 5e5
    expected = {"kind": "ssmax_paper", "length": 128, "scale": pytest.approx(1 / math.log(128)), "per_layer": False}
    assert plain["temperature"] == expected
    assert from_dict(json.loads(json.dumps(plain))) == filled
    assert filled.rope_parameters(geometry()) is None, "transformers has no tempered rotation"
    assert posenc.RoPE().rope_parameters(geometry()) is not None


def test_layers_have_numbers_of_their_own_where_that_is_asked_for() -> None:
    spec: dict[str, Any] = {"kind": "per_head"}
    shared = posenc.RoPE(temperature=spec).build_layers(geometry(), 3)
    apart = posenc.RoPE(temperature={**spec, "per_layer": True}).build_layers(geometry(), 3)
    assert [len(list(encoding.parameters())) for encoding in (shared, apart)] == [1, 3]


def test_drope_is_nothing_but_a_temperature() -> None:
    encoding = posenc.build(posenc.encoding("drope", factor=8.0, coefficient=0.103), geometry())
    assert not any(encoding.overrides(hook) for hook in HOOKS)
    factor = encoding.factor(torch.arange(3)[None])
    assert factor is not None
    assert factor.tolist() == [[pytest.approx([1 + 0.103 * math.log(8)] * 3)]]
    neutral = posenc.build(posenc.encoding("drope"), geometry()).factor(torch.arange(3)[None])
    assert neutral is not None
    assert (neutral == 1).all()
    with pytest.raises(UnsupportedEncodingError, match="bag of words"):
        posenc.build(posenc.encoding("drope"), geometry(causal=False))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: built("log-n"), "did you mean 'log_n'"),
        (lambda: built("log_n", scale=0.5), "has no scale"),
        (lambda: built("constant", scale=-1.0), "scale"),
        (lambda: built("llama4", length=1), "length"),
        (lambda: built("llama4", length=8192.0), "length"),
        (lambda: built("constant", per_layer=1), "per_layer"),
        (lambda: built("llama4", shape=geometry(max_position_embeddings=1)), "length"),
        (lambda: posenc.NoPE(temperature=3), "Temperature or its spec"),
        (lambda: posenc.NoPE(temperature={"scale": 3.0}), "needs a 'kind'"),
        (lambda: posenc.NoPE(temperature={"kind": "constant", "scal": 3.0}), "did you mean 'scale'"),
        (lambda: posenc.encoding("layered", pattern=[posenc.NoPE()], temperature={"kind": "log_n"}), "each encoding"),
        (lambda: posenc.encoding("stacks", encoder=posenc.Alibi(), temperature={"kind": "log_n"}), "of a stack"),
        (lambda: posenc.encoding("drope", factor=0.5), "factor"),
        (lambda: posenc.encoding("drope", coefficient=-0.1), "coefficient"),
    ],
)
def test_what_makes_no_sense_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()
