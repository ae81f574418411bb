"""Which keys the queries of a call see, and how far back those reach that a bias by distance leaves to count.

Where every query sees one stretch of keys, and positions count on along it, as under padding, in a cache and in plain
texts, slots stand for positions, and a row of numbers says all about a bias by distance.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.positions import Positions
from hf_posenc.reach import lowest_bias
from hf_posenc.toeplitz import CHUNK, HALF_CHUNK, Band, Bands

WINDOWED = 2048
"""Keys from which on heads with windows of their own take less time than all of them together."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Which keys the queries of a call see: those of one stretch a row, up to their own where the call is causal.

    Attributes:
        start: slot of the first query among the keys.
        stretches: first slot, and slot behind the last one, of every row of the batch, or once for all rows.
        causal: whether no query sees keys behind its own slot.
    """

    start: int
    stretches: tuple[tuple[int, int], ...]
    causal: bool

    def band(self, stretch: tuple[int, int], query: Tensor) -> tuple[int, Band]:
        """Return how many of the queries, (b, h, q, d), stand before a stretch, and how the others lie to its keys."""
        (first, last), queries = stretch, query.shape[2]
        blind = min(queries, max(0, first - self.start)) if self.causal else 0
        lie = {"queries": queries - blind, "keys": last - first, "first": self.start + blind - first}
        return blind, Band(**lie, causal=self.causal, chunk=HALF_CHUNK if query.element_size() == 2 else CHUNK)


def seen_keys(positions: Positions, mask: Tensor | None, *, causal: bool) -> Seen | None:
    """Return which keys a call sees, or None where that is more than a stretch a row, or where positions have gaps.

    Args:
        positions: of the call.
        mask: None, boolean or additive, (1|b, 1|h, 1|q, k); an additive one is not looked into.
        causal: whether a call without a mask means a causal one.
    """
    if positions.documents is not None:
        return None
    start, queries = int(positions.own_slots()[0]), positions.query.shape[1]
    end, slots = start + queries, torch.arange(positions.key.shape[1])
    if mask is None:
        keep = (slots < end)[None]
    elif mask.dtype != torch.bool or mask.shape[1] != 1:
        return None
    else:
        mask = mask.expand(-1, -1, queries, -1)
        keep = mask[:, 0, -1]  # the last query sees whatever any query sees
        causal = not torch.equal(mask[:, 0, 0], keep)
        for rows in torch.arange(queries).split(CHUNK):
            expected = keep[:, None] & (slots <= (start + rows)[:, None]) if causal else keep[:, None]
            if not torch.equal(mask[:, 0, rows], expected.expand(-1, len(rows), -1)):
                return None
    count = max(len(keep), len(positions.key))
    keep, origin = keep.expand(count, -1), (positions.key - slots).expand(count, -1)
    first = keep.int().argmax(-1, keepdim=True)
    last = first + keep.sum(-1, keepdim=True)
    plain = (keep == ((slots >= first) & (slots < last))) & ((origin == origin.gather(1, first)) | ~keep)
    if not (plain.all() and torch.equal(positions.query, positions.key[:, start:end])):
        return None
    stretches = tuple(zip(first[:, 0].tolist(), last[:, 0].tolist(), strict=True))
    return Seen(start=start, stretches=stretches[:1] if len(set(stretches)) == 1 else stretches, causal=causal)


def texts(documents: Tensor) -> list[list[slice]] | None:
    """Return where in its row each packed text stands, (b, n) int64; None where one is interleaved with another."""
    rows = []
    for row in documents:
        numbers, sizes = row.unique_consecutive(return_counts=True)
        if len(numbers) > len(numbers.unique()):
            return None
        ends = sizes.cumsum(0).tolist()
        rows.append([slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)])
    return rows


def within_reach(table: Tensor, query: Tensor, key: Tensor, band: Band, scale: float) -> tuple[Tensor, Bands]:
    """Return a table without the distances that cannot count, and the heads in bands by how far they see.

    Args:
        table: bias by the distances of the band, (h, n) float32 or float64.
        query: (b, h, q, d).
        key: (b, h, k, d).
        band: how queries and keys lie, without a window.
        scale: factor that makes a score of a product.
    """
    windows = [band.window] * len(table)
    signed = band.distances(table.device)
    if band.causal:
        table = table.masked_fill(signed < 0, -torch.inf)
    if band.first >= 0 and CHUNK < band.first + band.queries <= band.keys:
        table = table.masked_fill(_too_far(query, key, table, band, scale), -torch.inf)
        windows = _windows(table, signed) if band.causal and band.keys >= WINDOWED else windows
    bands = []
    for window, run in itertools.groupby(range(len(table)), key=windows.__getitem__):
        heads = list(run)
        bands.append((slice(heads[0], heads[-1] + 1), dataclasses.replace(band, window=window)))
    return table.contiguous(), tuple(bands)


@torch.no_grad()
def _too_far(query: Tensor, key: Tensor, table: Tensor, band: Band, scale: float) -> Tensor:
    """Tell at which distances no key can change a result by more than its rounding, (h, n) bool.

    Numbers that small are slow besides: processors take their time over what is below the smallest normal number.
    """
    place, key = band.first + band.queries, key.to(table.dtype)
    longest = torch.linalg.vector_norm(key, dim=-1).amax(-1, keepdim=True)
    own = key[:, :, band.first : place]
    lowest = lowest_bias(table[:, place - 1], query, own, longest, keys=band.keys, scale=scale)
    return table < lowest[:, None]


def _windows(table: Tensor, distance: Tensor) -> list[int]:
    """Return how far every head sees, in tokens: a power of two, or no end where little would be left out."""
    reach = torch.where(table.isinf(), 0, distance).amax(-1) + 1
    windows = [max(CHUNK, 2 ** math.ceil(math.log2(tokens))) for tokens in reach.tolist()]
    return [window if 2 * window <= int(distance[0]) else sys.maxsize for window in windows]
