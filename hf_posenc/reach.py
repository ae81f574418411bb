"""How far back a query sees where a bias drowns whatever is farther, and single queries that look no farther.

A score is at most |q| max|k|, and a query's own key has the weight of q k. A key whose bias is so far below that of the
own key weighs less than e^-margin against it, and with the margin taken here all such keys together weigh less than
half the distance from 1 to the next number: an output changes by less than that times twice the largest value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedEncodingError
from hf_posenc.scores import Scores, exactly

A_CALL = 1024
"""Keys that take a head about as long as calling a kernel does."""
STEP = 64
"""Keys in whole multiples of which a single query is spared them."""


def bias_by_distance(scores: Scores, distance: Tensor) -> Tensor:
    """Return what the encoding says of distances, (n,) -> (1|h, n); raises UnsupportedEncodingError where it does not.

    Args:
        scores: of a call whose encoding overrides `distance_bias`.
        distance: query minus key, whole numbers.
    """
    with exactly(distance.device):
        found = scores.encoding.distance_bias(distance.to(scores.dtype))
    if found is None:
        raise UnsupportedEncodingError(f"{type(scores.encoding).__name__} was to give a bias by distance, not None.")
    return found


def lowest_bias(own: Tensor, query: Tensor, key: Tensor, longest: Tensor, *, keys: int, scale: float) -> Tensor:
    """Return the bias of every head below which keys cannot change a result by more than its rounding, (h,).

    Args:
        own: bias of a query's own key, (h,), float32 or float64.
        query: (b, h, q, d).
        key: (b, h, q, d), the own key of every query.
        longest: the largest norm of a key, (1|b, h, 1), or a bound on it.
        keys: how many there are.
        scale: factor that makes a score of a product.
    """
    query, key = query.to(own.dtype), key.to(own.dtype)
    most = torch.linalg.vector_norm(query, dim=-1) * longest
    spread = (scale * (most - torch.linalg.vecdot(query, key))).amax((0, 2))
    lowest: Tensor = own - spread - math.log(2 * keys / torch.finfo(own.dtype).eps)
    return lowest


def attend_once(scores: Scores, query: Tensor, key: Tensor, value: Tensor, *, slot: int, firsts: list[int]) -> Tensor:
    """Attend with one query a row and a bias by distance, every head over as many keys as can change its result.

    Args:
        scores: of the call; far keys are left out where `longest` is known.
        query: (b, h, 1, d).
        key: (b, h_kv, k, d).
        value: (b, h_kv, k, d).
        slot: of the query's own key; positions count on along the slots up to there.
        firsts: slot of the first key that a row sees, for each row or once for all.

    Returns:
        (b, 1, h, d).
    """
    first, groups = min(firsts), query.shape[1] // key.shape[1]
    keys = slot - first + 1
    table, highest = _row(scores, keys, query.shape[1])
    begins = [0] * key.shape[1]
    if scores.longest is not None:
        own, longest = key[:, :, slot : slot + 1], scores.longest[:, None]
        if groups > 1:
            own, longest = own.repeat_interleave(groups, dim=1), longest.repeat_interleave(groups, dim=0)
        lowest = lowest_bias(table[:, -1], query, own, longest, keys=keys, scale=scores.scaling)
        counts = (highest >= lowest[:, None]).int()  # of the own key's stretch always 1
        begins = (counts.argmax(-1) * STEP).view(-1, groups).amin(-1).tolist()
    bias = table.view(1, -1, groups, keys)  # the heads of a key go through as so many queries of one head
    if len(firsts) > 1:
        hidden = torch.arange(first, slot + 1) < torch.tensor(firsts)[:, None, None, None]
        bias = bias.masked_fill(hidden, -torch.inf)
    query = query.view(len(query), -1, groups, query.shape[-1])
    outputs = []
    for heads, begin in _runs(begins):
        seen = slice(first + begin, slot + 1)
        states = query[:, heads], key[:, heads, seen], value[:, heads, seen]
        mask = bias[:, heads, :, begin:]
        outputs.append(nn.functional.scaled_dot_product_attention(*states, attn_mask=mask, scale=scores.scaling))
    return torch.cat(outputs, dim=1).flatten(1, 2)[:, None]


def _runs(begins: list[int]) -> list[tuple[slice, int]]:
    """Return neighbouring heads that go through together, and the first key that they see.

    They do where the keys that only some of them had to see take less time than one more call does.
    """
    runs: list[tuple[slice, int]] = []
    start = 0
    for head in range(len(begins)):
        first = min(begins[start : head + 1])
        wasted = sum(begins[start : head + 1]) - first * (head + 1 - start)
        if wasted > A_CALL:
            runs.append((slice(start, head), min(begins[start:head])))
            start = head
    return [*runs, (slice(start, len(begins)), min(begins[start:]))]


def _row(scores: Scores, keys: int, heads: int) -> tuple[Tensor, Tensor]:
    """Return the bias by distance, the farthest first, (h, keys), and the highest one of every `STEP` of them.

    Looked up by the first layer of a forward that asks, for all that share an encoding.
    """
    known, asked = scores.positions.known, (id(scores.encoding), keys)
    if asked not in known:
        table = bias_by_distance(scores, torch.arange(keys - 1, -1, -1)).expand(heads, -1).contiguous()
        padded = nn.functional.pad(table, (0, -keys % STEP), value=-torch.inf)
        known[asked] = table, padded.unflatten(-1, (-1, STEP)).amax(-1)
    found: tuple[Tensor, Tensor] = known[asked]
    return found
