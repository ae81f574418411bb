"""Laws of every encoding that adds to the scores."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_posenc as posenc
from hf_posenc.config import from_dict
from hf_posenc.errors import UnsupportedEncodingError

HEADS, SHARED, DIM, HIDDEN = 4, 2, 8, 12
SPECS: dict[str, posenc.EncodingConfig] = {
    "alibi": posenc.Alibi(),
    "alibi-interpolated": posenc.Alibi(interpolation_factor=4.0, bias_max=4.0),
    "alibi-trainable": posenc.Alibi(trainable=True),
    "alibi-bloom": posenc.Alibi(form="bloom"),
    "alibi-mpt": posenc.Alibi(form="mpt"),
    "alibi-falcon": posenc.Alibi(form="falcon"),
    "alibi-split": posenc.Alibi(sides="split"),
    "t5": posenc.encoding("t5"),
    "t5-few": posenc.encoding("t5", num_buckets=8, max_distance=20, multiplier="sqrt_head_dim"),
    "kerple-log": posenc.encoding("kerple"),
    "kerple-power": posenc.encoding("kerple", kernel="power"),
    "kerple-log-clamp": posenc.encoding("kerple", parametrization="clamp"),
    "kerple-power-clamp": posenc.encoding("kerple", kernel="power", parametrization="clamp"),
    "sandwich": posenc.encoding("sandwich"),
    "sandwich-zero": posenc.encoding("sandwich", first_index=0, width=16),
    "fire": posenc.encoding("fire"),
    "fire-paper": posenc.encoding("fire", threshold="length", count="from_one", width=5),
    "shaw": posenc.encoding("shaw", left=5, right=3),
    "bert-key": posenc.encoding("bert_relative"),
    "bert-key-query": posenc.encoding("bert_relative", position_embedding_type="relative_key_query"),
    "transformer-xl": posenc.encoding("transformer_xl"),
    "transformer-xl-clamp": posenc.encoding("transformer_xl", clamp_length=6),
    "fox": posenc.encoding("fox"),
    "fox-slopes": posenc.encoding("fox", slopes=[0.5, 0.25, 0.125, 0.0625]),
    "cable": posenc.encoding("cable", bias_init=0.0),
    "cope": posenc.encoding("cope", max_positions_counted=6),
    "cope-unscaled": posenc.encoding("cope", gates="unscaled"),
}
CAUSAL_ONLY = ["fire", "fire-paper", "fox", "fox-slopes", "cable", "cope", "cope-unscaled"]
PARITY = ["alibi-bloom", "alibi-mpt", "alibi-falcon"]
GATED = ["fox", "fox-slopes", "cable"]
IDENTITY = ["t5", "t5-few", "fire", "fire-paper", "shaw", "bert-key", "bert-key-query", "cope", "cope-unscaled"]
IDENTITY += ["transformer-xl", "transformer-xl-clamp"]
ABSOLUTE = ["fire", "fire-paper", "alibi-falcon"]
"""What a query sees changes when all positions grow by one number: by intent, or because bfloat16 ends there."""


def geometry(causal: bool = True, **fields: Any) -> posenc.Geometry:
    plain = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": SHARED, "head_dim": DIM}
    return posenc.Geometry(**{**plain, "max_position_embeddings": 16, "causal": causal, **fields})


def built(spec: str, causal: bool = True, *, trained: bool = True) -> Any:
    """The module, with every parameter away from where it starts."""
    torch.manual_seed(1)
    encoding = posenc.build(SPECS[spec], geometry(causal)).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) if trained else 0.0)
    return encoding


def states(rows: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = (rows, HEADS, queries, DIM), (rows, SHARED, keys, DIM), (rows, HEADS, keys)
    query, key, gates = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query, key, -gates.abs()


def cases() -> list[Any]:
    both = [(spec, causal) for spec in SPECS for causal in (True, False)]
    sided = [(s, c) for s, c in both if (c or s not in CAUSAL_ONLY + PARITY) and not (c and s == "alibi-split")]
    return [pytest.param(spec, causal, id=f"{spec}-{'causal' if causal else 'two-sided'}") for spec, causal in sided]


def placed(kind: str) -> tuple[Tensor, Tensor]:
    """Positions of queries and of keys, the last of which are the queries' own."""
    if kind == "cached":
        return torch.tensor([[5, 6, 7]]), torch.arange(8)[None]
    if kind == "gaps":
        keys = torch.tensor([[0, 3, 5, 6, 7, 900, 901, 131072]])
        return keys[:, -3:], keys
    rows = torch.stack((torch.arange(8), (torch.arange(8) - 3).clamp(min=0), torch.arange(8).flip(0)))
    return rows, rows


@pytest.mark.parametrize("kind", ["cached", "gaps", "rows"])
@pytest.mark.parametrize(("spec", "causal"), cases())
def test_bias_is_finite_and_so_are_gradients_which_reach_everything(spec: str, causal: bool, kind: str) -> None:
    at, to = placed(kind)
    query, key, gates = states(len(at), at.shape[1], to.shape[1])
    query.requires_grad_()
    key.requires_grad_()
    encoding = built(spec, causal)
    bias = encoding.bias(query, key, posenc.Positions(query=at, key=to, gates=gates if spec in GATED else None))
    assert bias.dtype == torch.float64
    assert bias.isfinite().all()
    assert torch.broadcast_shapes(bias.shape, (len(at), HEADS, at.shape[1], to.shape[1])) == (
        *query.shape[:3],
        len(to.T),
    )
    if spec in GATED:
        bias = bias.sum() + encoding.gate(torch.randn(2, 5, HIDDEN, dtype=torch.float64)).sum()
    if not bias.requires_grad:
        assert not list(encoding.parameters())
        return
    bias.square().sum().backward()
    for name, parameter in encoding.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if kind == "rows":  # a rich enough question for every parameter to matter
            assert parameter.grad.any(), name
    for states_ in (query, key):
        assert states_.grad is None or states_.grad.isfinite().all()


@pytest.mark.parametrize(("spec", "causal"), cases())
def test_rows_of_a_batch_and_queries_of_a_block_stand_alone(spec: str, causal: bool) -> None:
    at, to = placed("rows")
    query, key, gates = states(3, 8, 8)
    encoding = built(spec, causal)

    def bias(rows: slice, queries: slice) -> Tensor:
        some = gates[rows] if spec in GATED else None
        own = posenc.Positions(query=at, key=to).own_slots()[queries]
        positions = posenc.Positions(query=at[rows, queries], key=to[rows], gates=some, slots=own)
        found: Tensor = encoding.bias(query[rows, :, queries], key[rows], positions)
        return found.expand(-1, HEADS, query[rows, :, queries].shape[2], 8)

    whole = bias(slice(None), slice(None))
    for row in range(3):
        alone = bias(slice(row, row + 1), slice(None))
        assert torch.allclose(alone[0], whole[row], atol=1e-12)
    for queries in (slice(0, 1), slice(3, 4), slice(5, 8)):  # the second row repeats its first position
        for row in (0, 2):
            alone = bias(slice(row, row + 1), queries)
            assert torch.allclose(alone[0], whole[row][:, queries], atol=1e-12)


@pytest.mark.parametrize(("spec", "causal"), cases())
def test_only_distances_count(spec: str, causal: bool) -> None:
    at, to = placed("cached")
    query, key, gates = states(1, 3, 8)
    encoding = built(spec, causal)
    some = gates if spec in GATED else None
    near = encoding.bias(query, key, posenc.Positions(query=at, key=to, gates=some))
    far = encoding.bias(query, key, posenc.Positions(query=at + 100000, key=to + 100000, gates=some))
    if spec in PARITY:
        near, far = (b - b[..., :1] for b in (near, far))  # one number a row, which softmax does not see
    assert torch.allclose(near, far, atol=1e-9) == (spec not in ABSOLUTE)


@pytest.mark.parametrize("spec", IDENTITY)
def test_what_can_start_as_nothing_does(spec: str) -> None:
    at, to = placed("cached")
    query, key, _ = states(1, 3, 8)
    assert not built(spec, trained=False).bias(query, key, posenc.Positions(query=at, key=to)).any()
    assert built(spec).bias(query, key, posenc.Positions(query=at, key=to)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spec", "causal"), cases())
def test_the_bias_is_single_precision_whatever_the_model_is(spec: str, causal: bool, dtype: torch.dtype) -> None:
    at, to = placed("gaps")
    query, key, gates = (tensor.to(dtype) for tensor in states(1, 3, 8))
    encoding = built(spec, causal).to(dtype)
    exact = copy.deepcopy(encoding).double()  # of the same numbers, as rounded as they are
    found, expected = (
        module.bias(q, k, posenc.Positions(query=at, key=to, gates=g if spec in GATED else None))
        for module, q, k, g in ((encoding, query, key, gates.float()), (exact, query.double(), key.double(), gates))
    )
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("spec", list(SPECS))
def test_specs_survive_json_and_keep_no_table(spec: str) -> None:
    causal = spec != "alibi-split"
    config = SPECS[spec].for_model(geometry(causal))
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config
    encoding = built(spec, causal)
    assert not list(encoding.named_buffers())
    assert encoding.max_positions() is None
    assert type(encoding).__name__ in repr(encoding)


@pytest.mark.parametrize("spec", CAUSAL_ONLY + PARITY)
def test_encoders_are_refused_where_the_method_has_no_form_for_them(spec: str) -> None:
    with pytest.raises(UnsupportedEncodingError, match="bidirectional model"):
        posenc.build(SPECS[spec], geometry(causal=False))


@pytest.mark.parametrize("spec", ["alibi", "kerple-log", "kerple-power", "sandwich", "sandwich-zero"])
def test_encoders_see_both_sides_alike(spec: str) -> None:
    at = torch.arange(7)[None]
    bias = built(spec, causal=False).bias(*states(1, 7, 7)[:2], posenc.Positions(query=at, key=at))
    assert torch.allclose(bias, bias.mT, atol=1e-12)
    assert torch.allclose(bias.diagonal(dim1=-2, dim2=-1), torch.zeros(1, dtype=torch.float64), atol=1e-12)
    assert (bias[0, :, 0, 1:] < 0).all()


@pytest.mark.parametrize("spec", [s for s in SPECS if hasattr(SPECS[s], "per_layer")])
def test_per_layer_is_a_yes_or_no(spec: str) -> None:
    with pytest.raises(posenc.PosencError, match="per_layer must be True or False"):
        posenc.encoding(SPECS[spec].name, per_layer="yes")


@pytest.mark.parametrize(("spec", "causal"), cases())
def test_gradients_are_those_of_the_function(spec: str, causal: bool) -> None:
    at, to = placed("cached")
    query, key, gates = (tensor.requires_grad_() for tensor in states(1, 3, 8))
    encoding = built(spec, causal, trained="clamp" not in spec)  # beyond its bounds a clamp passes gradients on purpose
    names = [name for name, _ in encoding.named_parameters()]

    def bias(query: Tensor, key: Tensor, gates: Tensor, *parameters: Tensor) -> Tensor:
        positions = posenc.Positions(query=at, key=to, gates=gates if spec in GATED else None)
        given = dict(zip(names, parameters, strict=True))
        found: Tensor = torch.func.functional_call(
            _Bias(encoding), {f"of.{n}": p for n, p in given.items()}, (query, key, positions)
        )
        return found + 0 * (query.sum() + key.sum() + gates.sum())

    assert torch.autograd.gradcheck(bias, (query, key, gates, *encoding.parameters()), fast_mode=True)


class _Bias(torch.nn.Module):
    """Calls `bias`, so that parameters can be handed in."""

    def __init__(self, encoding: posenc.Encoding) -> None:
        super().__init__()
        self.of = encoding

    def forward(self, *args: Any) -> Any:
        return self.of.bias(*args)
