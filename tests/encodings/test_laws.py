"""Laws that hold for whole groups of encodings, whatever their formulas are."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import hf_posenc as posenc
from hf_posenc.errors import ConfigError, LengthError
from hf_posenc.scaling import KINDS
from tests.contracts.test_encodings_matrix import config_of
from tests.models import SUBJECTS, TRAINED, VARIANTS, assert_same, in_steps, logits, tokens

DIM = 32
FAR = 131072
LISTS = {"short_factor": [1.0 + k / 8 for k in range(DIM // 2)], "long_factor": [2.0 + k / 8 for k in range(DIM // 2)]}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "ntk": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "mode": "frozen", "length": 512},
    "ntk_by_parts": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "longrope": {"factor": 4.0, **LISTS},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {},
}
"""One static form of every `rope_type`."""
STRETCHING = ("linear", "ntk", "ntk_by_parts", "yarn", "llama3")
"""Those that slow every pair down by something between nothing and their factor."""


def geometry(**fields: Any) -> posenc.Geometry:
    plain = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": DIM}
    return posenc.Geometry(**{**plain, "max_position_embeddings": 128, "causal": True, **fields})


def rotary(kind: str = "default", *, length: int = 128, **fields: Any) -> Any:
    factor = {"partial_rotary_factor": 0.5} if kind == "proportional" else {}
    scaling = {"rope_type": kind, **SCALINGS[kind]} if kind != "default" else None
    return posenc.build(
        posenc.RoPE(**{"scaling": scaling, **factor, **fields}), geometry(max_position_embeddings=length)
    )


def states(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def turned_scores(encoding: Any, query: Tensor, key: Tensor, at: Tensor, to: Tensor) -> Tensor:
    product: Tensor = encoding.rotate(query, at) @ encoding.rotate_key(key, to).mT
    return product


# --- rotations


def test_every_rope_type_is_held_to_these_laws() -> None:
    assert SCALINGS.keys() == KINDS.keys()


@pytest.mark.parametrize("pairing", ["half_split", "interleaved"])
@pytest.mark.parametrize("kind", list(SCALINGS))
def test_a_rotation_keeps_norms_and_hears_distances_alone(kind: str, pairing: str) -> None:
    encoding = rotary(kind, pairing=pairing)
    query, key, ids = states(2, 4, 6, DIM), states(2, 4, 6, DIM).flip(0), torch.tensor([[0, 1, 5, 127, 500, 9000]])
    norms = encoding.rotate(query, ids).norm(dim=-1) / query.norm(dim=-1)
    assert torch.allclose(norms, torch.full_like(norms, encoding.attention_factor), rtol=1e-12)
    here = turned_scores(encoding, query, key, ids, ids)
    for shift in (1, 777, FAR):
        assert torch.allclose(turned_scores(encoding, query, key, ids + shift, ids + shift), here, atol=1e-8)
    assert not torch.allclose(turned_scores(encoding, query, key, ids + 1, ids), here, atol=1e-2)


def test_a_base_that_grows_does_not_hear_distances_alone() -> None:
    encoding = posenc.build(posenc.RoPE(scaling={"rope_type": "dynamic", "factor": 4.0}), geometry())
    query, ids = states(1, 4, 2, DIM), torch.tensor([[3, 100]])
    near, far = (turned_scores(encoding.at_length(101 + s), query, query, ids + s, ids + s) for s in (0, 900))
    assert not torch.allclose(near, far, atol=1e-2)


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_interpolation_at_a_multiple_is_the_plain_rotation(factor: int) -> None:
    slow = posenc.build(posenc.RoPE(scaling={"rope_type": "linear", "factor": float(factor)}), geometry())
    ids = torch.tensor([[0, 1, 2, 77, 5000]])
    assert torch.equal(slow.rotate(states(1, 4, 5, DIM), factor * ids), rotary().rotate(states(1, 4, 5, DIM), ids))


@pytest.mark.parametrize("layout", ["interleaved", "concatenated", "tensor2tensor"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_interpolated_sinusoids_at_a_multiple_are_the_plain_ones(factor: float, layout: str) -> None:
    plain, slow = (
        posenc.build(posenc.Sinusoidal(layout=layout, interpolation_factor=f), geometry()) for f in (1.0, factor)
    )
    ids = torch.tensor([[0, 2, 4, 78, 5000]])
    at = (ids * factor).long()
    assert torch.equal(slow.embed(at), plain.embed(ids))  # type: ignore[arg-type]
    assert torch.equal(slow.embed(ids), plain.embed(ids)) == (factor == 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", STRETCHING)
def test_scalings_lie_between_no_change_and_interpolation(kind: str) -> None:
    plain, scaled, slowest = (rotary(name, length=4096).inv_freq for name in ("default", kind, "linear"))
    for high, found, low in zip(plain, scaled, slowest, strict=True):
        assert low * (1 - 1e-12) <= found <= high * (1 + 1e-12)
    assert scaled[-1] == pytest.approx(slowest[-1], rel=1e-12), "the slowest pair is interpolated by all of them"
    assert kind == "linear" or scaled[0] == plain[0]


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_an_attention_factor_of_ones_own_wins(kind: str) -> None:
    scaling = {"rope_type": kind, **SCALINGS[kind]}
    own = posenc.RoPE(scaling={**scaling, "attention_factor": 1.25})
    assert rotary(kind).attention_factor not in (1.0, 1.25)
    assert posenc.build(own, geometry()).attention_factor == 1.25  # type: ignore[comparison-overlap]
    parameters = own.for_model(geometry()).rope_parameters(geometry(head_dim=DIM))
    assert parameters is None or parameters["attention_factor"] == 1.25
    for config in (own, posenc.RoPE(scaling=scaling)):
        filled = config.for_model(geometry(max_position_embeddings=333)).scaling
        assert filled is not None
        assert filled["original_max_position_embeddings"] == 333


@pytest.mark.parametrize("name", ["rope", "lerope", "xpos", "rerope", "self_extend", "dual_chunk", "string", "sinks"])
def test_an_odd_rotary_width_is_refused_in_the_plan(name: str) -> None:
    model = SUBJECTS["llama"].fresh()  # heads of 8
    with pytest.raises(ConfigError, match="rotary width must be even"):
        posenc.plan(model, config_of(name, partial_rotary_factor=0.4))
    assert not posenc.is_patched(model)


# --- precision


def rounded(encoding: Any) -> Any:
    """A copy whose trained numbers have seen bfloat16; nothing else of it may have."""
    twin = copy.deepcopy(encoding)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return twin


def said_by(encoding: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What every hook of an encoding says of positions up to 32768."""
    keys = torch.tensor([[0, 1, 2, 30, 60, 61, 62, 63]])
    keys = keys if encoding.max_positions() == 128 else torch.cat([keys[:, :4], keys[:, 4:] * 520], dim=1)
    query, key, hidden = (
        states(1, 4, 3, DIM, dtype=dtype),
        states(1, 2, 8, DIM, dtype=dtype),
        states(1, 8, 64).to(dtype),
    )
    at = posenc.Positions(query=keys[:, -3:], key=keys, gates=encoding.gate(hidden))
    said = {
        "embed": encoding.embed(keys),
        "rotate": encoding.rotate(query, at.query),
        "rotate_key": encoding.rotate_key(key, at.key),
        "bias": encoding.bias(query, key, at),
        "gate": at.gates,
        "score": encoding.score(query, key, at),
        "temperature": encoding.temperature(at.query),
    }
    return {hook: value for hook, value in said.items() if value is not None}


ALONE = [name for name in posenc.encodings() if name not in ("layered", "stacks")]


def stirred(name: str) -> Any:
    torch.manual_seed(2)
    encoding = posenc.build(config_of(name), geometry())
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return encoding


CONTENT = {"bert_relative", "cable", "cope", "fox", "shaw", "transformer_xl"}
"""Those whose bias is made of the states."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_no_table_is_rounded_by_what_a_model_goes_through(name: str, dtype: torch.dtype) -> None:
    fresh = rounded(stirred(name))
    moved = copy.deepcopy(fresh).to(torch.bfloat16).to(dtype).to(torch.float32)
    if dtype == torch.float16:  # trained numbers have fewer digits, but a smaller range there
        moved.load_state_dict(fresh.state_dict())
    found, expected = said_by(moved, torch.float32), said_by(fresh, torch.float32)
    assert found.keys() == expected.keys()
    for hook, value in found.items():
        assert torch.equal(value, expected[hook]), hook


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.xfail(strict=True, reason="its network is a matrix product, which autocast rounds")]
            if name == "fire"
            else [],
        )
        for name in ALONE
        if not stirred(name).overrides("score")
    ],
)
def test_autocast_rounds_no_table(name: str) -> None:
    """What comes from positions alone is the same to the bit; content may be rounded, and so may gates."""
    encoding = stirred(name)
    expected = said_by(encoding, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = said_by(encoding, torch.float32)
    for hook in found.keys() - {"gate"} - ({"bias"} if name in CONTENT else set()):
        assert torch.equal(found[hook], expected[hook]), hook


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("rope", {}),
        ("rope", {"pairing": "interleaved"}),
        ("rope", {"scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.0}}),
        ("lerope", {}),
        ("xpos", {"scale_base": 1e9}),
    ],
)
def test_phases_hold_at_the_far_end_in_every_format(name: str, fields: dict[str, Any], dtype: torch.dtype) -> None:
    """Within 5e-3 radians of float64; phases of float32 are off by 8e-3 there, positions of bfloat16 by turns."""
    encoding: Any = posenc.build(posenc.encoding(name, **fields), geometry()).to(dtype)
    speeds = getattr(encoding, "rotation", encoding).inv_freq
    ids = torch.tensor([[FAR, FAR - 1, 100003, 65521]])
    ones = torch.zeros(1, 1, 4, DIM, dtype=dtype)
    real, imaginary = (slice(0, DIM, 2), slice(1, DIM, 2)) if fields.get("pairing") else (slice(0, 16), slice(16, 32))
    ones[..., real] = 1
    out = encoding.rotate(ones, ids).double()
    for n, k in itertools.product(range(4), range(DIM // 2)):
        angle = math.atan2(float(out[0, 0, n, imaginary][k]), float(out[0, 0, n, real][k]))
        off = (angle - int(ids[0, n]) * speeds[k] + math.pi) % (2 * math.pi) - math.pi
        assert abs(off) <= 5e-3


@pytest.mark.parametrize("layout", ["interleaved", "concatenated", "tensor2tensor"])
def test_sinusoids_hold_at_the_far_end(layout: str) -> None:
    encoding: Any = posenc.build(posenc.Sinusoidal(layout=layout), geometry()).to(torch.bfloat16)
    row = encoding.embed(torch.tensor([[FAR]]))[0, 0]
    cosine = row[1] if layout == "interleaved" else row[32]
    assert float(row[0]) == pytest.approx(math.sin(FAR), abs=1e-6)
    assert float(cosine) == pytest.approx(math.cos(FAR), abs=1e-6)


# --- biases


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("alibi", {}),
        ("alibi", {"interpolation_factor": 4.0, "trainable": True}),
        ("kerple", {}),
        ("kerple", {"parametrization": "clamp"}),
        ("kerple", {"kernel": "power"}),
        ("kerple", {"kernel": "power", "parametrization": "clamp"}),
        ("fox", {}),
        ("cable", {}),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_penalties_are_never_positive_and_never_fall_with_distance(
    name: str, fields: dict[str, Any], seed: int
) -> None:
    """Whatever is trained; slopes of ALiBi excepted, whose sign is free."""
    encoding: Any = posenc.build(posenc.encoding(name, **fields), geometry()).double()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(torch.randn_like(parameter) if name != "alibi" else torch.rand_like(parameter))
    keys = torch.tensor([[0, 1, 2, 3, 10, 11, 500, 501, 4000, 4001]])
    positions = posenc.Positions(query=keys[:, -1:], key=keys, gates=encoding.gate(states(1, 10, 64)))
    bias = encoding.bias(states(1, 4, 1, DIM), states(1, 2, 10, DIM), positions)
    assert bias.shape == (1, 4, 1, 10)
    assert (bias <= 0).all()
    assert (bias.diff(dim=-1) >= 0).all(), "the nearer the key, the smaller the penalty"
    assert (bias[..., 0] < bias[..., -1]).all()
    assert not bias[..., -1].any()


def test_query_heads_that_share_keys_keep_slopes_of_their_own() -> None:
    encoding: Any = posenc.build(posenc.Alibi(), geometry(num_attention_heads=12, num_key_value_heads=3))
    ids = torch.tensor([[0, 1]])
    found = encoding.bias(states(1, 12, 2, DIM), states(1, 3, 2, DIM), posenc.Positions(query=ids, key=ids))[0, :, 1, 0]
    assert (-found).tolist() == pytest.approx(
        [2.0 ** -(h + 1) for h in range(8)] + [2.0 ** -(h + 0.5) for h in range(4)]
    )


def test_one_table_serves_all_layers_and_no_cross_attention() -> None:
    model = posenc.patch(SUBJECTS["gpt2"].fresh(add_cross_attention=True), posenc.encoding("t5"), verify=False)
    table = model.get_parameter("transformer.posenc.weight")
    assert [name for name, _ in model.named_parameters() if "posenc" in name] == ["transformer.posenc.weight"]
    for layer in (0, 1):
        assert type(model.get_submodule(f"transformer.h.{layer}.attn")).__name__ == "T5GPT2Attention"
        assert type(model.get_submodule(f"transformer.h.{layer}.crossattention")).__name__ == "GPT2Attention"
    ids, heard, gradients = tokens(1, 9), states(1, 5, 32, dtype=torch.float32), []
    for deaf in (0, 1):
        attention = model.get_submodule(f"transformer.h.{deaf}.attn")
        hook = attention.register_forward_hook(lambda _, __, output: (output[0].detach(), *output[1:]))
        model.zero_grad()
        model(input_ids=ids, encoder_hidden_states=heard).logits[..., 7].sum().backward()
        hook.remove()
        assert table.grad is not None
        gradients.append(table.grad.clone())
    assert all(gradient.any() for gradient in gradients), "each layer alone moves the table"
    assert not torch.equal(*gradients)


# --- shapes and tables of models


@pytest.mark.parametrize("name", [*ALONE, "layered"])
def test_heads_may_be_wider_than_their_share(name: str) -> None:
    model = posenc.patch(VARIANTS["llama-wide-head"].fresh(), config_of(name))
    ids = tokens(1, 60)
    assert_same(in_steps(model, ids, [40, 1, 19], DynamicCache(config=model.config)), logits(model, ids), 1e-4)


@pytest.mark.parametrize(
    "extension", ["tile", "recurrent", "hierarchical", "interpolate", "grouped", "align_corners", "half_pixel"]
)
@pytest.mark.parametrize("subject", ["gpt2", "opt", "bert", "roberta"])
def test_a_longer_table_follows_offsets_and_buffers(subject: str, extension: str) -> None:
    """OPT and RoBERTa have two rows before the first position, BERT and RoBERTa buffers as long as their table."""
    model, ids = SUBJECTS[subject].fresh(), tokens(2, 4 * TRAINED)
    before = logits(model, ids[:, :TRAINED])
    longer = posenc.Learned(max_position_embeddings=4 * TRAINED, extension=extension)
    posenc.patch(model, longer)
    assert posenc.max_length(model) == 4 * TRAINED
    offset = 2 if subject == "roberta" else 0  # as its own config counts
    assert model.config.max_position_embeddings == 4 * TRAINED + offset
    assert logits(model, ids).isfinite().all()
    with pytest.raises(LengthError, match=f"no position {4 * TRAINED + 1}"):
        logits(model, tokens(1, 4 * TRAINED + 1))
    if extension in ("tile", "recurrent", "hierarchical"):
        assert torch.equal(logits(model, ids[:, :TRAINED]), before)
    if extension in ("interpolate", "grouped"):
        apart = 4 * torch.arange(TRAINED)[None] + (2 if subject == "roberta" else 0)
        assert torch.equal(logits(model, ids[:, :TRAINED], position_ids=apart.expand(2, -1)), before)
