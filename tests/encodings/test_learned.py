"""Extensions of a learned table against naive twins, published values, and torch's own interpolation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_posenc as posenc
from hf_posenc.config import from_dict
from hf_posenc.encodings.learned import sinusoidal_fit
from hf_posenc.errors import ConfigError, LengthError, UnsupportedEncodingError
from tests import naive_absolute as naive

TWINS: dict[str, Callable[..., naive.Table]] = {
    "align_corners": naive.align_corners,
    "half_pixel": naive.half_pixel,
    "recurrent": naive.recurrent,
    "grouped": naive.grouped,
    "hierarchical": naive.hierarchical,
}


def geometry(rows: int, width: int) -> posenc.Geometry:
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": width}
    return posenc.Geometry(hidden_size=width, max_position_embeddings=rows, causal=True, **heads)


def built(table: Tensor, longer: int, extension: str, **fields: Any) -> Any:
    config = posenc.Learned(max_position_embeddings=longer, extension=extension, **fields)
    encoding = posenc.build(config, geometry(*table.shape))
    encoding.to(table.dtype).adopt(table)
    return encoding


def extended(table: Tensor, longer: int, extension: str, **fields: Any) -> Tensor:
    encoding = built(table, longer, extension, **fields)
    assert encoding.max_positions() == longer
    found: Tensor = encoding.embed(torch.arange(longer)[None])[0].detach()
    with pytest.raises(LengthError, match=f"no position {longer + 1}"):
        encoding.embed(torch.tensor([[longer]]))
    return found


@pytest.mark.parametrize(("rows", "longer"), [(4, 8), (5, 13), (7, 8), (16, 100), (6, 6)])
@pytest.mark.parametrize("extension", list(TWINS))
def test_extended_tables_equal_the_naive_ones(extension: str, rows: int, longer: int) -> None:
    table = torch.randn(rows, 6, dtype=torch.float64)
    expected = torch.tensor(TWINS[extension](table.tolist(), longer), dtype=torch.float64)
    assert torch.allclose(extended(table, longer, extension), expected, atol=1e-12)
    assert torch.allclose(extended(table.float(), longer, extension).double(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("extension", "expected"),
    [
        ("interpolate", [0, 5, 10, 15, 20, 25, 30, 30]),
        ("align_corners", [30 * i / 7 for i in range(8)]),
        ("half_pixel", [0, 2.5, 7.5, 12.5, 17.5, 22.5, 27.5, 30]),
        ("tile", [0, 10, 20, 30, 0, 10, 20, 30]),
        ("recurrent", [0, 10, 20, 30, 0, 10, 20, 30]),
        ("grouped", [0, 0, 10, 10, 20, 20, 30, 30]),
    ],
)
def test_published_values(extension: str, expected: list[float]) -> None:
    table = torch.tensor([[0.0], [10.0], [20.0], [30.0]])
    assert extended(table, 8, extension)[:, 0].tolist() == pytest.approx(expected, rel=1e-6)


def test_published_hierarchy() -> None:
    rows = extended(torch.tensor([[10.0], [20.0], [30.0]]), 9, "hierarchical")[:, 0].tolist()
    assert rows == pytest.approx([10, 20, 30, 16.667, 26.667, 36.667, 23.333, 33.333, 43.333], abs=1e-3)


@pytest.mark.parametrize("longer", [10, 16, 37])
def test_torch_interpolates_the_same(longer: int) -> None:
    table = torch.randn(8, 3, dtype=torch.float64)
    for extension, corners in (("half_pixel", False), ("align_corners", True)):
        theirs = torch.nn.functional.interpolate(table.T[None], size=longer, mode="linear", align_corners=corners)
        assert torch.allclose(extended(table, longer, extension), theirs[0].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extension", ["tile", "recurrent", "hierarchical"])
def test_old_rows_stay_where_they_are_to_the_bit(extension: str, dtype: torch.dtype) -> None:
    table = torch.randn(16, 4).to(dtype)
    assert torch.equal(extended(table, 50, extension)[:16], table)


def test_ends_and_anchors_stay_to_the_bit() -> None:
    table = torch.randn(16, 4)
    assert torch.equal(extended(table, 50, "align_corners")[[0, -1]], table[[0, -1]])
    assert torch.equal(extended(table, 48, "grouped")[::3], table)
    assert torch.equal(extended(table, 48, "interpolate")[::3], table)


@pytest.mark.parametrize("extension", ["recurrent", "grouped"])
def test_positions_that_share_a_row_add_none(extension: str) -> None:
    encoding = built(torch.randn(16, 4), 64, extension)
    assert encoding.weight.shape == (16, 4)
    encoding.embed(torch.tensor([[63]])).sum().backward()
    assert encoding.weight.grad.any(dim=1).tolist() == [False] * 15 + [True]


def test_sinusoids_continue_what_is_made_of_them() -> None:
    speeds = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    phases = torch.arange(256, dtype=torch.float64)[:, None] * speeds
    whole = torch.cat([phases.sin(), phases.cos()], dim=1) @ torch.randn(8, 8, dtype=torch.float64)
    found, fit = sinusoidal_fit(whole[:64], 256)
    assert fit == pytest.approx(1.0, abs=1e-12)
    assert torch.equal(found[:64], whole[:64])
    assert float((found - whole).abs().max()) < 1e-8 * float(whole.abs().max())
    encoding = built(whole[:64].float(), 128, "sinusoidal_fit")
    assert "fit=1.0000" in repr(encoding)


def test_a_poor_fit_is_refused_and_a_noisy_one_stays_tame() -> None:
    with pytest.raises(UnsupportedEncodingError, match=r"R2 -?[0-9.]+, below 0\.9"):
        built(torch.randn(64, 8), 128, "sinusoidal_fit")
    steps = torch.arange(256, dtype=torch.float64)[:, None]
    smooth = torch.cat([(steps / 20).sin(), (steps / 20).cos(), (steps / 10).sin()], dim=1).repeat(1, 8)
    noisy = smooth + 0.02 * torch.randn(256, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, fit = sinusoidal_fit(noisy[:200], 256)
    assert fit < 1
    assert float(found.abs().max()) < 10


@pytest.mark.parametrize("extension", ["none", *TWINS, "sinusoidal_fit"])
def test_the_spec_survives_json(extension: str) -> None:
    config = posenc.Learned(extension=extension).for_model(geometry(16, 4))
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config
    old = {key: value for key, value in config.to_dict().items() if key != "alpha"}
    assert from_dict(old) == config, "specs from before the field was there are read"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: posenc.Learned(extension="hierarchic"), "did you mean 'hierarchical'"),
        (lambda: posenc.Learned(alpha=0.5), "alpha"),
        (lambda: posenc.Learned(alpha=1), "alpha"),
        (lambda: built(torch.randn(4, 2), 17, "hierarchical"), "reaches 16 positions, not 17"),
    ],
)
def test_what_makes_no_sense_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()
