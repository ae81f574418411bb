"""Attention with a bias by distance as operators of torch's own, for models that are compiled.

Who traces a model sees shapes and no numbers: neither what a mask hides nor whether slots stand for positions, so that
the bias would have to be written out. An operator is one node of the graph whatever it does; it looks when it runs, and
goes through as a model does that is not compiled. The row of biases comes from outside, where it is computed in the
graph, so that what it is made of gets its gradients there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, library

from hf_posenc.config import Encoding
from hf_posenc.positions import Positions
from hf_posenc.reach import bias_by_distance
from hf_posenc.scores import Scores
from hf_posenc.stretches import Seen, seen_keys, within_reach
from hf_posenc.toeplitz import Bands, gradients, output_and_sums, trusted
from hf_posenc.written import Written, attend_written, blocks, given

NAMESPACE = re.sub(r"\W", "_", __name__)
"""Of the operators; the code beside a saved model is a module of its own and has its own."""


def attend_compiled(scores: Scores, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """Attend in a graph that is being made; arguments and result as below.

    Biases of more than the distance, or of positions that somebody handed over, so that distances may be larger than
    there are keys, and packed texts are written out for some queries at a time. None for single queries, whose bias is
    a row anyway, and for who exports a model: that is for torch's own operators, which there are where it is loaded.
    """
    if query.shape[2] == 1 or not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return None
    counted = scores.positions.counted and scores.positions.documents is None
    if counted and scores.encoding.overrides("distance_bias") and _trusted(query.dtype):
        return attend_by_operator(scores, query, key, value)
    return attend_written(scores, query, key, value)


def attend_by_operator(scores: Scores, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with a bias by distance as one node of a graph, with another one for its gradients.

    Args:
        scores: of a call whose positions are counted and whose texts are not packed.
        query: (b, h, q, d), rotated, not scaled.
        key: (b, h, k, d), rotated.
        value: (b, h, k, d).

    Returns:
        (b, q, h, d), zero for queries that see no key of the only stretch that their row sees.
    """
    keys = key.shape[2]
    distance = torch.arange(keys - 1, -keys, -1, device=query.device)
    table = bias_by_distance(scores, distance).expand(query.shape[1], -1)
    told = given(scores)
    call = [_seen(told, scores.triangle), *told]
    output: Tensor = _attend(query, key, value, table, call, scores.triangle, scores.scaling)[0]
    return output


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _trusted(dtype: torch.dtype) -> bool:
    return trusted(dtype)


@library.custom_op(f"{NAMESPACE}::seen", mutates_args=(), schema="(Tensor[] told, bool causal) -> Tensor")
def _seen(told: list[Tensor], causal: bool) -> Tensor:
    """Return what `seen_keys` does, as whole numbers.

    Args:
        told: what `given` gave, of texts that are not packed.
        causal: whether a call without a mask means a causal one.

    Returns:
        (1 + b, 2) int64: slot of the first query, and whether the call is causal, or -1 where slots say nothing; then
        the first slot of every row and the slot behind its last one.
    """
    query, key, slots, *mask = told
    found = seen_keys(Positions(query=query, key=key, slots=slots), mask[0] if mask else None, causal=causal)
    numbers = torch.full((1 + _rows(told), 2), -1)
    if found is not None:
        numbers[0, 0], numbers[0, 1] = found.start, found.causal
        numbers[1:] = torch.tensor(found.stretches)
    return numbers


@_seen.register_fake
def _(told: list[Tensor], causal: bool) -> Tensor:
    return torch.empty(1 + _rows(told), 2, dtype=torch.long)


def _rows(told: list[Tensor]) -> int:
    _, key, _, *mask = told
    return max(len(x) for x in (key, *mask))


def _read(numbers: Tensor) -> Seen | None:
    """Return what the numbers of `_seen` say."""
    (start, causal), *stretches = numbers.tolist()
    if causal < 0:
        return None
    stretches = stretches[:1] if all(stretch == stretches[0] for stretch in stretches) else stretches
    return Seen(start=start, stretches=tuple((first, last) for first, last in stretches), causal=bool(causal))


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """One stretch of keys, and the queries that see it.

    Attributes:
        rows: of the batch.
        queries: those that see any of the keys.
        keys: of the stretch.
        entries: of the table of all distances, those that the stretch needs.
        table: these, but minus infinity where they cannot count, (h, n).
        bands: heads by how far they see.
    """

    rows: slice
    queries: slice
    keys: slice
    entries: slice
    table: Tensor
    bands: Bands

    def of(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return its queries, keys and values of all, (b, h, n, d) each."""
        keys, values = (x[self.rows, :, self.keys] for x in (key, value))
        return query[self.rows, :, self.queries], keys, values


def _pieces(seen: Seen, query: Tensor, key: Tensor, table: Tensor, scale: float) -> Iterator[_Piece]:
    """Yield the stretches of a call that hold any key; the table is by all distances that there are."""
    for index, stretch in enumerate(seen.stretches):
        rows = slice(index, index + 1) if len(seen.stretches) > 1 else slice(None)
        blind, band = seen.band(stretch, query)
        if not band.keys or not band.queries:
            continue
        queries, keys = slice(blind, None), slice(*stretch)
        farthest, nearest = band.distances(table.device)[[0, -1]].tolist()
        entries = slice(key.shape[2] - 1 - farthest, key.shape[2] - nearest)
        cut, bands = within_reach(table[:, entries], query[rows, :, queries], key[rows, :, keys], band, scale)
        yield _Piece(rows=rows, queries=queries, keys=keys, entries=entries, table=cut, bands=bands)


@library.custom_op(
    f"{NAMESPACE}::attend",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor table, Tensor[] call, bool causal, float scale) "
    "-> (Tensor, Tensor)",
)
def _attend(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, call: list[Tensor], causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output, (b, q, h, d), and the log of the sum of every query's exponentials, (b, h, q), where it is needed.

    Args:
        query: (b, h, q, d).
        key: (b, h, k, d).
        value: (b, h, k, d).
        table: bias by distance from k - 1 down to 1 - k, (h, 2k - 1) float32 or float64.
        call: what `_seen` gave, and what it was given.
        causal: as `_seen` was given it.
        scale: factor that makes a score of a product.
    """
    rows, heads, queries, width = query.shape
    output, sums = query.new_zeros(rows, queries, heads, width), table.new_zeros(rows, heads, queries)
    seen = _read(call[0])
    if seen is None:
        for block in blocks(query, key):
            how: dict[str, Any] = {"block": block, "told": call[1:], "causal": causal, "scale": scale}
            output[:, block] = _written_out(query[:, :, block], key, value, table, **how).transpose(1, 2)
        return output, sums
    for piece in _pieces(seen, query, key, table, scale):
        states = piece.of(query, key, value)
        found, total = output_and_sums(*states, piece.table, bands=piece.bands, scale=scale)
        output[piece.rows, piece.queries], sums[piece.rows, :, piece.queries] = found.transpose(1, 2), total
    return output, sums


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, table: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, heads, queries, width = query.shape
    return query.new_empty(rows, queries, heads, width), table.new_empty(rows, heads, queries)


@library.custom_op(
    f"{NAMESPACE}::gradients",
    mutates_args=(),
    schema="(Tensor gradient, Tensor[] saved, Tensor[] call, bool causal, float scale, bool trained) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _gradients(
    gradient: Tensor, saved: list[Tensor], call: list[Tensor], causal: bool, scale: float, trained: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and table, the last one zero where it is not `trained`.

    Args:
        gradient: of the output of `_attend`, (b, q, h, d).
        saved: query, key, value and table as `_attend` got them, and what it gave.
        call: as `_attend` got it.
        causal: as `_attend` got it.
        scale: as `_attend` got it.
        trained: whether the gradient of the table is asked for.
    """
    query, key, value, table, output, sums = saved
    gradient, output = gradient.transpose(1, 2), output.transpose(1, 2)
    d_query, d_table = torch.zeros_like(query), torch.zeros_like(table)
    d_key, d_value = (torch.zeros_like(x, dtype=table.dtype) for x in (key, value))
    seen = _read(call[0])
    if seen is None:
        for block in blocks(query, key):
            how: dict[str, Any] = {"block": block, "told": call[1:], "causal": causal, "scale": scale}
            pull = torch.func.vjp(partial(_written_out, **how), query[:, :, block], key, value, table)[1]
            d_query[:, :, block], *others = pull(gradient[:, :, block])
            for whole, one in zip((d_key, d_value, d_table), others, strict=True):
                whole += one
    else:
        for piece in _pieces(seen, query, key, table, scale):
            of_gradient, of_output, of_sums = (x[piece.rows, :, piece.queries] for x in (gradient, output, sums))
            states = of_gradient, *piece.of(query, key, value), piece.table, of_output, of_sums
            found = gradients(*states, bands=piece.bands, scale=scale, trained=trained)
            d_query[piece.rows, :, piece.queries] = found[0]
            d_key[piece.rows, :, piece.keys] += found[1]
            d_value[piece.rows, :, piece.keys] += found[2]
            if found[3] is not None:
                d_table[:, piece.entries] += found[3]
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_table


@_gradients.register_fake
def _(gradient: Tensor, saved: list[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, table = saved[:4]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), torch.empty_like(table)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, table, call, *ctx.given = inputs
    ctx.save_for_backward(query, key, value, table, *output, *call)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    saved, call = list(ctx.saved_tensors[:6]), list(ctx.saved_tensors[6:])
    trained = ctx.needs_input_grad[3]
    *found, d_table = _gradients(gradient, saved, call, *ctx.given, trained)
    return *found, d_table if trained else None, [None] * len(call), None, None


_attend.register_autograd(_backward, setup_context=_keep)


class _Row(Encoding):
    """The bias that a table by all distances gives."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def distance_bias(self, distance: Tensor) -> Tensor:
        """Return (n,) -> (h, n)."""
        return self.table[:, self.table.shape[1] // 2 - distance.long()]


def _written_out(query: Tensor, key: Tensor, value: Tensor, table: Tensor, *, block: slice, **call: Any) -> Tensor:
    """Return the attention of a block of queries, (b, h, rows, d), with their bias written out."""
    found: Tensor = Written(_Row(table), **call)(block, query, key, value, None)
    return found
