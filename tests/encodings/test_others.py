"""ALiBi, learned, sinusoidal and no positions, against naive twins and published values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.encodings.alibi import slopes
from hf_posenc.errors import ConfigError, LengthError, UnknownNameError, UnsupportedEncodingError
from tests import naive
from tests.models import SPECS

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "golden.json").read_text())


def geometry(**fields: Any) -> posenc.Geometry:
    plain = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    return posenc.Geometry(**{**plain, "max_position_embeddings": 16, "causal": True, **fields})


@pytest.mark.parametrize("heads", range(1, 129))
def test_slopes_equal_the_naive_ones(heads: int) -> None:
    assert slopes(heads) == pytest.approx(naive.alibi_slopes(heads), rel=1e-14)


@pytest.mark.parametrize("heads", list(GOLDEN["alibi_slopes"]))
def test_published_slopes(heads: str) -> None:
    assert slopes(int(heads)) == pytest.approx(GOLDEN["alibi_slopes"][heads], rel=1e-12)


@pytest.mark.parametrize(("heads", "shared"), [(2, 2), (6, 2), (12, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_alibi_bias_equals_the_naive_one(heads: int, shared: int, causal: bool) -> None:
    encoding = posenc.build(
        posenc.Alibi(), geometry(num_attention_heads=heads, num_key_value_heads=shared, causal=causal)
    )
    query, key = [5, 6, 900], [0, 3, 5, 6, 7, 131072]
    positions = posenc.Positions(query=torch.tensor([query]), key=torch.tensor([key]))
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)):
        q, k = torch.zeros(1, heads, 3, 4, dtype=dtype), torch.zeros(1, shared, 6, 4, dtype=dtype)
        bias = encoding.bias(q, k, positions)
        assert bias is not None
        assert bias.shape == (1, heads, 3, 6)
        expected = torch.tensor([naive.alibi_bias(heads, query, key)], dtype=torch.float64)
        assert torch.allclose(bias.double(), expected, rtol=allowed, atol=0)
    assert (bias <= 0).all()
    assert not bias[..., [0, 1], [2, 3]].any(), "no penalty on the own position"


def test_alibi_of_an_encoder_is_symmetric_and_falls_with_distance() -> None:
    encoding = posenc.build(posenc.Alibi(), geometry(num_attention_heads=8, num_key_value_heads=8, causal=False))
    steps = torch.arange(9)[None]
    bias = encoding.bias(torch.zeros(1, 8, 9, 4), torch.zeros(1, 8, 9, 4), posenc.Positions(query=steps, key=steps))
    assert bias is not None
    assert bias[0, 0, 1, :3].tolist() == [-0.5, 0.0, -0.5]
    assert torch.equal(bias, bias.mT)
    assert (bias[0, :, 0].diff(dim=-1) < 0).all()


@pytest.mark.parametrize("layout", ["interleaved", "concatenated", "tensor2tensor"])
@pytest.mark.parametrize(("width", "theta"), [(8, 10000.0), (2, 10000.0), (64, 77.0)])
def test_sinusoids_equal_the_naive_ones(width: int, theta: float, layout: str) -> None:
    if (width, layout) == (2, "tensor2tensor"):
        pytest.skip("a single pair has no spread of wavelengths: the formula divides by zero")
    encoding = posenc.build(posenc.Sinusoidal(layout=layout, theta=theta, scale=0.5), geometry(hidden_size=width))
    positions = [0, 1, 15, 16, 131072]
    table = encoding.embed(torch.tensor([positions]))
    assert table is not None
    expected = [[0.5 * x for x in naive.sinusoidal_row(p, width, layout, theta)] for p in positions]
    assert torch.allclose(table.double(), torch.tensor([expected], dtype=torch.float64), atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("layout", "row"),
    [
        (
            "interleaved",
            [
                0.8414709848,
                0.5403023059,
                0.0998334166,
                0.9950041653,
                0.0099998333,
                0.9999500004,
                0.0009999998,
                0.9999995,
            ],
        ),
        (
            "concatenated",
            [
                0.8414709848,
                0.0998334166,
                0.0099998333,
                0.0009999998,
                0.5403023059,
                0.9950041653,
                0.9999500004,
                0.9999995,
            ],
        ),
        (
            "tensor2tensor",
            [
                0.8414709848,
                0.0463992235,
                0.002154433,
                9.99999983e-5,
                0.5403023059,
                0.998922976,
                0.9999976792,
                0.999999995,
            ],
        ),
    ],
)
def test_published_sinusoids(layout: str, row: list[float]) -> None:
    table = posenc.build(posenc.Sinusoidal(layout=layout), geometry()).embed(torch.tensor([[1]]))
    assert table is not None
    assert table[0, 0].tolist() == pytest.approx(row, abs=6e-8)


def adopted(table: torch.Tensor, rows: int, extension: str) -> torch.Tensor:
    shape = geometry(hidden_size=table.shape[1], max_position_embeddings=len(table))
    encoding = posenc.build(posenc.Learned(max_position_embeddings=rows, extension=extension), shape)
    encoding.adopt(table)
    found = encoding.embed(torch.arange(rows)[None])
    assert found is not None
    assert encoding.max_positions() == rows
    return found[0].detach()


@pytest.mark.parametrize(("rows", "longer"), [(4, 8), (4, 4), (5, 13), (7, 8), (3, 2), (128, 1000)])
@pytest.mark.parametrize("extension", ["tile", "interpolate"])
def test_extended_tables_equal_the_naive_ones(rows: int, longer: int, extension: str) -> None:
    table = torch.randn(rows, 6)
    twin = {"tile": naive.tiled, "interpolate": naive.interpolated}[extension]
    expected = twin(table.tolist(), longer) if longer >= rows else table[:longer].tolist()
    assert torch.allclose(adopted(table, longer, extension), torch.tensor(expected), atol=1e-6)


def test_a_known_interpolation_keeps_its_anchors() -> None:
    table = torch.tensor([[0.0], [10.0], [20.0], [30.0]]).expand(-1, 2)
    assert adopted(table, 8, "interpolate")[:, 0].tolist() == [0, 5, 10, 15, 20, 25, 30, 30]
    random = torch.randn(16, 4, dtype=torch.float32)
    assert torch.equal(adopted(random, 64, "interpolate")[::4], random)
    assert torch.equal(adopted(random, 40, "tile")[:16], random)
    assert torch.equal(adopted(random, 10, "none"), random[:10])


def test_a_table_is_a_parameter_and_ends() -> None:
    encoding = posenc.build(posenc.Learned(), geometry())
    assert [name for name, _ in encoding.named_parameters()] == ["weight"]
    for wrong, named in ((16, 17), (-1, 0)):
        with pytest.raises(LengthError, match=f"no position {named}: learned table has 16 rows"):
            encoding.embed(torch.tensor([[3, wrong]]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: posenc.Learned(max_position_embeddings=0), "positive integer"),
        (lambda: posenc.Learned(max_position_embeddings=True), "positive integer"),
        (lambda: posenc.Learned(extension="tiel"), "did you mean 'tile'"),
        (lambda: posenc.build(posenc.Learned(max_position_embeddings=17), geometry()), "extension='tile'"),
        (lambda: posenc.Sinusoidal(layout="interleave"), "did you mean 'interleaved'"),
        (lambda: posenc.Sinusoidal(theta=1.0), "theta"),
        (lambda: posenc.Sinusoidal(scale=0.0), "scale"),
        (lambda: posenc.build(posenc.Sinusoidal(), geometry(hidden_size=7)), "even hidden_size"),
        (lambda: posenc.encoding("rope", thetta=3.0), "did you mean 'theta'"),
        (lambda: posenc.build({"name": "rope"}, geometry()), "expected an encoding config"),  # type: ignore[arg-type]
        (lambda: geometry(num_key_value_heads=3), "multiple"),
        (lambda: geometry(head_dim=0), "head_dim"),
    ],
)
def test_what_makes_no_sense_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_an_encoder_without_positions_has_to_be_asked_for() -> None:
    with pytest.raises(UnsupportedEncodingError, match="bag of words"):
        posenc.build(posenc.NoPE(), geometry(causal=False))
    assert posenc.build(posenc.NoPE(allow_bidirectional=True), geometry(causal=False)) is not None


def test_names_are_known_or_corrected() -> None:
    assert {"alibi", "learned", "nope", "rope", "sinusoidal"} <= set(posenc.encodings())
    assert {"gpt2", "opt", "gpt_neox", "llama", "bert", "roberta"} <= set(posenc.families())
    with pytest.raises(UnknownNameError, match="did you mean 'alibi'"):
        posenc.encoding("alibbi")


@pytest.mark.parametrize("spec", list(SPECS))
def test_a_spec_survives_json(spec: str) -> None:
    from hf_posenc.config import from_dict

    config = SPECS[spec].for_model(geometry())
    plain = json.loads(json.dumps(config.to_dict()))
    assert from_dict(plain) == config
    assert from_dict(plain).to_dict() == config.to_dict()
    for wrong in ({**plain, "version": 99}, {**plain, "colour": 1}, {**plain, "name": None}):
        with pytest.raises(ConfigError, match=r"version|field|name"):
            from_dict(wrong)


@pytest.mark.parametrize("spec", list(SPECS))
def test_hooks_are_neutral_or_shaped_as_promised(spec: str) -> None:
    encoding = posenc.build(SPECS[spec], geometry())
    ids, states = torch.arange(6).reshape(2, 3), torch.randn(2, 2, 3, 4)
    embedded = encoding.embed(ids)
    assert embedded is None or embedded.shape == (2, 3, 8)
    assert torch.equal(encoding.remap(ids), ids)
    assert encoding.rotate(states, ids).shape == states.shape
    bias = encoding.bias(states, states, posenc.Positions(query=ids, key=ids))
    assert bias is None or bias.shape == (2, 2, 3, 3)
    heard = (embedded is not None, not torch.equal(encoding.rotate(states, ids), states), bias is not None)
    assert sum(heard) == (0 if spec == "nope" else 1), "an encoding acts in exactly one way"
    assert not list(encoding.named_buffers())
    assert math.isfinite(sum(float(p.sum()) for p in encoding.parameters()))
