"""FoX and CABLE against their twin and ALiBi, with gates in caches and behind padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_posenc as posenc
from hf_posenc.encodings.alibi import slopes
from hf_posenc.errors import ConfigError, PosencError
from tests import naive_additive as naive

HEADS = 4
SHAPE = posenc.Geometry(
    hidden_size=6, num_attention_heads=HEADS, num_key_value_heads=2, head_dim=4, max_position_embeddings=16, causal=True
)


SIGN = {"fox": 1, "cable": -1}
"""Of the logit whose log sigmoid is the gate."""

pytestmark = pytest.mark.parametrize("name", SIGN)


def built(name: str, **fields: Any) -> Any:
    return posenc.build(posenc.encoding(name, **fields), SHAPE).double()


def bias(encoding: Any, gates: Tensor | None, at: Tensor, to: Tensor, slots: Tensor | None = None) -> Tensor:
    query, key = torch.zeros(1, HEADS, at.shape[1], 4).double(), torch.zeros(1, 2, to.shape[1], 4).double()
    found: Tensor = encoding.bias(query, key, posenc.Positions(query=at, key=to, gates=gates, slots=slots))
    return found.detach()


def test_gates_equal_the_naive_ones(name: str) -> None:
    encoding = built(name)
    torch.nn.init.normal_(encoding.weight)
    states = torch.randn(2, 5, 6).double()
    found = encoding.gate(states)
    assert found.shape == (2, HEADS, 5)
    for row, head, n in ((0, 0, 0), (1, 3, 4), (1, 2, 0)):
        logit = naive.dot(encoding.weight[head].tolist(), states[row, n].tolist()) + float(
            encoding.offset[head].detach()
        )
        assert float(found[row, head, n].detach()) == pytest.approx(
            -math.log(1 + math.exp(-SIGN[name] * logit)), abs=1e-12
        )
    assert encoding.float().gate(states.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("last", [1, 3, 8])
def test_bias_equals_the_naive_one(name: str, last: int) -> None:
    gates, to = -torch.rand(2, HEADS, 8).double(), torch.arange(100, 108)[None]
    found = bias(built(name), gates, to[:, -last:], to)
    expected = [naive.gated(row, range(8 - last, 8)) for row in gates.tolist()]
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize(
    ("slope", "offset"),
    [(0.5, 0.43275213), (0.25, 1.25869155), (1 / 256, 5.54322368), (0.00671535, 5.0), (math.log(2), 0.0)],
)
def test_known_offsets_make_it_alibi(name: str, slope: float, offset: float) -> None:
    to, states = torch.arange(9)[None], torch.randn(1, 9, 6).double()
    for encoding in (built(name, bias_init=SIGN[name] * offset), built(name, slopes=[slope] * HEADS)):
        found = bias(encoding, encoding.gate(states), to, to)
        assert torch.allclose(found[0, 0, 8], -slope * (8 - to[0]).double(), rtol=1e-6, atol=1e-7)


def test_slopes_start_as_alibi_itself(name: str) -> None:
    encoding, alibi = built(name, slopes=tuple(slopes(HEADS))), posenc.build(posenc.Alibi(), SHAPE)
    at = torch.arange(12)[None]
    states = torch.zeros(1, HEADS, 12, 4).double()
    theirs = alibi.bias(states, states, posenc.Positions(query=at, key=at))
    assert theirs is not None
    seen = torch.ones(12, 12, dtype=torch.bool).tril()
    found = bias(encoding, encoding.gate(torch.randn(1, 12, 6).double()), at, at)
    assert torch.allclose(found[..., seen], theirs[..., seen], atol=1e-6)


def test_empty_slots_behind_and_padding_before_change_nothing(name: str) -> None:
    """A static cache has slots at position 0 behind the text; left padding has its own gates before it."""
    encoding, gates = built(name), -torch.rand(1, HEADS, 6).double()
    to = torch.arange(6)[None]
    plain = bias(encoding, gates, to[:, -2:], to)
    pad, own = torch.nn.functional.pad, torch.tensor([4, 5])
    static = bias(encoding, pad(gates, (0, 5)), to[:, -2:], pad(to, (0, 5)), own)
    assert torch.equal(static[..., :6], plain)
    padded_to = torch.nn.functional.pad(to, (3, 0))
    padded = torch.nn.functional.pad(gates, (3, 0), value=-7.0)
    assert torch.allclose(bias(encoding, padded, padded_to[:, -2:], padded_to)[..., 3:], plain, atol=1e-12)
    assert torch.allclose(bias(encoding, padded, padded_to, padded_to)[..., -2:, 3:], plain, atol=1e-12)


def test_neighbours_stay_apart_in_a_long_text(name: str) -> None:
    gates = torch.full((1, HEADS, 100_000), -0.69314718056, dtype=torch.float32)
    to = torch.arange(100_000)[None]
    found = (
        built(name)
        .float()
        .bias(
            torch.zeros(1, HEADS, 1, 4),
            torch.zeros(1, 2, 100_000, 4),
            posenc.Positions(query=to[:, -1:], key=to, gates=gates),
        )
    )
    assert torch.allclose(found[0, 0, 0, -4:], -0.69314718056 * torch.tensor([3.0, 2.0, 1.0, 0.0]), atol=1e-6)


def test_a_bias_needs_gates(name: str) -> None:
    with pytest.raises(PosencError, match="without gates"):
        bias(built(name), None, torch.arange(3)[None], torch.arange(3)[None])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bias_init": float("inf")}, "must be finite"),
        ({"bias_init": "5"}, "must be a number"),
        ({"slopes": [0.5, 0.0, 1.0, 1.0]}, "positive numbers"),
        ({"slopes": "half"}, "positive numbers"),
        ({"slopes": [0.5, 0.25]}, "has 2 numbers, the model has 4 attention heads"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(name, **fields)
