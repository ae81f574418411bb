"""Attention with a bias that is constant along diagonals, straight from the row of numbers that the bias is.

Against queries in reverse order such a bias is a row that moves on by one from query to query, and a kernel reads that
mask out of the row through strides that overlap: no number is stored twice. Causal queries go through in chunks, so
that keys ahead of a chunk cost nothing. The gradient of a trained row are sums along diagonals, chunk by chunk.

The kernel is that of torch for CPUs. That it takes such strides, and a float32 mask beside queries in half precision,
is written nowhere, so `trusted` tries it on a few tokens, against float64.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_posenc.positions import working_dtype
from hf_posenc.scores import exactly

CHUNK = 256
"""Causal queries a kernel call: fewer make more calls, more look at more keys that are ahead of them."""
HALF_CHUNK = 512
"""The same in half precision, where the kernel packs all keys anew at every call."""
CACHED = 2**22
"""Bytes of keys and values that a thread reads as fast as fewer."""
AT_ONCE = 2**20
"""Scores of the backward pass of a trained row that are materialised at a time, 4 MiB in float32."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Dtype of the queries -> largest deviation from float64 with which the kernel is trusted, relative to the largest."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """Where queries and keys lie to each other: query i has the slot of key `first` + i.

    Attributes:
        queries: number of queries.
        keys: number of keys, one a slot.
        first: key slot of the first query; negative, or past the last key, where none stands there.
        causal: whether no query sees keys behind its own slot; `first` is at least 0 then.
        window: where causal, the first distance from which on no key counts.
        chunk: queries a kernel call, where causal.
    """

    queries: int
    keys: int
    first: int
    causal: bool
    window: int = sys.maxsize
    chunk: int = CHUNK

    def distances(self, device: torch.device) -> Tensor:
        """Return every distance, query minus key slot, that a kernel call may meet, descending: (n,) int64."""
        lowest = self.first - self.keys + 1
        if self.causal:
            lowest = max(lowest, 1 - min(self.chunk, self.queries))
        return torch.arange(self.first + self.queries - 1, lowest - 1, -1, device=device)

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Yield the queries of every chunk, and the keys that they see together."""
        size = self.chunk if self.causal else self.queries
        for begin in range(0, self.queries, size):
            end = min(begin + size, self.queries)
            if self.causal:
                behind, ahead = self.first + begin - self.window + 1, self.first + end
                yield slice(begin, end), slice(min(max(0, behind), self.keys - 1), min(self.keys, ahead))
            else:
                yield slice(begin, end), slice(0, self.keys)

    def row(self, table: Tensor, part: slice, seen: slice) -> Tensor:
        """Return what a chunk needs of a table by descending distance: (h, n) -> (h, queries + keys - 1), a view."""
        begin = self.queries - part.stop + seen.start
        return table[:, begin : begin + part.stop - part.start + seen.stop - seen.start - 1]

    def mask(self, table: Tensor, part: slice, seen: slice) -> Tensor:
        """Return the bias of a chunk, its queries reversed: (1, h, queries, keys), a view of the table, (h, n)."""
        row = self.row(table, part, seen)
        size = (1, len(row), part.stop - part.start, seen.stop - seen.start)
        return row.as_strided(size, (row.stride(0), row.stride(0), 1, 1))


Bands = tuple[tuple[slice, Band], ...]


def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor, *, bands: Bands, scale: float) -> Tensor:
    """Return the attention of queries over keys whose scaled scores gain the number of their distance.

    Args:
        query: (b, h, q, d).
        key: (b, h, k, d).
        value: (b, h, k, d).
        table: (h, n) float32 (float64 for float64 queries), by the distances of the bands; minus infinity where causal
            and below zero.
        bands: neighbouring heads, every one of them once, and how they lie; bands differ in their windows only.
        scale: factor that makes a score of a product.

    Returns:
        (b, h, q, d), in memory as (b, q, h, d).
    """
    output: Tensor = _Attention.apply(query, key, value, table, bands, scale)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, table: Tensor, bands: Bands, scale: float
    ) -> Tensor:
        output, sums = output_and_sums(query, key, value, table, bands=bands, scale=scale)
        ctx.save_for_backward(query, key, value, table, output, sums)
        ctx.bands, ctx.scale = bands, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        trained = ctx.needs_input_grad[3]
        found = gradients(gradient, *ctx.saved_tensors, bands=ctx.bands, scale=ctx.scale, trained=trained)
        return *found, None, None


def output_and_sums(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, *, bands: Bands, scale: float
) -> tuple[Tensor, Tensor]:
    """Return what `attend` does and, (b, h, q), the log of the sum of a query's exponentials; arguments as there."""
    rows, heads, queries, width = query.shape
    output = query.new_empty(rows, queries, heads, width).transpose(1, 2)
    sums = table.new_empty(rows, heads, queries)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for some, band in _few_at_a_time(bands, key):
        row, near = table[some], [_side_by_side(x[:, some]) for x in (key, value)]
        for part, seen in band.chunks():
            states = _turned(query, some, part), *(x[:, :, seen] for x in near)
            found, total = kernel(*states, attn_mask=band.mask(row, part, seen), scale=scale)
            output[:, some, part], sums[:, some, part] = found.flip(2), total.flip(2)
    return output, sums


def gradients(
    gradient: Tensor, *saved: Tensor, bands: Bands, scale: float, trained: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and, where it is trained, of the table.

    Args:
        gradient: of the output, (b, h, q, d).
        *saved: query, key, value and table as in `attend`, output and sums as `output_and_sums` gave them.
        bands: as in `attend`.
        scale: as in `attend`.
        trained: whether the gradient of the table is asked for.
    """
    query, key, value, table, output, sums = saved
    wide = table.dtype  # sums over chunks do not suffer from half precision
    d_query, d_table = torch.empty_like(query), torch.zeros_like(table) if trained else None
    d_key, d_value = (x.new_zeros(x.shape, dtype=wide) for x in (key, value))
    with exactly(query.device):
        for some, band in _for_all_gradients(bands) if trained else _few_at_a_time(bands, key):
            row, near = table[some], [_side_by_side(x[:, some]) for x in (key, value)]
            d_row = torch.zeros_like(row)
            for part, seen in band.chunks():
                mask = band.mask(row, part, seen)
                states = [_turned(x, some, part) for x in (gradient, query, output, sums)]
                states += [x[:, :, seen] for x in near]
                of_key, of_value = d_key[:, some, seen], d_value[:, some, seen]
                if d_table is None:
                    of_query = _add_gradients(*states, of_key, of_value, mask=mask, scale=scale)
                else:
                    along = band.row(d_row, part, seen)
                    of_query = _add_all_gradients(*states, of_key, of_value, along, mask=mask, scale=scale)
                d_query[:, some, part] = of_query.flip(2).to(query.dtype)
            if d_table is not None:
                d_table[some] = d_row
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_table


def _few_at_a_time(bands: Bands, key: Tensor) -> Iterator[tuple[slice, Band]]:
    """Yield the heads of bands, as many at a time as have keys and values that stay near a processor.

    What a chunk sees of these the next one reads again. Keys are (b, h, k, d), and so are values.
    """
    rows, _, keys, width = key.shape
    for heads, band in bands:
        each = 2 * rows * min(keys, band.window + band.chunk) * width * key.element_size()
        count = max(1, torch.get_num_threads() * CACHED // each)
        for begin in range(heads.start, heads.stop, count):
            yield slice(begin, min(begin + count, heads.stop)), band


def _for_all_gradients(bands: Bands) -> Iterator[tuple[slice, Band]]:
    """Yield the heads of bands in the chunks that suit scores which are materialised: no kernel packs anything then."""
    return ((heads, dataclasses.replace(band, chunk=min(band.chunk, CHUNK))) for heads, band in bands)


def _side_by_side(states: Tensor) -> Tensor:
    """Return keys or values, (b, h, k, d), with the tokens of a head next to each other, as the kernel reads them fast.

    Where heads lie side by side for every token, they miss the caches from 4k tokens on.
    """
    return states if states.stride(2) == states.shape[3] else states.contiguous()


def _turned(states: Tensor, some: slice, part: slice) -> Tensor:
    """Return a chunk of some heads of (b, h, q, ...), its queries reversed; the kernel reads numbers side by side."""
    turned = states[:, some, part].flip(2)
    return turned if turned.stride(-1) == 1 else turned.contiguous()


def _add_gradients(*states: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Add to the gradients of key and value what the kernel gives for one chunk, and return that of the query."""
    gradient, query, output, sums, key, value, d_key, d_value = states
    d_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, sums, 0.0, False, attn_mask=mask, scale=scale
    )
    d_key += of_key
    d_value += of_value
    found: Tensor = d_query
    return found


def _add_all_gradients(*states: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Add to the gradients of key, value and the row of the bias those of one chunk, and return that of the query.

    With P the weights and dP = dO V^T, the gradient of the scores is dS = P (dP - rowsum(dO O)). Its sums along the
    diagonals are those of the columns of a buffer into which every row is written one further to the right.
    """
    gradient, query, output, sums, key, value, d_key, d_value, d_row = (x.to(mask.dtype) for x in states)
    query, total = query * scale, (gradient * output).sum(-1, keepdim=True)
    d_query = torch.empty_like(query)
    heads, queries, keys = mask.shape[1:]
    size = min(heads, max(1, AT_ONCE // (queries * keys))), queries, keys
    skewed = mask.new_zeros(*size[:2], queries + keys - 1)
    diagonals = skewed.as_strided(size, (skewed.stride(0), queries + keys, 1))
    buffer = mask.new_empty(size)
    for index in range(len(query)):
        for begin in range(0, heads, len(buffer)):
            some = slice(begin, min(begin + len(buffer), heads))
            q, k, v, g = (x[index, some] for x in (query, key, value, gradient))
            scores = torch.baddbmm(mask[0, some], q, k.mT, out=buffer[: len(q)])
            weights = exponentials(scores.sub_(sums[index, some, :, None]))
            scores = torch.bmm(g, v.mT).sub_(total[index, some])
            scores = torch.mul(scores, weights, out=diagonals[: len(q)])
            d_row[some] += skewed[: len(q)].sum(1)
            d_query[index, some] = torch.bmm(scores, k)
            d_key[index, some].baddbmm_(scores.mT, q)
            d_value[index, some].baddbmm_(weights.mT, g)
    return d_query.mul_(scale)


def exponentials(scores: Tensor) -> Tensor:
    """Return exp(scores) in their place, 0 below e^-60: MKL takes many times as long for what underflows."""
    return nn.functional.threshold(scores.clamp_(min=-60).exp_(), 1e-26, 0.0, inplace=True)


def trusted(dtype: torch.dtype) -> bool:
    """Tell whether the kernel gives the right output and gradients for queries of a dtype, by trying it once.

    It does not within the transforms of `torch.func`, which see through torch's own operators only.
    """
    return dtype in TOLERANCE and not torch._C._are_functorch_transforms_active() and _tried(dtype)


@functools.cache
def _tried(dtype: torch.dtype) -> bool:
    with torch.inference_mode(False), torch.enable_grad(), exactly(torch.device("cpu")):
        try:
            return _largest_deviation(dtype) <= TOLERANCE[dtype]
        except (RuntimeError, NotImplementedError, AttributeError):  # another torch, another kernel
            return False


def _largest_deviation(dtype: torch.dtype) -> float:
    """Return how far output and gradients are off a dense computation in float64, relative to the largest of each."""
    band, slots = Band(queries=21, keys=24, first=3, causal=True, chunk=8), torch.arange(24)
    wave = torch.arange(2 * 24 * 8, dtype=torch.float64).mul(0.7).sin().view(1, 2, 24, 8)
    q, k, v = (x.to(dtype).requires_grad_() for x in (3 * wave[:, :, 3:], 3 * wave.roll(5), wave.roll(11)))
    distance = band.distances(slots.device)
    # far below zero, where half precision has no room for what distances differ by
    table = (-300 - 0.37 * distance.double()).expand(2, -1).to(working_dtype(q))
    query, key, value, bias = (x.detach().double().requires_grad_() for x in (q, k, v, table))
    apart = slots[3:, None] - slots
    scores = query @ key.mT / 3 + bias[:, (distance[0] - apart).clamp(max=len(distance) - 1)]
    output = scores.masked_fill(apart < 0, -torch.inf).softmax(-1) @ value
    weight = output.detach()
    exact = [output, *torch.autograd.grad((output * weight).sum(), (query, key, value, bias))]
    worst = 0.0
    for trained in (False, True):
        row = table.masked_fill(distance < 0, -torch.inf).requires_grad_(trained)
        found = attend(q, k, v, row, bands=((slice(0, 1), band), (slice(1, 2), band)), scale=1 / 3)
        inputs = (q, k, v, row) if trained else (q, k, v)
        gradients = torch.autograd.grad((found * weight.to(dtype)).sum(), inputs)
        for one, other in zip((found, *gradients), exact, strict=False):
            worst = max(worst, float((one - other).detach().abs().max() / other.detach().abs().max()))
    return worst
