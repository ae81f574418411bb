"""xPos against a naive twin and the sheet's values, and LeRoPE, whose frequencies are trained."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.config import from_dict
from hf_posenc.errors import ConfigError, LengthError, UnsupportedEncodingError
from tests import naive_rotary as naive


def geometry(head_dim: int = 8, **fields: Any) -> posenc.Geometry:
    plain = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    return posenc.Geometry(**{**plain, "max_position_embeddings": 64, "causal": True, **fields})


def built(name: str, shape: posenc.Geometry | None = None, **fields: Any) -> Any:
    return posenc.build(posenc.encoding(name, **fields), shape or geometry())


@pytest.mark.parametrize("center", [None, 0, 1000])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_xpos_scores_equal_the_naive_ones(partial: float, center: int | None) -> None:
    encoding = built("xpos", theta=100.0, partial_rotary_factor=partial, scale_base=100.0, center=center)
    rows, columns = [[5, 40, 700]], [[0, 5, 39, 640, 700]]
    query, key = torch.randn(1, 4, 3, 8, dtype=torch.float64), torch.randn(1, 2, 5, 8, dtype=torch.float64)
    q, k = encoding.rotate(query, torch.tensor(rows)), encoding.rotate_key(key, torch.tensor(columns))
    found = q @ k.repeat_interleave(2, dim=1).mT
    for h in range(4):
        for n, i in enumerate(rows[0]):
            for m, j in enumerate(columns[0]):
                expected = naive.xpos_score(
                    query[0, h, n].tolist(), key[0, h // 2, m].tolist(), i - j, 100.0, int(8 * partial), 100.0
                )
                assert float(found[0, h, n, m]) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert torch.equal(q[..., int(8 * partial) :], query[..., int(8 * partial) :])


def test_published_scales() -> None:
    fade = built("xpos", geometry(64)).fade
    assert [fade[0], fade[1], fade[-1]] == pytest.approx([0.2857142857, 0.3080357143, 0.9776785714], rel=1e-9)
    assert len(fade) == 32
    encoding = built("xpos", geometry(64), center=0)
    one = torch.ones(1, 1, 1, 64, dtype=torch.float64)
    plain = built("rope", geometry(64)).rotate(one, torch.tensor([[1024]]))
    ratio = encoding.rotate(one, torch.tensor([[1024]])) / plain
    assert float(ratio[..., 0]) == pytest.approx(0.08163265306, rel=1e-9)
    assert torch.allclose(encoding.rotate_key(one, torch.tensor([[1024]])) / plain, 1 / ratio)


def test_xpos_depends_on_distance_alone_and_fades() -> None:
    encoding = built("xpos", scale_base=50.0)
    query, key = torch.randn(1, 2, 1, 8, dtype=torch.float64), torch.randn(1, 2, 1, 8, dtype=torch.float64)
    near, far = (
        encoding.rotate(query, torch.tensor([[i]])) @ encoding.rotate_key(key, torch.tensor([[j]])).mT
        for i, j in ((30, 10), (530, 510))
    )
    assert torch.allclose(near, far, rtol=1e-9)
    gone = encoding.rotate(query, torch.tensor([[2000]])) @ encoding.rotate_key(key, torch.tensor([[0]])).mT
    assert float(gone.abs().max()) < 1e-3 * float(near.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_xpos_says_where_its_numbers_end(dtype: torch.dtype) -> None:
    encoding = built("xpos")
    states, last = torch.full((1, 2, 1, 8), 100.0, dtype=dtype), 32 + encoding.reach(dtype)
    assert encoding.rotate_key(states, torch.tensor([[last]])).isfinite().all()
    assert encoding.rotate(states, torch.tensor([[last]])).isfinite().all()
    for rotate in (encoding.rotate, encoding.rotate_key):
        with pytest.raises(LengthError, match="scales would overflow"):
            rotate(states, torch.tensor([[last + 1]]))
    assert encoding.max_positions() == 33 + encoding.reach(torch.float32)


def test_lerope_starts_as_plain_rope_to_the_bit() -> None:
    for scaling in (None, {"rope_type": "yarn", "factor": 4.0}):
        states, ids = torch.randn(2, 4, 3, 8), torch.tensor([[0, 700, 131072]])
        plain = built("rope", theta=500.0, scaling=scaling).rotate(states, ids)
        assert torch.equal(built("lerope", theta=500.0, scaling=scaling).rotate(states, ids), plain)


def test_lerope_turns_by_trained_frequencies() -> None:
    encoding = built("lerope", theta=100.0)
    with torch.no_grad():
        encoding.alpha.copy_(torch.tensor([0.5, -0.25, 0.0, 1.0]))
    states = torch.randn(1, 1, 2, 8, dtype=torch.float64)
    turned = encoding.rotate(states, torch.tensor([[3, 41]]))
    speeds = [f * math.exp(a) for f, a in zip(naive.frequencies(100.0, 8), (0.5, -0.25, 0.0, 1.0), strict=True)]
    for n, position in enumerate((3, 41)):
        expected = naive.rotated(states[0, 0, n].tolist(), position, speeds)
        assert turned[0, 0, n].tolist() == pytest.approx(expected, abs=1e-9)
    (turned * torch.randn_like(turned)).sum().backward()
    assert encoding.alpha.grad is not None
    assert (encoding.alpha.grad != 0).all()
    assert [name for name, _ in encoding.named_parameters()] == ["alpha"]


@pytest.mark.parametrize("name", ["xpos", "lerope"])
def test_the_spec_survives_json(name: str) -> None:
    config = posenc.encoding(name).for_model(geometry(), {"rope_theta": 7e5})
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.to_dict()["theta"] == 7e5
    assert config.rope_parameters(geometry()) is None


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UnsupportedEncodingError, match="causal models only"):
        built("xpos", geometry(causal=False))
    for name, fields, message in (
        ("xpos", {"scale_base": 0}, "scale_base"),
        ("xpos", {"center": -1}, "center"),
        ("xpos", {"centre": 1}, "did you mean 'center'"),
        ("lerope", {"theta": 1}, "theta"),
    ):
        with pytest.raises(ConfigError, match=message):
            built(name, **fields)
