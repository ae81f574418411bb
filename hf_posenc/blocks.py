"""Attention with a bias that is written out for one block of queries at a time, and once more for their gradients.

Neither a bias nor weights outlive their block, in training either. Where a bias is the same for all keys from some
distance on, as with Shaw's clipped distances, only that of near keys is written out: one kernel call goes over the far
ones, without a bias, one over the near ones, and the sums of exponentials that the kernel returns say how much either
counts. Both calls' gradients follow from what the two gave together, since the weight of a key is exp(score - sum).

The kernel is that of torch for CPUs; `toeplitz.trusted` tries it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.scores import exactly
from hf_posenc.toeplitz import CHUNK, exponentials

AT_ONCE = 2**23
"""Scores whose bias is written out at a time, 32 MiB in float32."""
FEWEST = 16
"""Queries a block at least, however long and wide the batch is."""

Bias = Callable[[Tensor, Tensor, Tensor | None, slice, slice], Tensor]
"""Takes queries (b, h, rows, d), keys (b, h, k, d) and gates (b, h, k) or None, cut to two slices, and the slices."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some queries, and the keys that they see.

    Attributes:
        part: the queries.
        far: number of keys, from the first, that have one bias for each query.
        seen: number of keys that any of them sees.
        ahead: the first key that not all of them see.
    """

    part: slice
    far: int
    seen: int
    ahead: int

    @property
    def written(self) -> slice:
        """The keys whose bias is written out: the near ones, and one that stands for all far ones."""
        return slice(max(0, self.far - 1), self.seen)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How a call goes through: query i has the slot of key `first` + i.

    Attributes:
        queries: number of queries.
        keys: number of keys, one a slot.
        first: key slot of the first query.
        causal: whether no query sees keys behind its own slot.
        settled: distance from which on the bias of a causal query is the same for all keys, or None.
    """

    queries: int
    keys: int
    first: int
    causal: bool
    settled: int | None = None

    def split(self, each: int) -> Iterator[Block]:
        """Yield the blocks of a call with that many rows times heads."""
        # of near keys no query is without any, since the kernel cannot tell how little no keys count
        near = max(1, self.settled) if self.causal and self.settled is not None else None
        wide = self.keys if near is None else min(self.keys, near + CHUNK)
        size = min(CHUNK, max(FEWEST, AT_ONCE // (each * wide)))
        for begin in range(0, self.queries, size):
            end = min(begin + size, self.queries)
            own = self.first + begin
            seen = min(self.keys, self.first + end) if self.causal else self.keys
            yield Block(
                part=slice(begin, end),
                far=0 if near is None else max(0, min(own - near + 1, seen - 1)),
                seen=seen,
                ahead=own + 1 if self.causal else self.keys,
            )


def attend_biased(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gates: Tensor | None,
    bias: Bias,
    parameters: list[Tensor],
    blocks: Blocks,
    scale: float,
) -> Tensor:
    """Return the attention of queries over keys whose scaled scores gain a bias.

    Args:
        query: (b, h, q, d).
        key: (b, h, k, d).
        value: (b, h, k, d).
        gates: (b, h, k), or None.
        bias: gives what some scores gain, (1|b, 1|h, 1|rows, k) float32, or float64 for float64 queries.
        parameters: what else `bias` depends on and is to have a gradient.
        blocks: how queries and keys lie.
        scale: factor that makes a score of a product.

    Returns:
        (b, h, q, d), in memory as (b, q, h, d).
    """
    call = bias, blocks, scale
    output: Tensor = _Attention.apply(query, key, value, gates, call, *parameters)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gates: Tensor | None,
        call: tuple[Bias, Blocks, float],
        *parameters: Tensor,
    ) -> Tensor:
        bias, blocks, scale = call
        query = query if query.stride(-1) == 1 else query.contiguous()  # the kernel reads numbers side by side
        key, value = key.contiguous(), value.contiguous()  # and is slow where heads lie so
        rows, heads, queries, width = query.shape
        output = query.new_empty(rows, queries, heads, width).transpose(1, 2)
        sums = output.new_empty(rows, heads, queries, dtype=torch.promote_types(query.dtype, torch.float32))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        for block in blocks.split(rows * heads):
            part, far, near = query[:, :, block.part], slice(0, block.far), slice(block.far, block.seen)
            shared, mask = _mask(bias(*_cut(query, key, gates, block), block.part, block.written), block)
            found, total = kernel(part, key[:, :, near], value[:, :, near], attn_mask=mask, scale=scale)
            if shared is not None:
                others = kernel(part, key[:, :, far], value[:, :, far], scale=scale)
                found, total = _merged((found, total), others, shared)
            output[:, :, block.part], sums[:, :, block.part] = found, total
        ctx.save_for_backward(query, key, value, gates, output, sums, *parameters)
        ctx.call, ctx.parameters = call, parameters
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, gates, output, sums, *parameters = ctx.saved_tensors
        bias, blocks, scale = ctx.call
        wide = sums.dtype  # sums over blocks do not suffer from half precision
        d_query, d_key, d_value = (torch.zeros_like(x, dtype=wide) for x in (query, key, value))
        d_gates = None if gates is None else torch.zeros_like(gates)
        d_parameters = [torch.zeros_like(x) for x in parameters]
        with exactly(query.device):
            for block in blocks.split(query.shape[0] * query.shape[1]):
                leaves, written = _again(bias, query, key, gates, block)
                shared, mask = _mask(written.detach(), block)
                part, far, near = block.part, slice(0, block.far), slice(block.far, block.seen)
                states = [x[:, :, part].contiguous() for x in (gradient, query, output, sums)]
                found = []
                if shared is not None:
                    far_states = [*states[:3], states[3] - shared, key[:, :, far], value[:, :, far]]
                    found.append((far, _kernel_gradients(*far_states, mask=None, scale=scale)))
                states += [key[:, :, near], value[:, :, near]]
                if written.requires_grad:
                    near_found, scores = _gradients(*states, mask=mask, scale=scale)
                    if shared is not None:  # over all keys, far and near, the gradients of a query's scores cancel
                        scores = torch.cat([-scores.sum(-1, keepdim=True), scores], dim=-1)
                    places = [d_query[:, :, part], d_key[:, :, block.written]]
                    places += [] if d_gates is None else [d_gates[:, :, block.written]]
                    inputs = [*leaves, *ctx.parameters]
                    pulled = torch.autograd.grad(written, inputs, scores.sum_to_size(written.shape), allow_unused=True)
                    for place, one in zip([*places, *d_parameters], pulled, strict=True):
                        if one is not None:
                            place += one
                else:
                    near_found = _kernel_gradients(*states, mask=mask, scale=scale)
                found.append((near, near_found))
                for keys, (of_query, of_key, of_value) in found:
                    d_query[:, :, part] += of_query
                    d_key[:, :, keys] += of_key
                    d_value[:, :, keys] += of_value
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), d_gates, None, *d_parameters


def _again(bias: Bias, query: Tensor, key: Tensor, gates: Tensor | None, block: Block) -> tuple[list[Tensor], Tensor]:
    """Return what a bias is made of, and the bias of a block, with the graph between them."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in _cut(query, key, gates, block) if x is not None]
        return leaves, bias(leaves[0], leaves[1], None if gates is None else leaves[2], block.part, block.written)


def _cut(query: Tensor, key: Tensor, gates: Tensor | None, block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the queries, keys and gates of which the bias of a block is made."""
    keys = block.written
    return query[:, :, block.part], key[:, :, keys], None if gates is None else gates[:, :, keys]


def _mask(bias: Tensor, block: Block) -> tuple[Tensor | None, Tensor]:
    """Return what all far keys gain, (1|b, 1|h, 1|rows), or None, and what near ones do, hidden where they are ahead.

    The latter, (1|b, 1|h, rows, k), is a copy, side by side in memory as the kernel wants it.
    """
    rows, keys = block.part.stop - block.part.start, block.seen - block.far
    near = bias[..., 1:] if block.far else bias
    mask = torch.empty((*bias.shape[:2], rows, keys), dtype=bias.dtype).copy_(near)
    ahead = mask[..., block.ahead - block.far :]
    if ahead.shape[-1]:
        ahead.masked_fill_(torch.ones(ahead.shape[-2:], dtype=torch.bool).triu(), -torch.inf)
    return bias[..., 0] if block.far else None, mask


def _merged(near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor], shared: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log of the sum of exponentials over near and far keys, of which the latter gain `shared`."""
    (output, total), (far_output, far_total) = near, far
    far_total = far_total + shared
    both = torch.logaddexp(total, far_total)
    return output * _share(total, both) + far_output * _share(far_total, both), both


def _share(total: Tensor, both: Tensor) -> Tensor:
    return (total - both).exp()[..., None]


def _kernel_gradients(*states: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value that the kernel gives for one block."""
    gradient, query, output, sums, key, value = states
    found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, sums, 0.0, False, attn_mask=mask, scale=scale
    )
    return found


def _gradients(*states: Tensor, mask: Tensor, scale: float) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the gradients of query, key, value and, (b, h, rows, k), of the scores of one block.

    With P the weights and dP = dO V^T, the gradient of the scores is dS = P (dP - rowsum(dO O)).
    """
    gradient, query, output, sums, key, value = (x.to(mask.dtype) for x in states)
    weights = exponentials((query * scale @ key.mT).add_(mask).sub_(sums[..., None]))
    of_value = weights.mT @ gradient
    scores = (gradient @ value.mT).sub_((gradient * output).sum(-1, keepdim=True)).mul_(weights)
    return (scores @ key * scale, scores.mT @ query * scale, of_value), scores
