"""Shaw's relative keys against their twin and transformers' wav2vec2-bert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Wav2Vec2BertConfig
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

import hf_posenc as posenc
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from tests import naive_additive as naive


def built(heads: int = 4, shared: int = 2, dim: int = 6, **fields: Any) -> Any:
    shape = posenc.Geometry(
        hidden_size=heads * dim,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=dim,
        max_position_embeddings=16,
        causal=False,
    )
    torch.manual_seed(0)
    encoding = posenc.build(posenc.encoding("shaw", **fields), shape)
    torch.nn.init.normal_(encoding.get_parameter("weight"))
    return encoding


@pytest.mark.parametrize(("left", "right"), [(16, 16), (3, 1), (0, 0)])
def test_bias_equals_the_naive_one(left: int, right: int) -> None:
    encoding = built(left=left, right=right).double()
    at, to = [5, 6, 900], [0, 3, 5, 6, 7, 131072]
    query, key = torch.randn(2, 4, 3, 6).double(), torch.randn(2, 2, 6, 6).double()
    bias = encoding.bias(query, key, posenc.Positions(query=torch.tensor([at]), key=torch.tensor([to])))
    expected = [naive.shaw(row, encoding.weight.tolist(), at, to, left, right) for row in query.tolist()]
    assert torch.allclose(bias, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_rows_by_distance() -> None:
    """Published for 16: key minus query position -100, -1, 0, 1 and 100 take rows 0, 15, 16, 17 and 32."""
    encoding = built(dim=1)
    with torch.no_grad():
        encoding.weight.copy_(torch.arange(33.0)[:, None])
    keys = torch.tensor([[0, 99, 100, 101, 200]])
    ones = torch.ones(1, 4, 1, 1)
    bias = encoding.bias(ones, ones[:, :2], posenc.Positions(query=torch.tensor([[100]]), key=keys))
    assert bias[0, 0, 0].tolist() == [0, 15, 16, 17, 32]


def test_transformers_attends_the_same() -> None:
    config = Wav2Vec2BertConfig(
        hidden_size=24,
        num_attention_heads=4,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=5,
        right_max_position_embeddings=2,
        attention_dropout=0.0,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = Wav2Vec2BertSelfAttention(config).eval()
    encoding = built(shared=4, left=5, right=2)
    with torch.no_grad():
        theirs.distance_embedding.weight.mul_(5)
        encoding.weight.copy_(theirs.distance_embedding.weight)
    states = torch.randn(2, 11, 24)
    projections = (theirs.linear_q, theirs.linear_k, theirs.linear_v)
    query, key, value = (linear(states).unflatten(-1, (4, 6)).transpose(1, 2) for linear in projections)
    query = query * 6**-0.5
    steps = torch.arange(11)[None]
    scores = query @ key.mT + encoding.bias(query, key, posenc.Positions(query=steps, key=steps))
    ours = theirs.linear_out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
    assert torch.allclose(ours, theirs(states)[0], atol=1e-6)
    assert not torch.allclose((query @ key.mT).softmax(-1), scores.softmax(-1), atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"left": -1}, ConfigError, "left must be an integer >= 0"),
        ({"right": 2.0}, ConfigError, "right must be"),
        ({"values": "both"}, ConfigError, "values must be True or False"),
        ({"values": True}, UnsupportedEncodingError, "relative values"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        built(**fields)
