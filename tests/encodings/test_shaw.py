"""Shaw's relative keys and values against their twins, and the keys against transformers' wav2vec2-bert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Wav2Vec2BertConfig
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

import hf_posenc as posenc
from hf_posenc.errors import BackendError, ConfigError
from hf_posenc.positions import Positions
from tests import naive_additive as naive
from tests.models import SUBJECTS, assert_same, logits, tokens

BOTH = posenc.encoding("shaw", left=5, right=3, relative="keys_and_values")


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
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
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


@pytest.mark.parametrize(("left", "right"), [(16, 16), (3, 1), (0, 0)])
def test_output_equals_the_naive_one(left: int, right: int) -> None:
    encoding = built(left=left, right=right, relative="keys_and_values").double()
    at, to = [5, 6, 900], [0, 3, 5, 6, 7, 131072]
    weights = torch.randn(2, 4, 3, 6).double().softmax(-1).requires_grad_()
    found = encoding.output_bias(weights, Positions(query=torch.tensor([at]), key=torch.tensor([to])))
    table = encoding.values.tolist()
    expected = torch.tensor([naive.shaw_values(row, table, at, to, left, right) for row in weights.tolist()])
    assert torch.allclose(found, expected.double(), atol=1e-6)
    upstream = torch.randn_like(found)
    (found * upstream).sum().backward()
    index = [[min(max(j - i, -left), right) + left for j in to] for i in at]
    rows = torch.tensor(table).double()[torch.tensor(index)]
    assert torch.allclose(weights.grad, torch.einsum("bhqd,qkd->bhqk", upstream, rows), atol=1e-6)
    assert encoding.values.grad.any()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("subject", ["gpt2", "llama", "bert"])
def test_a_model_attends_as_the_equations_say(subject: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stock model without positions, whose own attention function was replaced by equations 3 and 5."""
    model = posenc.patch(SUBJECTS[subject].fresh(attn_implementation=backend), BOTH, verify=False)
    torch.manual_seed(3)
    encoding: Any = next(module for name, module in model.named_modules() if name.endswith("posenc"))
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ids = tokens(2, 17)
    bare = posenc.NoPE(allow_bidirectional=True)
    stock = posenc.patch(SUBJECTS[subject].fresh(attn_implementation="eager"), bare, verify=False)
    index = (torch.arange(17)[None] - torch.arange(17)[:, None]).clamp(-5, 3) + 5
    layers = iter(encoding.layers)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        layer = next(layers)
        keys, values = (table.detach()[index] for table in (layer.weight, layer.values))
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
        scores = torch.einsum("bhqd,bhqkd->bhqk", query, key[:, :, None] + keys) * query.shape[-1] ** -0.5
        if subject != "bert":
            scores = scores.masked_fill(torch.ones(17, 17, dtype=torch.bool).triu(1), -torch.inf)
        weights = scores.softmax(-1)
        return torch.einsum("bhqk,bhqkd->bqhd", weights, value[:, :, None] + values), weights

    owner = f"transformers.models.{subject}.modeling_{subject}.eager_attention_forward"
    found = logits(model, ids)
    bare_logits = logits(stock, ids)
    monkeypatch.setattr(owner, attention)
    assert_same(found, logits(stock, ids))
    assert (found - bare_logits).abs().max() > 1e-2


@pytest.mark.parametrize("subject", ["gpt2", "llama", "bert"])
def test_relative_values_start_by_changing_no_logit(subject: str) -> None:
    bare = posenc.NoPE(allow_bidirectional=True)
    fresh = [SUBJECTS[subject].fresh(attn_implementation="eager") for _ in range(2)]
    found, expected = (posenc.patch(m, config, verify=False) for m, config in zip(fresh, (BOTH, bare), strict=True))
    assert torch.equal(logits(found, tokens(2, 40)), logits(expected, tokens(2, 40)))


def test_maps_are_the_weights_that_values_were_mixed_by() -> None:
    model = posenc.patch(SUBJECTS["llama"].fresh(attn_implementation="eager"), BOTH, verify=False)
    maps = model(input_ids=tokens(1, 9), output_attentions=True).attentions
    assert all(torch.allclose(layer.sum(-1), torch.ones(1, 4, 9), atol=1e-5) for layer in maps)
    with pytest.raises(BackendError, match="no way to carry"):
        model.set_attn_implementation("flex_attention")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"left": -1}, "left must be an integer >= 0"),
        ({"right": 2.0}, "right must be"),
        ({"relative": "key"}, "did you mean 'keys'"),
        ({"per_layer": 1}, "per_layer must be True or False"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(**fields)
