"""Which integer position every query and every key has: resolved here, once a forward, and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import ConfigError


def working_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype in which positions are applied to states: float64 for float64, otherwise float32."""
    return torch.float64 if states.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The plain numbers of a model that an encoding may depend on.

    Attributes:
        hidden_size: width at which positions are added to the token embedding.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads (equal to the query heads without grouping).
        head_dim: width of one head; not always `hidden_size / num_attention_heads`.
        max_position_embeddings: length the model was trained for, in tokens.
        causal: True where a query sees no later key.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    causal: bool

    def __post_init__(self) -> None:
        """Check the numbers; raises ConfigError."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name != "causal" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"Geometry.{name} must be a positive integer, was: {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Integer positions of one attention call.

    Attributes:
        query: (b, q) or (1, q), int64.
        key: (b, k) or (1, k), int64. Where no key lies in a cache these are the positions of the queries.
        gates: (b, h, k) float32, what the encoding remembered of every key, or None where it remembers nothing.
        slots: (q,) int64, where among the keys each query's own key stands; None where they are the last ones.
        documents: (b, k) or (1, k) int64, which of the texts packed into its row a key is of, or None where rows are
            not packed. A query sees keys of its own text only.
        counted: whether they were counted here, off slots or a padding mask, so that there are fewer of them, from 0
            on, than keys.
        known: what was found out about them, by whoever asks first, for all layers of a forward.
    """

    query: Tensor
    key: Tensor
    gates: Tensor | None = None
    slots: Tensor | None = None
    documents: Tensor | None = None
    counted: bool = False
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def distance(self) -> Tensor:
        """Return query minus key position, (b, q, k), int64; positive where the key lies behind the query."""
        return self.query[:, :, None] - self.key[:, None, :]

    def own_slots(self) -> Tensor:
        """Return where among the keys each query's own key stands, (q,) int64."""
        if self.slots is not None:
            return self.slots
        keys, queries = self.key.shape[-1], self.query.shape[-1]
        return torch.arange(keys - queries, keys, device=self.key.device)

    def part(self, queries: slice, keys: slice) -> Positions:
        """Return the positions of some queries and some keys, neither packed.

        A query whose own key is behind these, as that of padding after a text is, stands at the last of them.
        """
        key = self.key[:, keys]
        return Positions(
            query=self.query[:, queries],
            key=key,
            gates=None if self.gates is None else self.gates[..., keys],
            slots=(self.own_slots()[queries] - (keys.start or 0)).clamp(max=key.shape[1] - 1),
        )


def from_mask(mask: Tensor) -> Tensor:
    """Return the positions of the tokens under a 2-D padding mask.

    Args:
        mask: (b, n), non-zero on real tokens.

    Returns:
        (b, n) int64. The first real token of a row has position 0, wherever the padding stands; padding takes the
        position of the token before it, or 0.
    """
    return (mask != 0).long().cumsum(-1).sub_(1).clamp_(min=0)


def padding_mask(mask: Any) -> Tensor | None:
    """Return a mask that says which tokens are padding, (b, n), and None in place of any other.

    Others say of every query what it sees, in four dimensions or as a dict of such masks by type of layer, and nothing
    of positions.
    """
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def within_documents(document_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return positions that start again in every text packed into a row.

    Args:
        document_ids: (b, n) int64; equal numbers within a row are one text.
        mask: padding mask, (b, n), non-zero on real tokens; None where all are.

    Returns:
        (b, n) int64. Padding takes the position of the token before it in its text, or 0.
    """
    order = document_ids.argsort(dim=-1, stable=True)
    ids = document_ids.gather(-1, order)
    shown = torch.ones_like(ids) if mask is None else (mask != 0).long().expand_as(ids).gather(-1, order)
    count = shown.cumsum(-1)
    starts = nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
    before = ((count - shown) * starts).cummax(-1).values
    return torch.empty_like(ids).scatter_(-1, order, (count - before - 1).clamp_(min=0))


def resolve(
    length: int,
    *,
    position_ids: Tensor | None,
    mask: Tensor | None,
    past: Tensor | None,
    past_length: int | Tensor,
    device: torch.device,
) -> Tensor:
    """Return the positions of `length` new tokens, (b, n) or (1, n), int64.

    Explicit `position_ids` always win. Otherwise a 2-D padding mask that covers past and new tokens decides, then the
    positions remembered beside the cache (`past`), then the number of cached tokens.

    Args:
        length: number of new tokens n.
        position_ids: explicit positions, (b, n), (1, n) or (n,).
        mask: padding mask over past and new tokens, (b, past + n), or longer, as static caches have it; masks of other
            ranks say nothing of positions.
        past: positions of the cached tokens, (b, past) or (1, past).
        past_length: number of cached tokens, used when nothing better is known.
        device: where the result lives.

    Raises:
        ConfigError: the padding mask leaves tokens out.
    """
    if position_ids is not None:
        return (position_ids if position_ids.ndim > 1 else position_ids[None]).to(device=device, dtype=torch.long)
    if (mask := padding_mask(mask)) is not None:
        start = int(past_length)
        if mask.shape[-1] < start + length:
            raise ConfigError(
                f"the attention mask covers {mask.shape[-1]} tokens, but {start} are in the cache and {length} are "
                f"new; pass one over all {start + length}, or none."
            )
        return from_mask(mask)[:, start : start + length].to(device)
    steps = torch.arange(length, device=device)[None]
    if past is not None and past.shape[-1]:
        return past[:, -1:].to(device) + 1 + steps
    return steps + past_length


_running = threading.local()


def carried() -> Positions | None:
    """Return the positions of the model call in progress in this thread, where its layers do not hand them down."""
    return getattr(_running, "positions", None)


@contextmanager
def carrying(positions: Positions | None) -> Iterator[None]:
    """Hold the positions of a model call for the modules that run meanwhile."""
    before = carried()
    _running.positions = positions
    try:
        yield
    finally:
        _running.positions = before


def checkpointed(stock: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a layer so that it finds the same positions when it is computed again, after its model has returned.

    Args:
        stock: the checkpointing function.
        function: what it checkpoints.
        *args: arguments of `function`.
        **kwargs: further arguments of `stock`.
    """
    if not torch.compiler.is_compiling():  # a graph holds the positions already
        function = partial(_with_positions, carried(), function)
    return stock(function, *args, **kwargs)


def _with_positions(positions: Positions | None, function: Callable[..., Any], *args: Any) -> Any:
    with carrying(positions):
        return function(*args)
