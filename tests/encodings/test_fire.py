"""FIRE against its twin, known values, and both sides of the two questions that paper and code answer differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.errors import ConfigError
from tests import naive_additive as naive

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "additive.json").read_text())[
    "fire_psi_c0.1_L256_eps1e-6"
]


def built(length: int = 512, heads: int = 3, **fields: Any) -> Any:
    shape = posenc.Geometry(
        hidden_size=12,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=length,
        causal=True,
    )
    torch.manual_seed(0)
    encoding = posenc.build(posenc.encoding("fire", **fields), shape).double()
    torch.nn.init.constant_(encoding.get_parameter("c"), 0.1)  # as exactly as float64 has it
    for parameter in (*encoding.get_submodule("hidden").parameters(), *encoding.get_submodule("output").parameters()):
        torch.nn.init.normal_(parameter)
    return encoding


def bias(encoding: Any, at: list[int], to: list[int]) -> torch.Tensor:
    heads = encoding.output.out_features
    query, key = torch.zeros(1, heads, len(at), 4).double(), torch.zeros(1, 1, len(to), 4).double()
    found: torch.Tensor = encoding.bias(query, key, posenc.Positions(query=torch.tensor([at]), key=torch.tensor([to])))
    return found[0].detach()


def argument(encoding: Any, query: int, distance: int) -> float:
    """What the network is asked: what it answers where it answers what it was asked."""
    with torch.no_grad():
        for layer in (encoding.hidden, encoding.output):
            layer.weight.fill_(1.0)
            layer.bias.zero_()
    return float(bias(encoding, [query], [query - distance])[0])


@pytest.mark.parametrize(("threshold", "limit"), [("half_length", 6), ("length", 12)])
@pytest.mark.parametrize(("count", "first"), [("from_zero", 0), ("from_one", 1)])
def test_bias_equals_the_naive_one(threshold: str, limit: int, count: str, first: int) -> None:
    encoding = built(12, threshold=threshold, count=count)
    with torch.no_grad():
        encoding.c.fill_(0.7)
        encoding.length_multiplier.fill_(1.5)
    hidden = encoding.hidden.weight[:, 0].tolist(), encoding.hidden.bias.tolist()
    output = encoding.output.weight.tolist(), encoding.output.bias.tolist()
    at, to = [0, 5, 8, 19, 900], [0, 3, 5, 7, 8, 19, 900]
    found = bias(encoding, at, to)
    for row, i in enumerate(at):
        for column, j in enumerate(to):
            x = naive.fire_argument(i + first, i - j, 0.7, 1.5 * limit)
            expected = naive.network(x, hidden, output)
            assert found[:, row, column].tolist() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("pair", list(GOLDEN))
def test_published_arguments(pair: str) -> None:
    query, distance = (int(number) for number in pair.split(","))
    assert argument(built(width=1), query, distance) == pytest.approx(GOLDEN[pair], abs=1e-12)


def test_threshold_and_count_matter() -> None:
    kinds = [{}, {"threshold": "length"}, {"count": "from_one"}]
    assert len({argument(built(width=1, **kind), 300, 9) for kind in kinds}) == 3
    assert argument(built(width=1, threshold="length"), 300, 9) == argument(built(1024, width=1), 300, 9)
    assert argument(built(width=1, original_max_position_embeddings=64), 40, 9) == argument(built(64, width=1), 40, 9)


@pytest.mark.parametrize(
    ("weights", "offsets"),
    [
        ([0.0, 0.0, 0.0], [1.0, -1.0, 0.0]),
        ([1e-30, -1e-30, 1e-300], [1e9, 1e9, -1.0]),
        ([2.0, 2.0, -2.0], [-1.0, -1.0, 1.0]),
        ([1.0, -1.0, 3.0], [0.0, 0.0, -0.3]),
        ([-1.0, -2.0, -3.0], [-1.0, 0.5, 9.0]),
    ],
)
def test_the_units_are_the_network(weights: list[float], offsets: list[float]) -> None:
    """Kinks that coincide, that no unit has, at the first argument, outside of all arguments: nothing changes."""
    encoding = built(width=3)
    with torch.no_grad():
        encoding.hidden.weight.copy_(torch.tensor(weights).double()[:, None])
        encoding.hidden.bias.copy_(torch.tensor(offsets).double())
    x = torch.linspace(0, 1.2, 41).double()
    slopes, heights, outputs = encoding.units(x.max())
    assert torch.allclose(
        outputs @ (slopes[:, None] * x + heights[:, None]).relu(),
        encoding.output(encoding.hidden(x[:, None]).relu()).T,
        atol=1e-12,
    )
    assert len(slopes) == 2 + sum(0 < -b < 1.2 * w or 1.2 * w < -b < 0 for w, b in zip(weights, offsets, strict=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threshold": "half_lenght"}, "did you mean 'half_length'"),
        ({"count": "from_two"}, "did you mean 'from_"),
        ({"width": 0}, "width must be an integer >= 1"),
        ({"original_max_position_embeddings": 1}, "must be an integer >= 2"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(**fields)
