"""Transformer-XL's positions against their twin and transformers' XLNet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import XLNetConfig, XLNetModel
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

import hf_posenc as posenc
from hf_posenc.errors import ConfigError
from tests import naive_additive as naive


def built(causal: bool, shared: int = 2, width: int = 10, **fields: Any) -> Any:
    shape = posenc.Geometry(
        hidden_size=width,
        num_attention_heads=4,
        num_key_value_heads=shared,
        head_dim=6,
        max_position_embeddings=16,
        causal=causal,
    )
    torch.manual_seed(0)
    encoding = posenc.build(posenc.encoding("transformer_xl", **fields), shape).double()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    return encoding


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("at", "to"), [([5, 6, 900], [0, 3, 5, 6, 7, 131072]), ([2, 3, 4], [0, 1, 2, 3, 4, 5])])
def test_bias_equals_the_naive_one(causal: bool, at: list[int], to: list[int]) -> None:
    encoding = built(causal)
    query, key = torch.randn(2, 4, 3, 6).double(), torch.randn(2, 2, 6, 6).double()
    bias = encoding.bias(query, key, posenc.Positions(query=torch.tensor([at]), key=torch.tensor([to])))
    u, v, w = (p.tolist() for p in (encoding.content_bias, encoding.position_bias, encoding.projection))
    rows = zip(query.tolist(), key.tolist(), strict=True)
    expected = torch.tensor([naive.transformer_xl(q, k, u, v, w, at, to) for q, k in rows], dtype=torch.float64)
    seen = (torch.tensor(at)[:, None] >= torch.tensor(to)) | (not causal)
    assert torch.allclose(bias[:, :, seen], expected[:, :, seen], atol=1e-9)


@pytest.mark.parametrize("clamp", [None, 4])
def test_xlnet_attends_the_same(clamp: int | None) -> None:
    config = XLNetConfig(
        vocab_size=9, d_model=24, n_layer=1, n_head=4, d_inner=8, dropout=0.0, clamp_len=-1 if clamp is None else clamp
    )
    theirs = XLNetRelativeAttention(config).double().eval()
    encoding = built(causal=False, shared=4, width=24, clamp_length=clamp)
    with torch.no_grad():
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter)
        encoding.content_bias.copy_(theirs.r_w_bias)
        encoding.position_bias.copy_(theirs.r_r_bias)
        encoding.projection.copy_(theirs.r.permute(1, 2, 0))
    waves = XLNetModel(config).relative_positional_encoding(qlen=7, klen=7, bsz=2).double()
    query, key = torch.randn(2, 4, 7, 6).double(), torch.randn(2, 4, 7, 6).double()
    q, k = (states.permute(2, 0, 1, 3) for states in (query, key))
    relative = torch.einsum("ibh,hnd->ibnd", waves, theirs.r)
    weights = theirs.rel_attn_core(q, k, k, relative, output_attentions=True)[1].permute(2, 3, 0, 1)
    query, steps = query * 6**-0.5, torch.arange(7)[None]
    bias = encoding.bias(query, key, posenc.Positions(query=steps, key=steps))
    assert torch.allclose((query @ key.mT + bias).softmax(-1), weights, atol=1e-5)


def test_positions_with_gaps_cost_no_row_for_every_number_between() -> None:
    encoding = built(causal=True)
    ids = torch.tensor([[0, 10**9, 2 * 10**9]])
    states = torch.randn(1, 4, 3, 6).double()
    assert encoding.bias(states, states[:, :2], posenc.Positions(query=ids, key=ids)).isfinite().all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"clamp_length": 0}, "clamp_length must be"), ({"width": 7}, "even hidden_size")],
)
def test_what_makes_no_sense_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(True, **fields)
