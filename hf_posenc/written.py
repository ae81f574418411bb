"""Attention with a bias that is written out for some queries at a time, as an operator of torch's own.

For models that are compiled: a graph would write the bias out for all queries together, and has to take whatever a
compiler cannot look at. An operator is one node of the graph. It takes the encoding by a number, and its parameters
beside it, so that they get their gradients: what was written out is written out again for them, as a model does that
is not compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, library, nn

from hf_posenc.config import Encoding
from hf_posenc.positions import Positions, working_dtype
from hf_posenc.scores import SCORES_AT_ONCE, Scores

NAMESPACE = re.sub(r"\W", "_", __name__)
"""Of the operators; the code beside a saved model is a module of its own and has its own."""
_ENCODINGS: WeakValueDictionary[int, Encoding] = WeakValueDictionary()
"""Encodings by the number that graphs know them by."""


def attend_written(scores: Scores, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with a bias as one node of a graph, with another one for its gradients.

    Args:
        scores: of a call whose encoding overrides `bias`, without a factor.
        query: (b, h, q, d), rotated, not scaled.
        key: (b, h, k, d), rotated.
        value: (b, h, k, d).

    Returns:
        (b, q, h, d).
    """
    encoding = scores.encoding
    _note(encoding)
    number = id(encoding)  # the graph is made anew for another encoding
    states, how = (query, key, value, scores.positions.gates), (scores.triangle, scores.scaling)
    output: Tensor = _attend(*states, list(encoding.parameters()), given(scores), number, *how)
    return output


def given(scores: Scores) -> list[Tensor]:
    """Return what operators are given of a call.

    That is the positions of queries, (1|b, q), and keys, (1|b, k), the slots of the queries' own keys, (q,), and, where
    there is one, the mask as in `Scores`, with keys of other packed texts hidden.
    """
    positions, mask = scores.positions, scores.mask
    if positions.documents is not None:
        mask = scores.mask_at(torch.arange(positions.query.shape[1]), positions.key.shape[1])
    return [positions.query, positions.key, positions.own_slots(), *([] if mask is None else [mask])]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note(encoding: Encoding) -> None:
    _ENCODINGS[id(encoding)] = encoding


def blocks(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Yield the queries, (b, h, q, d), whose bias for all keys, (b, h, k, d), is written out at a time."""
    rows, heads, queries, _ = query.shape
    size = max(1, SCORES_AT_ONCE // (rows * heads * key.shape[2]))
    for begin in range(0, queries, size):
        yield slice(begin, min(begin + size, queries))


class Written(nn.Module):
    """Attention of a block of queries, a module so that it can be asked with the weights that a graph was given.

    Args:
        encoding: overrides `bias`.
        told: what `given` gave.
        causal: whether a call without a mask means a causal one.
        scale: factor that makes a score of a product.
    """

    def __init__(self, encoding: Encoding, told: list[Tensor], *, causal: bool, scale: float) -> None:
        super().__init__()
        self.encoding = encoding
        self.told = told
        self.causal = causal
        self.scale = scale

    def forward(self, block: slice, query: Tensor, key: Tensor, value: Tensor, gates: Tensor | None) -> Tensor:
        """Return (b, h, rows, d) for the block's queries, (b, h, rows, d), and all keys and values, (b, h, k, d)."""
        of_query, of_key, slots, *mask = self.told
        positions = Positions(query=of_query, key=of_key, slots=slots, gates=gates)
        how: dict[str, Any] = {"mask": mask[0] if mask else None, "dtype": working_dtype(query), "scaling": self.scale}
        scores = Scores(self.encoding, positions, causal=self.causal, **how)
        rows = torch.arange(block.start, block.stop)
        key, value = (x[:, :, : scores.keys_seen(rows)] for x in (key, value))
        added = scores.added(query, key, rows)
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=added, scale=self.scale)

    def with_weights(self, weights: Sequence[Tensor], *inputs: Any) -> Tensor:
        """Return what `forward` does of the inputs, with these in place of all parameters of the encoding."""
        names = [f"encoding.{name}" for name, _ in self.encoding.named_parameters()]
        found: Tensor = torch.func.functional_call(self, dict(zip(names, weights, strict=True)), inputs)
        return found


@library.custom_op(
    f"{NAMESPACE}::attend",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? gates, Tensor[] parameters, Tensor[] told, "
    "int encoding, bool causal, float scale) -> Tensor",
)
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Tensor | None,
    parameters: list[Tensor],
    told: list[Tensor],
    encoding: int,
    causal: bool,
    scale: float,
) -> Tensor:
    """Return the output, (b, q, h, d).

    Args:
        query: (b, h, q, d).
        key: (b, h, k, d).
        value: (b, h, k, d).
        gates: (b, h, k), or None.
        parameters: all of the encoding.
        told: as `Written` takes it.
        encoding: its number.
        causal: as `Written` takes it.
        scale: as `Written` takes it.
    """
    written = Written(_ENCODINGS[encoding], told, causal=causal, scale=scale)
    found = [
        written.with_weights(parameters, block, query[:, :, block], key, value, gates) for block in blocks(query, key)
    ]
    return torch.cat(found, dim=2).transpose(1, 2).contiguous()


@_attend.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    rows, heads, queries, width = query.shape
    return query.new_empty(rows, queries, heads, width)


@library.custom_op(
    f"{NAMESPACE}::gradients",
    mutates_args=(),
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? gates, Tensor[] parameters, "
    "Tensor[] told, int encoding, bool causal, float scale) -> Tensor[]",
)
def _gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Tensor | None,
    parameters: list[Tensor],
    told: list[Tensor],
    encoding: int,
    causal: bool,
    scale: float,
) -> list[Tensor]:
    """Return the gradients of query, key, value, gates if there are any, and parameters, for that of the output."""
    written = Written(_ENCODINGS[encoding], told, causal=causal, scale=scale)
    shared = [key, value, *([] if gates is None else [gates]), *parameters]
    wide = [torch.zeros_like(x, dtype=working_dtype(x)) for x in shared]  # sums do not suffer from half precision
    d_query = torch.zeros_like(query)
    for block in blocks(query, key):

        def attended(query: Tensor, key: Tensor, value: Tensor, *others: Tensor, block: slice = block) -> Tensor:
            own, weights = (None, others) if gates is None else (others[0], others[1:])
            return written.with_weights(weights, block, query, key, value, own)

        pull = torch.func.vjp(attended, query[:, :, block], *shared)[1]
        d_query[:, :, block], *found = pull(gradient.transpose(1, 2)[:, :, block])
        for whole, one in zip(wide, found, strict=True):
            whole += one
    return [d_query, *(whole.to(x.dtype) for whole, x in zip(wide, shared, strict=True))]


@_gradients.register_fake
def _(gradient: Tensor, *inputs: Any) -> list[Tensor]:
    query, key, value, gates, parameters = inputs[:5]
    return [torch.empty_like(x) for x in (query, key, value, gates, *parameters) if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, gates, parameters, told, *ctx.how = inputs
    ctx.save_for_backward(query, key, value, gates, *parameters, *told)
    ctx.parameters = len(parameters)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    states, others = ctx.saved_tensors[:4], list(ctx.saved_tensors[4:])
    parameters, told = others[: ctx.parameters], others[ctx.parameters :]
    found = _gradients(gradient, *states, parameters, told, *ctx.how)
    d_gates = None if states[3] is None else found[3]
    return *found[:3], d_gates, found[len(found) - len(parameters) :], [None] * len(told), None, None, None


_attend.register_autograd(_backward, setup_context=_keep)
