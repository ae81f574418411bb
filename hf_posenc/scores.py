"""What is added to the scores of one attention call, and the pieces in which the call goes through.

Knows nothing of models: an attention function is whatever takes queries, keys, values and what to add to the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.config import Encoding
from hf_posenc.errors import UnsupportedEncodingError
from hf_posenc.positions import Positions
from hf_posenc.rotation import products

SCORES_AT_ONCE = 2**25
"""Scores whose bias is materialised at a time, 128 MiB in float32; longer calls go through in blocks of queries."""

Output = tuple[Tensor, Tensor | None]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], Output]
"""Takes queries, keys, values, what is added to the scores, and the indices of these queries in the call."""


def fitted(positions: Positions, keys: int) -> Positions:
    """Return the positions with as many keys as there are slots; slots beyond the known ones are empty and masked.

    The cache of a sliding layer gives fewer keys than the text has: those in front are gone, and all slots move up.
    """
    known, documents, slots = positions.key, positions.documents, positions.own_slots()
    missing = keys - known.shape[-1]
    if missing:  # cut in front where it is negative
        ends = (min(missing, 0), max(missing, 0))
        known = nn.functional.pad(known, ends)
        documents = None if documents is None else nn.functional.pad(documents, ends)
        slots = slots + min(missing, 0)
    return Positions(query=positions.query, key=known, slots=slots, documents=documents)


def with_gates(key: Tensor, gates: Tensor) -> Tensor:
    """Return keys with what is remembered of them as further dimensions, which then goes wherever the cache takes them.

    Args:
        key: (b, h_kv, n, d).
        gates: (b, h, n) float32; in half precision each is kept as the sum of three numbers.
    """
    groups = gates.unflatten(1, (key.shape[1], -1)).transpose(2, 3)  # (b, h_kv, n, h / h_kv)
    return torch.cat([key, *in_parts(groups, key.dtype, _columns(key))], dim=-1)


def in_parts(numbers: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Return so many tensors of a dtype whose sum is as near to the numbers as it can be; the first has the gradient.

    Three parts in bfloat16 or float16 say all that float32 does.
    """
    parts = []
    for _ in range(count):
        part = numbers.to(dtype)
        parts.append(part)
        numbers = (numbers - part.to(numbers.dtype)).detach()
    return parts


def without_gates(key: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `with_gates` on all keys of a cache: (b, h_kv, k, d + ...), new gates -> (b, h_kv, k, d), (b, h, k)."""
    each = gates.shape[1] // key.shape[1]
    width = key.shape[-1] - each * _columns(key)
    parts = key[..., width:].to(gates.dtype).unflatten(-1, (-1, each)).sum(-2)  # (b, h_kv, k, h / h_kv)
    return key[..., :width], parts.transpose(2, 3).flatten(1, 2)


def _columns(key: Tensor) -> int:
    return 3 if key.dtype in (torch.bfloat16, torch.float16) else 1


def fitted_gates(gates: Tensor | None, key: Tensor) -> Tensor | None:
    """Return the gates of as many keys as there are, where a static cache was cut to its filled slots."""
    return None if gates is None else gates[..., : key.shape[2]]


def exactly(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast does not round what encodings compute in float32."""
    known = torch.amp.autocast_mode.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


def tempered(states: Tensor, factor: Tensor | None) -> Tensor:
    """Return (b, h, q, ...) states times the (1|b, 1|h, q) factor of their query, where there is one."""
    return states if factor is None else states * factor[..., None].to(states.dtype)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores, of any shape, for one that may be boolean, with True on what is seen.

    Stock attention functions that add their mask take True for a one, where a boolean mask comes from outside.
    """
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


class Scores:
    """What is added to the scaled scores of one call: bias, padding and causality together.

    Args:
        encoding: the encoding in force.
        positions: of the queries and of the keys, the bias of which is asked for.
        mask: None, boolean or additive, (1|b, 1|h, 1|q, k).
        causal: whether a call without a mask means a causal one.
        dtype: what the attention function takes.
        scaling: factor that makes a score of the product of query and key.
        factor: on all scores of a query, (1|b, 1|h, q), or None.
        longest: the largest norm of a key, (h_kv,), or a bound on it, or None where that is not known.
    """

    def __init__(
        self,
        encoding: Encoding,
        positions: Positions,
        *,
        mask: Tensor | None,
        causal: bool,
        dtype: torch.dtype,
        scaling: float,
        factor: Tensor | None = None,
        longest: Tensor | None = None,
    ) -> None:
        self.encoding = encoding
        self.positions = positions
        self.mask = mask
        self.dtype = dtype
        self.scaling = scaling
        self.factor = factor
        self.longest = longest
        self.triangle = mask is None and causal  # the caller left causality to the attention function
        self.past = positions.key.shape[1] - positions.query.shape[1]

    def row(self, index: int) -> Scores:
        """Return the same for one row of the batch."""
        query, key, gates = self.positions.query, self.positions.key, self.positions.gates
        documents = self.positions.documents
        positions = Positions(
            query=query[index % len(query)][None],
            key=key[index % len(key)][None],
            gates=None if gates is None else gates[index][None],
            slots=self.positions.slots,
            documents=None if documents is None else documents[index % len(documents)][None],
        )
        mask = None if self.mask is None else self.mask[index % len(self.mask)][None]
        factor = None if self.factor is None else self.factor[index % len(self.factor)][None]
        same: dict[str, Any] = {"causal": self.triangle, "dtype": self.dtype, "scaling": self.scaling}
        return Scores(self.encoding, positions, mask=mask, factor=factor, **same)

    def tempered(self, states: Tensor, rows: Tensor) -> Tensor:
        """Return (b, h, rows, ...) states times the factor of the queries at these indices."""
        return tempered(states, None if self.factor is None else self.factor[:, :, rows.to(states.device)])

    def at(self, rows: Tensor, keys: int) -> Positions:
        """Return the positions of the queries at these indices and of the first so many keys."""
        gates = self.positions.gates
        return Positions(
            query=self.positions.query[:, rows],
            key=self.positions.key[:, :keys],
            gates=None if gates is None else gates[..., :keys],
            slots=self.positions.own_slots()[rows],
        )

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
        with exactly(query.device):
            bias = self.encoding.bias(query * self.scaling, key, self.at(rows, keys))
            bias = None if bias is None else self.tempered(bias, rows)
        mask = self.mask_at(rows, keys)
        mask = None if mask is None else additive(mask, torch.float32)
        total = bias if mask is None else mask if bias is None else bias + mask
        # cast first: the lowest number of one format is infinite in another
        return None if total is None else total.to(self.dtype).clamp(min=torch.finfo(self.dtype).min)

    def mask_at(self, rows: Tensor, keys: int) -> Tensor | None:
        """Return what hides any of the first so many keys from the queries at these indices, (1|b, 1|h, 1|rows, k)."""
        mask = self.mask
        if mask is not None:
            mask = mask[:, :, rows if mask.shape[2] > 1 else slice(None), :keys]  # one row may stand for all
        elif self.triangle:
            mask = (torch.arange(keys) <= (rows + self.past)[:, None])[None, None].to(self.positions.key.device)
        return self._within_documents(mask, rows, keys)

    def _within_documents(self, mask: Tensor | None, rows: Tensor, keys: int) -> Tensor | None:
        """Return the mask of the queries at these indices with the keys of other packed texts hidden, too."""
        documents = self.positions.documents
        if documents is None:
            return mask
        own = documents[:, self.positions.own_slots()[rows]]
        same = (own[:, :, None] == documents[:, None, :keys])[:, None]  # (1|b, 1, rows, k)
        if mask is None or mask.dtype == torch.bool:
            return same if mask is None else mask & same
        return mask.masked_fill(~same, torch.finfo(mask.dtype).min)


def own_attention(scores: Scores, *, dropout: float, maps: bool) -> Attend:
    """Return an attention function for encodings that give the scores themselves, or read the weights.

    Args:
        scores: of the call.
        dropout: share of the attention weights that is dropped.
        maps: whether to return the weights too, which for long texts take more than all else.
    """

    encoding = scores.encoding

    def attend(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, rows: Tensor) -> Output:
        positions = scores.at(rows, key.shape[2])
        with exactly(query.device):
            score = encoding.score(query * scores.scaling, key, positions)
        if score is None and encoding.overrides("score"):
            raise UnsupportedEncodingError(f"{type(encoding).__name__} was to give the scores, and gave none.")
        if score is None:
            with exactly(query.device):
                score = products(query, key) * scores.scaling
        weights = (score if added is None else score + added).softmax(-1).to(value.dtype)  # (b, h, q, k)
        groups = query.shape[1] // value.shape[1]
        weights = nn.functional.dropout(weights, p=dropout)
        output = weights @ value.repeat_interleave(groups, dim=1)
        with exactly(query.device):
            more = encoding.output_bias(weights, positions)
        output = output if more is None else output + more.to(output.dtype)
        return output.transpose(1, 2).contiguous(), weights if maps else None

    return attend


def attend_in_blocks(scores: Scores, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Output:
    """Attend with a bias that is materialised for a block of queries at a time."""
    total, keys = query.shape[2], key.shape[2]
    block = max(1, SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * keys))
    if block >= total:
        rows = torch.arange(total)
        return attend(scores.tempered(query, rows), key, value, scores.added(query, key, rows), rows)
    outputs, weights = [], []
    for rows in torch.arange(total).split(block):
        seen = scores.keys_seen(rows)
        part, near = query[:, :, int(rows[0]) : int(rows[-1]) + 1], key[:, :, :seen]
        added, part = scores.added(part, near, rows), scores.tempered(part, rows)
        output, weight = attend(part, near, value[:, :, :seen], added, rows)
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
    if int(scores.positions.query.max()) < floor:
        static = encoding.at_length(floor)
        query, key = static.rotate(query, scores.positions.query), static.rotate(key, scores.positions.key)
        return attend_in_blocks(scores, attend, query, key, value)
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
            added = row.added(q, k, rows)
            output, weight = attend(row.tempered(q, rows), k, value[one, :, :seen], added, rows)
            parts.append(output)
            order.append(rows)
            if weight is not None:
                weights.append(nn.functional.pad(weight, (0, keys - seen)))
        back = torch.cat(order).argsort()
        outputs.append(torch.cat(parts, dim=1)[:, back])
        if weights:
            all_weights.append(torch.cat(weights, dim=2)[:, :, back])
    return torch.cat(outputs), torch.cat(all_weights) if all_weights else None
