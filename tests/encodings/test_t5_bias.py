"""T5's bias against its twin, transformers' buckets and the published rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

import hf_posenc as posenc
from hf_posenc.encodings.t5_bias import first_distances
from hf_posenc.errors import ConfigError
from tests import naive_additive as naive

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "additive.json").read_text())["t5_buckets"]


def built(causal: bool = True, **fields: Any) -> Any:
    shape = posenc.Geometry(
        hidden_size=12,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=16,
        causal=causal,
    )
    return posenc.build(posenc.encoding("t5", **fields), shape).double()


def test_published_buckets() -> None:
    distance = torch.tensor(GOLDEN["dist"])
    assert built().buckets(distance).tolist() == GOLDEN["causal"]
    assert built(causal=False).buckets(distance).tolist() == GOLDEN["bidir_past"]
    assert built(causal=False).buckets(-distance).tolist() == GOLDEN["bidir_future"]
    assert first_distances(32, 128) == GOLDEN["first_distance_causal_32_128"]
    assert first_distances(16, 128) == GOLDEN["first_distance_bidir_32_128"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("buckets", "longest"), [(32, 128), (32, 256), (64, 128), (8, 20), (16, 1000), (320, 800), (4, 128), (6, 7)]
)
def test_transformers_picks_the_same_buckets(buckets: int, longest: int, causal: bool) -> None:
    distance = torch.arange(-512, 513)
    theirs = T5Attention._relative_position_bucket(
        -distance, bidirectional=not causal, num_buckets=buckets, max_distance=longest
    )
    ours = built(causal, num_buckets=buckets, max_distance=longest).buckets(distance)
    assert torch.equal(ours, theirs)
    twin = [naive.t5_bucket(d, buckets, longest, not causal) for d in distance.tolist()]
    assert ours.tolist() == twin


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("multiplier", "factor"), [("one", 1.0), ("sqrt_head_dim", 2.0)])
def test_bias_equals_the_naive_one(causal: bool, multiplier: str, factor: float) -> None:
    encoding = built(causal, num_buckets=8, max_distance=20, multiplier=multiplier)
    torch.nn.init.normal_(encoding.weight)
    at, to = [5, 6, 900], [0, 3, 5, 6, 7, 131072]
    query, key = torch.zeros(1, 3, 3, 4, dtype=torch.float64), torch.zeros(1, 1, 6, 4, dtype=torch.float64)
    bias = encoding.bias(query, key, posenc.Positions(query=torch.tensor([at]), key=torch.tensor([to])))
    expected = naive.t5((factor * encoding.weight).tolist(), at, to, 8, 20, not causal)
    assert torch.allclose(bias, torch.tensor([expected], dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("fields", "causal", "message"),
    [
        ({"num_buckets": 1}, True, "num_buckets must be an integer >= 2"),
        ({"num_buckets": True}, True, "num_buckets"),
        ({"max_distance": 2.5}, True, "max_distance"),
        ({"max_distance": 16}, True, "must exceed half"),
        ({"multiplier": "sqrt_head_dims"}, True, "did you mean 'sqrt_head_dim'"),
        ({"num_buckets": 31}, False, "even number"),
        ({"num_buckets": 2}, False, "even number"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: Any, causal: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(causal, **fields)
