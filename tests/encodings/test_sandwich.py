"""Sandwich against its twin and known values, with both indices of the first pair."""

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
    "sandwich_d128_sum_i_from1"
]


def bias(at: list[int], to: list[int], heads: int = 8, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    shape = posenc.Geometry(
        hidden_size=64,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=16,
        causal=True,
    )
    query, key = torch.zeros(1, heads, len(at), 8, dtype=dtype), torch.zeros(1, 1, len(to), 8, dtype=dtype)
    positions = posenc.Positions(query=torch.tensor([at]), key=torch.tensor([to]))
    return posenc.build(posenc.encoding("sandwich", **fields), shape).bias(query, key, positions)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("width", [2, 16, 128])
def test_bias_equals_the_naive_one(first: int, width: int) -> None:
    at, to = [5, 6, 900], [0, 3, 5, 6, 7, 131072]
    expected = torch.tensor([naive.sandwich(8, width, first, at, to)], dtype=torch.float64)
    assert torch.allclose(bias(at, to, width=width, first_index=first), expected, atol=1e-9, rtol=0)
    single = bias(at, to, dtype=torch.float32, width=width, first_index=first)
    assert torch.allclose(single.double(), expected, atol=1e-5, rtol=1e-6)


def test_published_values() -> None:
    distances = [int(d) for d in GOLDEN]
    found = bias([0], distances)[0, :, 0]
    assert (found[0] + 64).tolist() == pytest.approx(list(GOLDEN.values()), abs=1e-9)
    assert float(bias([1], [0])[0, 0]) == pytest.approx(-1.44661851, abs=1e-8)
    assert float(bias([512], [0])[0, 7]) == pytest.approx(-5.99516465, abs=1e-8)


def test_the_index_of_the_first_pair_matters() -> None:
    assert not torch.allclose(bias([9], [0, 8], first_index=0), bias([9], [0, 8], first_index=1), atol=1e-2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"width": 7}, "even integer"), ({"width": 0}, "even integer"), ({"first_index": 2}, "must be 0 or 1")],
)
def test_what_makes_no_sense_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bias([0], [0], **fields)
