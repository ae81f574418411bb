"""KERPLE against its twin, known values, and the reference's way to keep parameters positive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.errors import ConfigError
from tests import naive_additive as naive

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "additive.json").read_text())["kerple_log_r1_1_r2_1"]
KINDS = [(kernel, kept) for kernel in ("log", "power") for kept in ("softplus", "clamp")]


def built(heads: int = 3, **fields: Any) -> Any:
    shape = posenc.Geometry(
        hidden_size=12,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=16,
        causal=True,
    )
    return posenc.build(posenc.encoding("kerple", **fields), shape).double()


def bias(encoding: Any, at: list[int], to: list[int]) -> Any:
    heads = encoding.raw.shape[1]
    query, key = torch.zeros(1, heads, len(at), 4).double(), torch.zeros(1, 1, len(to), 4).double()
    return encoding.bias(query, key, posenc.Positions(query=torch.tensor([at]), key=torch.tensor([to])))


@pytest.mark.parametrize(("at", "to"), [([5, 6, 900], [0, 3, 5, 6, 7, 131072]), ([2, 3, 4], [0, 1, 2, 3, 4, 5])])
@pytest.mark.parametrize(("kernel", "kept"), KINDS)
def test_bias_equals_the_naive_one(kernel: str, kept: str, at: list[int], to: list[int]) -> None:
    encoding = built(kernel=kernel, parametrization=kept)
    r1, r2 = (r.tolist() for r in encoding.parameters_by_head(torch.float64))
    expected = torch.tensor([naive.kerple(r1, r2, kernel, at, to)], dtype=torch.float64)
    assert torch.allclose(bias(encoding, at, to), expected, rtol=1e-12, atol=0)


def test_published_values() -> None:
    encoding = built(parametrization="clamp")
    torch.nn.init.ones_(encoding.raw)
    distances = [int(d) for d in GOLDEN]
    found = bias(encoding, [0], distances)[0, 0, 0]
    assert found.tolist() == pytest.approx(list(GOLDEN.values()), rel=1e-12)
    assert bias(encoding, [0], [511])[0, 0, 0].tolist() == pytest.approx([-6.2383246250], rel=1e-10)


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_both_ways_to_stay_positive_start_alike(kernel: str) -> None:
    """As the reference: log draws r1 below 2 and r2 below 1, power the other way round, never under 0.01."""
    found = {}
    for kept in ("softplus", "clamp"):
        torch.manual_seed(0)
        found[kept] = built(500, kernel=kernel, parametrization=kept).parameters_by_head(torch.float64)
    for soft, clamped in zip(*found.values(), strict=True):
        assert torch.allclose(soft, clamped, rtol=1e-4)
    wide, narrow = (r.detach() for r in (found["clamp"] if kernel == "log" else found["clamp"][::-1]))
    assert 1.9 < wide.max() < 2
    assert 0.9 < narrow.max() < 1
    assert min(wide.min(), narrow.min()) >= 0.0099


@pytest.mark.parametrize(("kernel", "kept"), KINDS)
def test_parameters_stay_in_their_range_and_can_come_back(kernel: str, kept: str) -> None:
    encoding = built(kernel=kernel, parametrization=kept)
    for value in (-3.0, 5.0):
        torch.nn.init.constant_(encoding.raw, value)
        r1, r2 = encoding.parameters_by_head(torch.float64)
        assert (r1 > 0).all()
        assert (r2 > 0).all()
        assert kernel == "log" or (r2 <= 2).all()
        if kept == "clamp":
            assert float(r1.detach()[0]) == max(0.01, value)
        encoding.raw.grad = None
        bias(encoding, [9], [0, 4]).sum().backward()
        assert (encoding.raw.grad != 0).all()


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_the_own_position_has_a_gradient(kernel: str) -> None:
    """The slope of 0^r in r is 0 times the logarithm of 0."""
    encoding = built(kernel=kernel)
    bias(encoding, [4, 4], [4, 4]).sum().backward()
    assert torch.equal(encoding.raw.grad, torch.zeros(2, 3).double())


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"kernel": "powers"}, "did you mean 'power'"), ({"parametrization": "clam"}, "did you mean 'clamp'")],
)
def test_what_makes_no_sense_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(**fields)
