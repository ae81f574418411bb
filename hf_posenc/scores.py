"""What is added to the scores of one attention call, and the pieces in which the call goes through.

Knows nothing of models: an attention function is whatever takes queries, keys, values and what to add to the scores.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_posenc.config import Encoding
from hf_posenc.positions import Positions

SCORES_AT_ONCE = 2**25
"""Scores whose bias is materialised at a time, 128 MiB in float32; longer calls go through in blocks of queries."""

Output = tuple[Tensor, Tensor | None]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Output]


def fitted(positions: Positions, keys: int) -> Positions:
    """Return the positions with as many keys as there are slots; slots beyond the known ones are empty and masked."""
    known = positions.key[:, -keys:] if positions.key.shape[-1] > keys else positions.key
    missing = keys - known.shape[-1]
    return Positions(query=positions.query, key=nn.functional.pad(known, (0, missing)) if missing else known)


class Scores:
    """What is added to the scaled scores of one call: bias, padding and causality together.

    Args:
        encoding: the encoding in force.
        positions: of the queries and of the keys, the bias of which is asked for.
        mask: None, boolean or additive, (1|b, 1|h, q, k).
        causal: whether a call without a mask means a causal one.
        dtype: what the attention function takes.
    """

    def __init__(
        self, encoding: Encoding, positions: Positions, *, mask: Tensor | None, causal: bool, dtype: torch.dtype
    ) -> None:
        self.encoding = encoding
        self.positions = positions
        self.mask = mask
        self.dtype = dtype
        self.triangle = mask is None and causal  # the caller left causality to the attention function
        self.past = positions.key.shape[1] - positions.query.shape[1]

    def row(self, index: int) -> Scores:
        """Return the same for one row of the batch."""
        query, key = self.positions.query, self.positions.key
        positions = Positions(query=query[index % len(query)][None], key=key[index % len(key)][None])
        mask = None if self.mask is None else self.mask[index % len(self.mask)][None]
        return Scores(self.encoding, positions, mask=mask, causal=self.triangle, dtype=self.dtype)

    def keys_seen(self, rows: Tensor) -> int:
        """Return how many keys, from the first, the queries at these ascending indices can see."""
        return int(rows[-1]) + 1 + self.past if self.triangle else self.positions.key.shape[1]

    def added(self, query: Tensor, key: Tensor, rows: Tensor) -> Tensor | None:
        """Return what is added to the scores of some queries, (1|b, 1|h, rows, k), or None.

        Args:
            query: (b, h, rows, d).
            key: (b, h_kv, k, d), possibly cut behind the last key that these queries see.
            rows: ascending indices of the queries in the call, (rows,).
        """
        keys = key.shape[2]
        positions = Positions(query=self.positions.query[:, rows], key=self.positions.key[:, :keys])
        bias, mask = self.encoding.bias(query, key, positions), self.mask
        if mask is not None:
            mask = mask[:, :, rows, :keys]
        elif self.triangle:
            mask = (torch.arange(keys) <= (rows + self.past)[:, None])[None, None].to(key.device)
        if mask is not None and mask.dtype == torch.bool:
            lowest = torch.finfo(torch.float32).min
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, lowest)
        total = bias if mask is None else mask if bias is None else bias + mask
        # cast first: the lowest number of one format is infinite in another
        return None if total is None else total.to(self.dtype).clamp(min=torch.finfo(self.dtype).min)


def attend_in_blocks(scores: Scores, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Output:
    """Attend with a bias that is materialised for a block of queries at a time."""
    total, keys = query.shape[2], key.shape[2]
    block = max(1, SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * keys))
    outputs, weights = [], []
    for rows in torch.arange(total).split(block):
        seen = scores.keys_seen(rows) if block < total else keys
        part, near = query[:, :, int(rows[0]) : int(rows[-1]) + 1], key[:, :, :seen]
        output, weight = attend(part, near, value[:, :, :seen], scores.added(part, near, rows))
        outputs.append(output)
        if weight is not None:
            weights.append(nn.functional.pad(weight, (0, keys - seen)))
    return torch.cat(outputs, dim=1), torch.cat(weights, dim=2) if weights else None


def attend_by_length(scores: Scores, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Output:
    """Attend where the rotation grows with the length: a query, and the keys it looks at, turn with its own base.

    So what a token sees depends neither on the tokens behind it nor on the other rows of the batch, and a cached decode
    equals the full forward. Queries within the original length share one pass; each later one turns all its keys.
    """
    encoding, keys = scores.encoding, key.shape[2]
    floor = encoding.rotation_grows_after or 0
    outputs: list[Tensor] = []
    all_weights: list[Tensor] = []
    for index in range(query.shape[0]):
        row, one = scores.row(index), slice(index, index + 1)
        lengths = (row.positions.query[0] + 1).clamp(min=floor).cpu()
        parts: list[Tensor] = []
        weights: list[Tensor] = []
        order: list[Tensor] = []
        for length in lengths.unique().tolist():
            rows = (lengths == length).nonzero()[:, 0]
            seen, static = row.keys_seen(rows), encoding.at_length(length)
            q = static.rotate(query[one, :, rows], row.positions.query[:, rows])
            k = static.rotate(key[one, :, :seen], row.positions.key[:, :seen])
            output, weight = attend(q, k, value[one, :, :seen], row.added(q, k, rows))
            parts.append(output)
            order.append(rows)
            if weight is not None:
                weights.append(nn.functional.pad(weight, (0, keys - seen)))
        back = torch.cat(order).argsort()
        outputs.append(torch.cat(parts, dim=1)[:, back])
        if weights:
            all_weights.append(torch.cat(weights, dim=2)[:, :, back])
    return torch.cat(outputs), torch.cat(all_weights) if all_weights else None
