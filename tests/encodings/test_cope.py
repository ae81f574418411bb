"""CoPE against its twin and known values, with gates on scaled and on unscaled scores, in caches and behind padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hf_posenc as posenc
from hf_posenc.errors import ConfigError
from tests import naive_additive as naive


def built(**fields: Any) -> Any:
    shape = posenc.Geometry(
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=16,
        causal=True,
    )
    torch.manual_seed(0)
    encoding = posenc.build(posenc.encoding("cope", **fields), shape).double()
    torch.nn.init.normal_(encoding.get_parameter("weight"))
    return encoding


def bias(encoding: Any, query: Tensor, key: Tensor, at: Tensor, to: Tensor, slots: Tensor | None = None) -> Tensor:
    found: Tensor = encoding.bias(query, key, posenc.Positions(query=at, key=to, slots=slots))
    return found.detach()


@pytest.mark.parametrize("gates", ["scaled", "unscaled"])
@pytest.mark.parametrize("rows", [2, 4, 64])
@pytest.mark.parametrize("last", [1, 3, 9])
def test_bias_equals_the_naive_one(gates: str, rows: int, last: int) -> None:
    encoding = built(gates=gates, max_positions_counted=rows)
    query, key, to = torch.randn(2, 4, last, 4).double(), torch.randn(2, 2, 9, 4).double(), torch.arange(7, 16)[None]
    found = bias(encoding, query, key, to[:, -last:], to)
    slots = range(9 - last, 9)
    expected = [
        naive.cope(q, k, encoding.weight.tolist(), slots, gates == "unscaled")
        for q, k in zip(query.tolist(), key.tolist(), strict=True)
    ]
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_scores_of_zero_count_by_halves() -> None:
    """Published: with no score at all, the fourth query counts 2, 1.5, 1 and 0.5 to the four keys that it sees."""
    encoding = built()
    with torch.no_grad():
        encoding.weight.zero_()[:, 0] = torch.arange(64)
    query, key, to = torch.zeros(1, 4, 4, 4).double(), torch.zeros(1, 2, 4, 4).double(), torch.arange(4)[None]
    query[..., 0] = 0.5  # 1 before the division by sqrt(4)
    assert bias(encoding, query, key, to, to)[0, 0, 3].tolist() == [2.0, 1.5, 1.0, 0.5]


def test_gates_on_scaled_or_unscaled_scores_differ() -> None:
    states, to = torch.randn(1, 4, 9, 4).double(), torch.arange(9)[None]
    one, other = (bias(built(gates=g), states, states[:, :2], to, to) for g in ("scaled", "unscaled"))
    assert not torch.allclose(one, other, atol=1e-2)


def test_empty_slots_behind_and_padding_before_count_nothing() -> None:
    """A static cache has slots at position 0 behind the text; left padding has keys before it."""
    encoding, to = built(), torch.arange(6)[None]
    query, key = torch.randn(1, 4, 2, 4).double(), torch.randn(1, 2, 6, 4).double()
    plain = bias(encoding, query, key, to[:, -2:], to)
    pad = torch.nn.functional.pad
    own = torch.tensor([4, 5])
    static = bias(encoding, query, pad(key, (0, 0, 0, 5), value=3.0), to[:, -2:], pad(to, (0, 5)), own)
    assert torch.equal(static[..., :6], plain)
    padded = bias(encoding, query, pad(key, (0, 0, 3, 0), value=3.0), to[:, -2:], pad(to, (3, 0)))
    assert torch.equal(padded[..., 3:], plain)


def test_padding_behind_counts_nothing() -> None:
    """Padding has the position of the last token; where all tokens come at once, their order says what is behind."""
    encoding, to = built(), torch.tensor([[0, 1, 2, 3, 3, 3]])
    query, key = torch.randn(1, 4, 6, 4).double(), torch.randn(1, 2, 6, 4).double()
    found = bias(encoding, query, key, to, to)[..., :4, :4]
    assert torch.allclose(found, bias(encoding, query[:, :, :4], key[:, :, :4], to[:, :4], to[:, :4]), atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"gates": "scale"}, "did you mean 'scaled'"), ({"max_positions_counted": 1}, "integer >= 2")],
)
def test_what_makes_no_sense_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(**fields)
