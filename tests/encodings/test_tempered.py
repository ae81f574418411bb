"""Temperatures over other encodings, and DroPE, against a naive twin and the sheet's values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.config import Encoding, from_dict
from hf_posenc.encodings.tempered import SCALES, TRAINED, Tempered
from hf_posenc.errors import ConfigError, UnknownNameError, UnsupportedEncodingError
from tests import naive_rotary as naive

HOOKS = ("embed", "remap", "rotate", "rotate_key", "bias", "distance_bias", "gate", "score", "output_bias")


def geometry(**fields: Any) -> posenc.Geometry:
    plain = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return posenc.Geometry(**{**plain, "max_position_embeddings": 16, "causal": True, **fields})


def built(kind: str, inner: Any = None, shape: posenc.Geometry | None = None, **fields: Any) -> Any:
    config = Tempered(encoding=inner or posenc.NoPE(allow_bidirectional=True), kind=kind, **fields)
    return posenc.build(config, shape or geometry())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", list(SCALES))
def test_every_kind_equals_the_naive_one(kind: str, causal: bool) -> None:
    fields = {} if kind == "log_n" else {"scale": 0.7}
    encoding = built(kind, shape=geometry(causal=causal), length=10, **fields)
    rows = [[0, 8, 9, 10, 99], [3, 3, 20, 5000, 131072]]
    factor = encoding.temperature(torch.tensor(rows))
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
    found = built(kind, scale=scale, length=length).temperature(torch.tensor([[position]]))
    assert found.item() == pytest.approx(value, rel=2e-7)


@pytest.mark.parametrize(("n", "sharp"), [(1024, 0.99965519), (65536, 0.99999711)])
def test_published_softmax(n: int, sharp: float) -> None:
    """A peak among n keys keeps its weight under scalable softmax: scores from -2 to 3, scale 0.43."""
    factor = built("ssmax_paper", scale=0.43).temperature(torch.tensor([[n - 1]]))[0, 0].item()
    scores = torch.full((n,), -2.0, dtype=torch.float64)
    scores[-1] = 3.0
    assert (scores * factor).softmax(0)[-1].item() >= sharp - 1e-8
    assert scores.softmax(0)[-1].item() < 0.13


def test_identity_starts_change_nothing() -> None:
    ids = torch.arange(4000)[None]
    for kind in ("constant", "per_head", "ssmax"):
        assert (built(kind).temperature(ids) == 1).all()
    paper = built("ssmax_paper").temperature(ids)[0, 0]
    assert paper[15].item() == pytest.approx(1.0), "a text of the trained length is left as it is"
    assert paper[255].item() == pytest.approx(2.0)


@pytest.mark.parametrize("kind", TRAINED)
def test_gradients_reach_every_trained_number(kind: str) -> None:
    encoding = built(kind).to(torch.bfloat16)
    factor = encoding.temperature(torch.arange(3, 40)[None])
    assert factor.dtype == torch.float32
    factor.square().sum().backward()
    names = {"per_head": ["scale"], "ssmax": ["scale", "offset"], "ssmax_paper": ["scale"]}[kind]
    assert [name for name, _ in encoding.named_parameters()] == names
    for parameter in encoding.parameters():
        assert parameter.shape == (4,)
        assert (parameter.grad != 0).all()


@pytest.mark.parametrize(
    "inner",
    [
        posenc.RoPE(),
        posenc.Alibi(),
        posenc.NoPE(),
        posenc.Sinusoidal(),
        posenc.Learned(),
        posenc.encoding("rerope", window=2),
        posenc.encoding("xpos"),
    ],
    ids=lambda config: config.name,
)
def test_every_other_hook_is_that_of_the_encoding_inside(inner: posenc.EncodingConfig) -> None:
    torch.manual_seed(0)
    tempered = built("log_n", inner)
    torch.manual_seed(0)
    alone = posenc.build(inner, geometry())
    states, keys, ids = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.arange(6)[None]
    positions = posenc.Positions(query=ids, key=ids)
    arguments = {
        "embed": (ids,),
        "remap": (ids,),
        "gate": (torch.randn(1, 6, 32),),
        "rotate": (states, ids),
        "rotate_key": (keys, ids),
        "bias": (states, keys, positions),
        "distance_bias": (ids[0].float(),),
        "score": (states, keys, positions),
        "output_bias": (torch.rand(1, 4, 6, 6), positions),
    }
    for hook in HOOKS:
        assert tempered.overrides(hook) == alone.overrides(hook)
        found, expected = (getattr(encoding, hook)(*arguments[hook]) for encoding in (tempered, alone))
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)
    assert tempered.overrides("temperature")
    assert tempered.max_positions() == alone.max_positions()
    table = torch.randn(16, 32)
    for encoding in (tempered, alone):
        encoding.adopt(table)
    mine, its = tempered.embed(ids), alone.embed(ids)
    assert mine is its is None or torch.equal(mine, its)


class Marked(Encoding):
    """Every hook answers with what tells it apart."""

    def __getattribute__(self, name: str) -> Any:
        return (lambda *_: name) if name in HOOKS else super().__getattribute__(name)


def test_all_hooks_are_handed_on() -> None:
    """A hook that the contract gains has to be handed on too."""
    encoding, anything = built("constant"), torch.zeros(1)
    encoding.inner = Marked()
    for hook, arguments in {
        **dict.fromkeys(HOOKS, 2),
        "embed": 1,
        "remap": 1,
        "gate": 1,
        "distance_bias": 1,
        "bias": 3,
        "score": 3,
    }.items():
        assert getattr(encoding, hook)(*[anything] * arguments) == hook
    known = {*HOOKS, "temperature", "adopt", "at_length", "max_positions", "overrides"}
    contract = {name for name in vars(Encoding) if not name.startswith("_") and callable(getattr(Encoding, name))}
    assert contract == known


def test_a_growing_rotation_stays_tempered() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    encoding = built("ssmax", posenc.RoPE(scaling=scaling))
    alone = posenc.build(posenc.RoPE(scaling=scaling), geometry())
    assert encoding.rotation_grows_after == alone.rotation_grows_after == 16
    static, states, ids = encoding.at_length(50), torch.randn(1, 4, 2, 8), torch.tensor([[3, 49]])
    assert static.rotation_grows_after is None
    assert static.scale is encoding.scale
    assert torch.equal(static.rotate(states, ids), alone.at_length(50).rotate(states, ids))
    assert encoding.rotation_grows_after == 16, "the growing one is left as it was"
    assert built("ssmax").at_length(50).rotation_grows_after is None


def test_temperatures_multiply() -> None:
    inside = Tempered(encoding=posenc.NoPE(), kind="constant", scale=3.0)
    assert built("constant", inside, scale=0.5).temperature(torch.arange(3)[None]).tolist() == [[[1.5] * 3]]
    drope = posenc.encoding("drope", factor=4.0, coefficient=0.412)
    found = built("constant", drope, scale=2.0).temperature(torch.arange(2)[None])
    assert found.tolist() == [[pytest.approx([2 * (1 + 0.412 * math.log(4))] * 2)]]


def test_the_spec_survives_json_and_is_filled_in_from_the_model() -> None:
    config = Tempered(encoding={"name": "rope"}, kind="ssmax_paper")
    filled = config.for_model(geometry(max_position_embeddings=128), {"rope_theta": 5e5})
    plain = filled.to_dict()
    assert plain["encoding"]["theta"] == 5e5
    assert (plain["length"], plain["scale"]) == (128, pytest.approx(1 / math.log(128)))
    assert from_dict(json.loads(json.dumps(plain))) == filled
    assert filled.rope_parameters(geometry()) is None, "transformers has no tempered rotation"
    assert Tempered(encoding={"name": "lerope", "per_layer": True}, kind="constant").per_layer


def test_drope_is_nothing_but_a_temperature() -> None:
    encoding = posenc.build(posenc.encoding("drope", factor=8.0, coefficient=0.103), geometry())
    assert not any(encoding.overrides(hook) for hook in HOOKS)
    factor = encoding.temperature(torch.arange(3)[None])
    assert factor is not None
    assert factor.tolist() == [[pytest.approx([1 + 0.103 * math.log(8)] * 3)]]
    neutral = posenc.build(posenc.encoding("drope"), geometry()).temperature(torch.arange(3)[None])
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
        (lambda: built("llama4", shape=geometry(max_position_embeddings=1)), "length"),
        (lambda: built("constant", 3), "encoding config or its spec"),
        (lambda: built("constant", {"theta": 3.0}), "needs a 'name'"),
        (lambda: built("constant", {"name": "rope", "thetta": 3.0}), "did you mean 'theta'"),
        (lambda: posenc.encoding("drope", factor=0.5), "factor"),
        (lambda: posenc.encoding("drope", coefficient=-0.1), "coefficient"),
    ],
)
def test_what_makes_no_sense_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_what_the_inside_refuses_is_refused() -> None:
    with pytest.raises(UnsupportedEncodingError, match="bag of words"):
        built("constant", posenc.NoPE(), geometry(causal=False))
    with pytest.raises(UnknownNameError, match="did you mean 'alibi'"):
        built("constant", {"name": "alibbi"})
