"""BERT's relative_key and relative_key_query against their twin, and the weights of legacy checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.encodings.relative_key import legacy_tables
from hf_posenc.errors import CheckpointError, ConfigError
from tests import naive_additive as naive
from tests.models import SUBJECTS, TRAINED, VARIANTS, logits, tokens

BOTH = ["relative_key", "relative_key_query"]


def built(heads: int = 4, shared: int = 2, dim: int = 6, length: int = 16, causal: bool = False, **fields: Any) -> Any:
    shape = posenc.Geometry(
        hidden_size=heads * dim,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=dim,
        max_position_embeddings=length,
        causal=causal,
    )
    torch.manual_seed(0)
    encoding = posenc.build(posenc.encoding("bert_relative", **fields), shape)
    torch.nn.init.normal_(encoding.get_parameter("distance_embedding.weight"))
    return encoding


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("length", [1, 4, 512])
def test_bias_equals_the_naive_one(kind: str, length: int) -> None:
    encoding = built(position_embedding_type=kind, max_position_embeddings=length).double()
    table = encoding.distance_embedding.weight.tolist()
    at, to = [5, 6, 900], [0, 3, 5, 6, 7, 131072]
    query, key = torch.randn(2, 4, 3, 6).double(), torch.randn(2, 2, 6, 6).double()
    bias = encoding.bias(query, key, posenc.Positions(query=torch.tensor([at]), key=torch.tensor([to])))
    keys = key.tolist() if kind == "relative_key_query" else [None, None]
    expected = [naive.bert_relative(q, k, table, at, to, 6**-0.5) for q, k in zip(query.tolist(), keys, strict=True)]
    assert torch.allclose(bias, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("queries", [1, 9])
def test_a_decoder_meets_the_same_rows(kind: str, queries: int) -> None:
    """Nothing ahead of a query is seen, so half of the table is not even multiplied."""
    query, key = torch.randn(1, 4, queries, 6), torch.randn(1, 2, 9, 6)
    to = torch.arange(9)[None]
    positions = posenc.Positions(query=to[:, -queries:], key=to)
    one, other = (built(causal=c, position_embedding_type=kind).bias(query, key, positions) for c in (True, False))
    seen = positions.distance()[0] >= 0
    assert torch.allclose(one[..., seen], other[..., seen], atol=1e-5)
    assert queries == 1 or not torch.allclose(one, other, atol=1e-2)


def test_rows_by_distance() -> None:
    """Published for 512: (query, key) (0, 0), (0, 511), (511, 0) and (3, 5) take rows 511, 0, 1022 and 509."""
    encoding = built(dim=1, length=512)
    with torch.no_grad():
        encoding.distance_embedding.weight.copy_(torch.arange(1023.0)[:, None])
    for query, key, row in ((0, 0, 511), (0, 511, 0), (511, 0, 1022), (3, 5, 509)):
        positions = posenc.Positions(query=torch.tensor([[query]]), key=torch.tensor([[key]]))
        assert encoding.bias(torch.ones(1, 4, 1, 1), torch.ones(1, 2, 1, 1), positions)[0, 0].item() == row


@pytest.mark.parametrize("kind", BOTH)
def test_whole_attention_as_legacy_bert_wrote_it(kind: str) -> None:
    """Scores are the sum of the products, all of it divided by sqrt(head_dim) afterwards."""
    encoding = built(shared=4, position_embedding_type=kind)
    weight = encoding.distance_embedding.weight
    query, key = torch.randn(1, 4, 9, 6), torch.randn(1, 4, 9, 6)
    steps = torch.arange(9)
    distance = weight[steps[:, None] - steps[None] + 15]  # (l, r, d)
    theirs = query @ key.mT + torch.einsum("bhld,lrd->bhlr", query, distance)
    if kind == "relative_key_query":
        theirs = theirs + torch.einsum("bhrd,lrd->bhlr", key, distance)
    query = query * 6**-0.5
    ours = query @ key.mT + encoding.bias(query, key, posenc.Positions(query=steps[None], key=steps[None]))
    assert torch.allclose(ours, theirs / 6**0.5, atol=1e-5)


@pytest.mark.parametrize(("subject", "prefix"), [("bert", "bert."), ("bert-base", ""), ("roberta", "roberta.")])
def test_legacy_tables_load_into_a_patched_model(subject: str, prefix: str) -> None:
    model = {**SUBJECTS, **VARIANTS}[subject].fresh()
    config = posenc.encoding("bert_relative", position_embedding_type="relative_key_query", per_layer=True)
    posenc.patch(model, config, verify=False)
    tables = [torch.randn(2 * TRAINED - 1, 8) for _ in range(2)]
    name = prefix + "encoder.layer.{}.attention.self.{}.weight"
    state = {name.format(n, "distance_embedding"): table for n, table in enumerate(tables)}
    found = legacy_tables({**state, name.format(0, "query"): torch.zeros(32, 32)})
    before = logits(model, tokens(1, 9))
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert not unexpected
    assert not [name for name in missing if "distance_embedding" in name]
    for n, table in enumerate(tables):
        assert torch.equal(model.get_parameter(f"{prefix}posenc.layers.{n}.distance_embedding.weight"), table)
    assert not torch.allclose(logits(model, tokens(1, 9)), before, atol=1e-3)


def test_a_checkpoint_without_tables_is_no_legacy_one() -> None:
    with pytest.raises(CheckpointError, match="no distance_embedding"):
        legacy_tables({"bert.encoder.layer.0.attention.self.query.weight": torch.zeros(2, 2)})


def test_the_length_of_the_model_is_recorded() -> None:
    config = posenc.encoding("bert_relative").for_model(
        posenc.Geometry(
            hidden_size=8,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=4,
            max_position_embeddings=77,
            causal=True,
        )
    )
    assert config.to_dict()["max_position_embeddings"] == 77


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position_embedding_type": "relative_keys"}, "did you mean 'relative_key'"),
        ({"max_position_embeddings": 0}, "positive integer"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(**fields)
