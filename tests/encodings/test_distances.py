"""Encodings that change the distances which a rotary model sees: against twins by distance, and published rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_posenc as posenc
from hf_posenc.config import from_dict
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from tests import naive_rotary as naive

Distance = Callable[[int, int], float | None]
CASES: dict[str, tuple[str, dict[str, Any], Distance]] = {
    "self_extend": ("self_extend", {"group": 2, "window": 4}, lambda i, j: naive.self_extend(i, j, 2, 4)),
    "self_extend-floor": (
        "self_extend",
        {"group": 3, "window": 7, "shift": "floor"},
        lambda i, j: naive.self_extend(i, j, 3, 7),
    ),
    "self_extend-fractional": (
        "self_extend",
        {"group": 3, "window": 7},
        lambda i, j: naive.self_extend(i, j, 3, 7, fractional=True),
    ),
    "rerope": ("rerope", {"window": 5}, lambda i, j: naive.rerope(i, j, 5)),
    "rerope-leaky": ("rerope", {"window": 5, "leak": 3}, lambda i, j: naive.rerope(i, j, 5, 3)),
    "dual_chunk": ("dual_chunk", {"chunk": 10, "local": 4}, lambda i, j: naive.dual_chunk(i, j, 10, 4, 10)),
    "dual_chunk-paper": (
        "dual_chunk",
        {"chunk": 10, "local": 4, "clamp": "chunk-1"},
        lambda i, j: naive.dual_chunk(i, j, 10, 4, 9),
    ),
    "string": ("string", {"shift": 6, "local": 2}, lambda i, j: naive.string_positions(i, j, 6, 2)),
    "lm_infinite": ("lm_infinite", {"first": 3, "window": 6}, lambda i, j: naive.lm_infinite(i, j, 3, 6)),
    "sinks": ("sinks", {"first": 4, "recent": 4}, lambda i, j: naive.sinks(i, j, 4, 4)),
}
CAUSAL_ONLY = ("dual_chunk", "lm_infinite", "sinks")


def geometry(**fields: Any) -> posenc.Geometry:
    plain = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return posenc.Geometry(**{**plain, "max_position_embeddings": 16, "causal": True, **fields})


def scored(encoding: Any, query: Tensor, key: Tensor, rows: list[list[int]], columns: list[list[int]]) -> Tensor:
    scores = encoding.score(query, key, posenc.Positions(query=torch.tensor(rows), key=torch.tensor(columns)))
    assert scores.shape == (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return scores  # type: ignore[no-any-return]


def states(queries: int, keys: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8))
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)  # type: ignore[return-value]


ROWS = [[9, 14, 37, 38], [3, 3, 20, 90]]
COLUMNS = [[0, 2, 3, 7, 9, 10, 14, 30, 37, 38], [0, 1, 2, 3, 3, 14, 17, 20, 84, 90]]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_scores_are_those_of_the_distances(case: str, partial: float) -> None:
    name, fields, distance = CASES[case]
    encoding = posenc.build(posenc.encoding(name, theta=100.0, partial_rotary_factor=partial, **fields), geometry())
    query, key = states(4, 10)
    found = scored(encoding, query, key, ROWS, COLUMNS)
    speeds = naive.frequencies(100.0, int(8 * partial))
    for b in range(2):
        for h in range(4):
            expected = naive.scores_by_distance(
                query[b, h].tolist(), key[b, h // 2].tolist(), ROWS[b], COLUMNS[b], speeds, distance
            )
            for q, i in enumerate(ROWS[b]):
                for k, j in enumerate(COLUMNS[b]):
                    if j > i:
                        continue  # for the mask to hide
                    value, here = expected[q][k], float(found[b, h, q, k])
                    assert here == pytest.approx(value, abs=1e-9) if value is not None else here <= -1e29
    assert found.isfinite().all()
    assert torch.allclose(
        scored(encoding, *(x.float() for x in (query, key)), ROWS, COLUMNS).double(), found, atol=1e-5
    )


@pytest.mark.parametrize("case", list(CASES))
def test_short_texts_are_seen_as_before(case: str) -> None:
    name, fields, _ = CASES[case]
    encoding = posenc.build(posenc.encoding(name, **fields), geometry())
    query, key = states(4, 4)
    rows = [[0, 1, 2, 3]] * 2
    rope = posenc.build(posenc.RoPE(), geometry())
    turned, keys = (rope.rotate(x, torch.tensor(rows)) for x in (query, key))
    assert torch.equal(scored(encoding, query, key, rows, rows), turned @ keys.repeat_interleave(2, dim=1).mT)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] not in CAUSAL_ONLY])
def test_an_encoder_sees_mirrored_distances(case: str) -> None:
    """A score depends on the signed distance alone: at -d it is that of swapped states at d."""
    name, fields, distance = CASES[case]
    encoding = posenc.build(posenc.encoding(name, theta=100.0, **fields), geometry(causal=False))
    query, key = states(1, 1, dtype=torch.float64)
    key = key.repeat(1, 2, 1, 1)
    speeds = naive.frequencies(100.0, 8)
    for i, j in ((0, 3), (2, 30), (9, 14), (40, 1), (2, 9), (3, 8)):
        found = scored(encoding, query, key, [[i]] * 2, [[j]] * 2)
        mirrored = scored(encoding, key, query, [[j]] * 2, [[i]] * 2)
        assert torch.allclose(found, mirrored, atol=1e-9)
        signed = distance(i, j) if i >= j else -(distance(j, i) or 0)
        expected = naive.scores_by_distance(
            query[0, 0].tolist(), key[0, 0].tolist(), [0], [0], speeds, lambda *_, seen=signed: seen
        )
        assert float(found[0, 0, 0, 0]) == pytest.approx(expected[0][0], abs=1e-9)


@pytest.mark.parametrize("name", CAUSAL_ONLY)
def test_encoders_are_refused_where_there_is_no_form_for_them(name: str) -> None:
    with pytest.raises(UnsupportedEncodingError, match="causal models only"):
        posenc.build(posenc.encoding(name), geometry(causal=False))


@pytest.mark.parametrize(
    ("fields", "neutral"),
    [
        (("self_extend", {"group": 1, "window": 4}), True),
        (("rerope", {"window": 4, "leak": 1}), True),
        (("string", {"shift": 4, "local": 4}), True),
        (("string", {"shift": 4, "local": 3}), False),
        (("rerope", {"window": 4, "leak": 2}), False),
        (("lm_infinite", {"window": 100}), True),
        (("sinks", {"recent": 100}), True),
    ],
)
def test_neutral_fields_are_plain_rope(fields: tuple[str, dict[str, Any]], neutral: bool) -> None:
    encoding, rope = (
        posenc.build(posenc.encoding(fields[0], **fields[1]), geometry()),
        posenc.build(posenc.RoPE(), geometry()),
    )
    query, key = states(4, 10)
    turned = rope.rotate(query, torch.tensor(ROWS)) @ rope.rotate(key, torch.tensor(COLUMNS)).repeat_interleave(2, 1).mT
    seen = (torch.tensor(ROWS)[:, :, None] >= torch.tensor(COLUMNS)[:, None]).unsqueeze(1)
    difference = ((scored(encoding, query, key, ROWS, COLUMNS) - turned) * seen).abs().max()
    assert (float(difference) < 1e-12) == neutral


def row_of(distance: Distance, last: int) -> list[float | None]:
    return [distance(last, j) for j in range(last + 1)]


def test_published_rows() -> None:
    """The twins themselves, on the sheet's known values."""
    assert row_of(CASES["self_extend"][2], 9)[::-1] == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6]
    assert [naive.rerope(d, 0, 512) for d in (511, 512, 4096)] == [511, 512, 512]
    assert [naive.rerope(d, 0, 512, 16) for d in (528, 4096, 8192)] == [513, 736, 992]
    assert row_of(CASES["dual_chunk"][2], 15) == [10, 9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert row_of(CASES["dual_chunk-paper"][2], 15)[:8] == [9, 8, 7, 6, 5, 4, 9, 8]
    kept = row_of(CASES["sinks"][2], 11)
    assert kept == [7, 6, 5, 4, None, None, None, None, 3, 2, 1, 0]


@pytest.mark.parametrize("case", list(CASES))
def test_gradients_are_finite_and_the_spec_survives_json(case: str) -> None:
    name, fields, _ = CASES[case]
    config = posenc.encoding(name, **fields).for_model(geometry())
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config
    encoding = posenc.build(config, geometry())
    assert not list(encoding.state_dict())
    query, key = (x.float().requires_grad_() for x in states(4, 10))
    scored(encoding, query, key, ROWS, COLUMNS).softmax(-1).square().sum().backward()
    assert query.grad is not None
    assert key.grad is not None
    assert query.grad.isfinite().all()
    assert key.grad.isfinite().all()
    assert query.grad.any()
    assert key.grad.any()


def test_lengths_and_the_rotation_are_read_from_the_model_and_recorded() -> None:
    own = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    long = geometry(max_position_embeddings=1024)
    for name, filled in (
        ("dual_chunk", {"chunk": 768, "local": 128}),
        ("string", {"shift": 341}),
        ("lm_infinite", {"window": 1024}),
        ("sinks", {"recent": 1020}),
        ("self_extend", {}),
    ):
        found = posenc.encoding(name).for_model(long, own).to_dict()
        assert found.items() >= {**filled, "theta": 5e5, "partial_rotary_factor": 0.5}.items()
        assert found["scaling"] == {"rope_type": "linear", "factor": 2.0}
        assert from_dict(found).for_model(geometry(), None) == from_dict(found)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("self_extend", {"group": 0}, "group"),
        ("self_extend", {"window": 2.5}, "window"),
        ("self_extend", {"shift": "flor"}, "did you mean 'floor'"),
        ("rerope", {"leak": 0.5}, "leak"),
        ("rerope", {"window": True}, "window"),
        ("dual_chunk", {"chunk": 4, "local": 4}, "local < chunk"),
        ("dual_chunk", {"clamp": "chunk1"}, "did you mean"),
        ("string", {"shift": 4}, "local <= shift"),
        ("string", {}, "a third of the trained length is 5"),
        ("lm_infinite", {"window": 0}, "window"),
        ("sinks", {"first": -1}, "first"),
        ("sinks", {"theta": 0.5}, "theta"),
        ("rerope", {"scaling": {"rope_type": "yarm"}}, "did you mean 'yarn'"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        posenc.build(posenc.encoding(name, **fields), geometry())


def test_a_rotation_that_grows_is_refused_by_name() -> None:
    growing = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(UnsupportedEncodingError, match="mode='frozen'"):
        posenc.build(posenc.encoding("rerope", scaling=growing), geometry())
    frozen = {**growing, "mode": "frozen", "length": 64}
    assert posenc.build(posenc.encoding("rerope", scaling=frozen), geometry()) is not None
