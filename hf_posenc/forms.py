"""Which form the attention of one call takes, where there is a faster one than writing the bias out.

Where slots stand for positions, a bias of the distance alone needs one number a distance, and any other is written out
for a few queries at a time: where every query sees one stretch of keys, and positions count on along it, as under
padding, in a cache and in plain texts. Whatever is otherwise goes through the general form, in `scores`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.blocks import Blocks, attend_biased
from hf_posenc.config import Encoding
from hf_posenc.errors import UnsupportedEncodingError
from hf_posenc.flex import FLEX, attend_flex
from hf_posenc.positions import Positions
from hf_posenc.reach import attend_once, bias_by_distance, lowest_bias
from hf_posenc.scores import Attend, Output, Scores, attend_by_length, attend_in_blocks, exactly, own_attention
from hf_posenc.toeplitz import CHUNK, Band, Heads, attend, trusted

WINDOWED = 2048
"""Keys from which on heads with windows of their own take less time than all of them together."""
FEWEST = 1024
"""Keys from which on it pays to find out what a single query sees."""


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


def form_of(encoding: Encoding, model: PreTrainedModel) -> str:
    """Say in which form a model attends plain texts with an encoding, in words; layers that differ are all named."""
    layers = getattr(encoding, "layers", None)
    if layers is not None:
        return ", ".join(dict.fromkeys(form_of(layer, model) for layer in layers))
    if encoding.overrides("score"):
        return "scores of its own, in blocks of queries"
    if encoding.rotation_grows_after is not None:
        return "each length by itself past the original one"
    if not encoding.overrides("bias"):
        return "the stock attention function"
    if model.config._attn_implementation == FLEX:
        return "a bias by distance, looked up by flex_attention"
    fast = model.config._attn_implementation == "sdpa" and model.device.type == "cpu" and trusted(model.dtype)
    if fast and not encoding.overrides("temperature"):
        if encoding.overrides("distance_bias"):
            return "a row of biases by distance"
        if encoding.bias_settles_at is not None:
            return "a bias of near keys, in blocks of queries"
    return "a bias written out, in blocks of queries"


def attend_in_form(
    scores: Scores, attend: Attend, query: Tensor, key: Tensor, value: Tensor, *, backend: str, **given: Any
) -> Output:
    """Attend in the fastest form that gives what the encoding says.

    Args:
        scores: of the call.
        attend: the attention function of the model.
        query: (b, h, q, d), rotated unless keys are cached bare, not scaled.
        key: (b, h_kv, k, d).
        value: (b, h_kv, k, d).
        backend: name of the attention function.
        **given: what else it is given; `dropout`, `softcap` and temperatures keep the fast forms away.

    Returns:
        Output (b, q, h, d), and the attention weights (b, h, q, k) where the backend gives them.
    """
    encoding, dropout = scores.encoding, given.get("dropout") or 0.0
    if backend == FLEX:
        return attend_flex(scores, query, key, value, **given)
    if encoding.overrides("score") or encoding.overrides("output_bias"):
        return attend_in_blocks(
            scores, own_attention(scores, dropout=dropout, maps=backend == "eager"), query, key, value
        )
    if encoding.rotation_grows_after is not None:
        return attend_by_length(scores, attend, query, key, value)
    plain = scores.factor is None and not dropout and given.get("softcap") is None
    if backend == "sdpa" and encoding.overrides("bias") and plain:
        output = attend_along(scores, query, key, value)
        if output is not None:
            return output, None
    return attend_in_blocks(scores, attend, query, key, value)


def attend_along(scores: Scores, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """Attend where every query sees one stretch of keys; None where the general form has to do it.

    Args:
        scores: of the call.
        query: (b, h, q, d), rotated, not scaled.
        key: (b, h_kv, k, d), rotated.
        value: (b, h_kv, k, d).

    Returns:
        (b, q, h, d), zero for queries that see no key.
    """
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    if (once := query.shape[2] == 1) and (key.shape[2] < FEWEST or torch.is_grad_enabled()):
        return None
    if {key.dtype, value.dtype} != {query.dtype} or value.shape[-1] != query.shape[-1] or not trusted(query.dtype):
        return None
    mask, known = scores.mask, scores.positions.known
    asked = id(mask), key.shape[2]
    if asked not in known:  # the mask stays in there, so that no other one can take its id
        known[asked] = mask, seen_keys(scores.positions, mask, causal=scores.triangle)
    seen: Seen | None = known[asked][1]
    if seen is None:
        return None
    if once:
        return _attend_once(scores, query, key, value, seen)
    groups = query.shape[1] // key.shape[1]
    states = query, *(x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    if len(seen.stretches) == 1:
        return _attend_stretch(scores, states, seen, seen.stretches[0])
    outputs = []
    for index, stretch in enumerate(seen.stretches):
        row = tuple(x[index : index + 1] for x in states)
        outputs.append(_attend_stretch(scores.row(index), row, seen, stretch))
    return torch.cat(outputs)


def _attend_once(scores: Scores, query: Tensor, key: Tensor, value: Tensor, seen: Seen) -> Tensor | None:
    """Attend with one query a row, (b, 1, h, d); None where rows do not see their own keys, or for other biases."""
    firsts, ends = zip(*seen.stretches, strict=True)
    if {*ends} != {seen.start + 1} or max(firsts) > seen.start or not scores.encoding.overrides("distance_bias"):
        return None
    return attend_once(scores, query, key, value, slot=seen.start, firsts=list(firsts))


def _attend_stretch(scores: Scores, states: tuple[Tensor, ...], seen: Seen, stretch: tuple[int, int]) -> Tensor:
    """Attend over one stretch of keys; (b, q, h, d)."""
    query, key, value = states
    first, last = stretch
    if last == first:
        return torch.zeros_like(query).transpose(1, 2)
    blind = max(0, first - seen.start) if seen.causal else 0  # queries before the first key
    query, key, value = query[:, :, blind:], key[:, :, first:last], value[:, :, first:last]
    shape = {"queries": query.shape[2], "keys": last - first, "first": seen.start + blind - first}
    if scores.encoding.overrides("distance_bias"):
        output = _by_distance(scores, (query, key, value), Band(**shape, causal=seen.causal))
    else:
        at = scores.positions.part(slice(blind, None), slice(first, last))
        output = _by_blocks(scores, (query, key, value), at, causal=seen.causal, **shape)
    return nn.functional.pad(output.transpose(1, 2), (0, 0, 0, 0, blind, 0)) if blind else output.transpose(1, 2)


def _by_blocks(scores: Scores, states: tuple[Tensor, ...], at: Positions, **shape: Any) -> Tensor:
    """Attend with a bias that is written out for a block of queries at a time; (b, h, q, d)."""
    encoding = scores.encoding

    def bias(query: Tensor, key: Tensor, gates: Tensor | None, rows: slice, keys: slice) -> Tensor:
        with exactly(query.device):
            found = encoding.bias(query * scores.scaling, key, dataclasses.replace(at.part(rows, keys), gates=gates))
        if found is None:
            raise UnsupportedEncodingError(f"{type(encoding).__name__} was to give a bias, not None.")
        return found.to(scores.dtype)

    return attend_biased(
        *states,
        gates=at.gates,
        bias=bias,
        parameters=[parameter for parameter in encoding.parameters() if parameter.requires_grad],
        blocks=Blocks(**shape, settled=encoding.bias_settles_at),
        scale=scores.scaling,
    )


def _by_distance(scores: Scores, states: tuple[Tensor, ...], band: Band) -> Tensor:
    """Attend with a bias that is given by its distances alone; (b, h, q, d)."""
    query, key, value = states
    signed = band.distances(query.device)
    table = bias_by_distance(scores, signed.clamp(min=0) if band.causal else signed).expand(query.shape[1], -1)
    windows: dict[int, Heads] = {band.window: slice(None)}
    if band.causal:
        table = table.masked_fill(signed < 0, -torch.inf)
        if CHUNK < band.first + band.queries <= band.keys:
            table = table.masked_fill(_too_far(query, key, table, band, scores.scaling), -torch.inf)
            windows = _windows(table, signed) if band.keys >= WINDOWED else windows
    bands = tuple((heads, dataclasses.replace(band, window=window)) for window, heads in windows.items())
    return attend(query, key, value, table.contiguous(), bands=bands, scale=scores.scaling)


@torch.no_grad()
def _too_far(query: Tensor, key: Tensor, table: Tensor, band: Band, scale: float) -> Tensor:
    """Tell at which distances no key can change a result by more than its rounding, (h, n) bool.

    Numbers that small are slow besides: processors take their time over what is below the smallest normal number.
    """
    place = band.first + band.queries
    longest = torch.linalg.vector_norm(key.to(table.dtype), dim=-1).amax(-1, keepdim=True)
    own = key[:, :, band.first : place]
    lowest = lowest_bias(table[:, place - 1], query, own, longest, keys=band.keys, scale=scale)
    return table < lowest[:, None]


def _windows(table: Tensor, distance: Tensor) -> dict[int, Heads]:
    """Return the heads by how far they see, in tokens: powers of two, or no end where little would be left out."""
    windows: dict[int, list[int]] = {}
    reach = torch.where(table.isinf(), 0, distance).amax(-1) + 1
    for head, tokens in enumerate(reach.tolist()):
        window = max(CHUNK, 2 ** math.ceil(math.log2(tokens)))
        windows.setdefault(window if 2 * window <= int(distance[0]) else sys.maxsize, []).append(head)
    return {window: heads if len(windows) > 1 else slice(None) for window, heads in windows.items()}
