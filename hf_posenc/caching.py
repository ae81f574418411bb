"""What a cache has to know beside its keys: their positions, and which of them no later query can see.

Where an encoding says how far back a query sees, a cache is cut to that after every call, so that a text of any length
is generated in constant memory. Its lengths go on counting the whole text, as transformers' own sliding layers do.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache, StaticLayer

from hf_posenc.errors import UnsupportedEncodingError
from hf_posenc.positions import padding_mask


class BoundedLayer(DynamicLayer):
    """The layer of a dynamic cache that was cut; made out of a stock one by changing its class.

    Attributes:
        evicted: number of tokens whose keys are gone.
    """

    evicted: int

    def get_seq_length(self, *args: Any) -> int:
        """Return the number of tokens that came, in the cache or gone from it."""
        held: int = super().get_seq_length(*args)
        return held + self.evicted

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return how many keys the next queries meet, and how many came before the first one of them."""
        length, offset = super().get_mask_sizes(query_length)
        return length - self.evicted, offset + self.evicted

    def crop(self, *args: Any) -> None:
        """Raise UnsupportedEncodingError: what would have to come back is gone."""
        raise UnsupportedEncodingError(
            f"{self.evicted} tokens have left this cache, so it cannot be cut back to an earlier one, as assisted "
            "decoding and prompt look-up do; generate without them."
        )

    def reset(self) -> None:
        """Forget the text."""
        super().reset()
        self.evicted = 0


class _Remembers(Cache):
    """Mixed into the class of a cache that was seen once: what is known of its keys goes where its rows go."""

    posenc_positions: Tensor  # (1|b, k)
    posenc_real: Tensor | None = None  # (1|b, k) of a cache that was cut: False on padding

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the rows at these indices, (b,)."""
        super().reorder_cache(beam_idx)
        self._take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at these indices, (b,)."""
        super().batch_select_indices(indices)
        self._take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        rows = max(len(self.posenc_positions), 1 if self.posenc_real is None else len(self.posenc_real))
        self._take(torch.arange(rows).repeat_interleave(repeats))

    def _take(self, rows: Tensor) -> None:
        for name in ("posenc_positions", "posenc_real"):
            held = getattr(self, name)
            if held is not None and len(held) > 1:  # a single row stands for all
                setattr(self, name, held[rows.to(held.device)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank_cache, (type(self).__mro__[2],), self.__dict__


@functools.cache
def _remembering(stock: Any) -> Any:
    return type(stock.__name__, (_Remembers, stock), {"__module__": __name__})


def _blank_cache(stock: Any) -> Any:
    cls = _remembering(stock)
    return cls.__new__(cls)


def _own(cache: Any) -> Any:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def note(cache: Any, keys: Tensor) -> None:
    """Note the positions of its keys, (1|b, k), beside a cache.

    Its class cannot be changed in a graph: what such a call noted goes where rows go from the next call on that is not
    compiled.
    """
    cache = _own(cache)
    if not isinstance(cache, _Remembers) and not torch.compiler.is_compiling():
        stock: Any = type(cache)
        cache.__class__ = _remembering(stock)
    cache.posenc_positions = keys


def remembered(cache: Any, past_length: int) -> Tensor | None:
    """Return the positions noted beside a cache whose text has so many tokens, (1|b, k), cut where the cache was.

    None where nothing was noted that fits the cache.
    """
    noted: Tensor | None = getattr(_own(cache), "posenc_positions", None)
    held = past_length - evicted(cache)
    return None if noted is None or noted.shape[-1] < held else noted[:, :held]


def evicted(cache: Any) -> int:
    """Return how many tokens have left a cache."""
    first = next(iter(getattr(_own(cache), "layers", ())), None)
    return first.evicted if isinstance(first, BoundedLayer) else 0


def held_mask(cache: Any, mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Return the padding mask that fits a cache which has lost tokens.

    Args:
        cache: any cache, or None.
        mask: over all tokens of the text, (b, past + n), or None.
        shape: of the new tokens, (b, n).

    Returns:
        The mask, as it was where nothing has left the cache; otherwise zeros for what is gone, what is known of the
        keys held, and the new tokens, (b, past + n) still.

    Raises:
        UnsupportedEncodingError: a mask of another rank, whose columns cannot be matched with the keys that are left.
    """
    gone, cache = evicted(cache), _own(cache)
    if not gone or (mask is None and cache.posenc_real is None):
        return mask
    if mask is not None and padding_mask(mask) is None:
        raise UnsupportedEncodingError(
            f"{gone} tokens have left the cache, and a mask that says what every query sees does not say which of its "
            "columns are left; pass a padding mask over the whole text, (batch, tokens)."
        )
    real, positions = cache.posenc_real, cache.posenc_positions
    past = gone + positions.shape[-1]
    held = torch.ones_like(positions) if real is None else real.long()
    new = held.new_ones(shape) if mask is None else mask[:, past : past + shape[1]].to(held)
    return torch.cat([held.new_zeros(shape[0], gone), held.expand(shape[0], -1), new], dim=-1)


def evict(cache: Any, visible: tuple[int, int], mask: Tensor | None) -> None:
    """Cut a dynamic cache, whose positions were noted, down to what later queries can see of it.

    Nothing is cut from caches of another kind, nor where positions repeat or jump back so that more than the number
    visible can be seen.

    Args:
        cache: after a call.
        visible: how many first, and how many most recent tokens of a text a query sees.
        mask: of that call, as `held_mask` gives it.
    """
    cache = _own(cache)
    layers = [layer for layer in getattr(cache, "layers", ()) if layer.is_initialized]
    if not layers or any(type(layer) not in (DynamicLayer, BoundedLayer) for layer in layers):
        return
    held, capacity, gone = layers[0].keys.shape[-2], sum(visible), evicted(cache)
    if held <= capacity or (mask is not None and padding_mask(mask) is None):
        return
    positions = cache.posenc_positions[:, -held:]
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask[:, gone : gone + held] != 0
    rows = max(len(positions), len(real))
    positions, real = positions.expand(rows, -1), real.expand(rows, -1)
    seen = real & ((positions < visible[0]) | (positions[:, -1:] - positions < visible[1]))
    if bool((seen.sum(-1) > capacity).any()):
        return
    slots = torch.arange(held, device=positions.device)
    kept = (seen * held + slots).topk(capacity, dim=-1).indices.sort(dim=-1).values  # (1|b, capacity)
    cache.posenc_positions, cache.posenc_real = (
        positions.gather(1, kept),
        None if mask is None else real.gather(1, kept),
    )
    for layer in layers:
        layer.keys, layer.values = (_rows(states, kept) for states in (layer.keys, layer.values))
        layer.evicted = gone + held - capacity
        layer.__class__ = BoundedLayer


def _rows(states: Tensor, kept: Tensor) -> Tensor:
    """Return the states of these slots: (b, h, k, d), (1|b, m) -> (b, h, m, d)."""
    index = kept.to(states.device)[:, None, :, None]
    return states.gather(2, index.expand(len(states), states.shape[1], -1, states.shape[3]))


_LONGEST = WeakTensorKeyDictionary()
"""The keys of a cache layer -> how often they had been written to, and the largest norm among them, (h_kv,)."""


def update_measured(
    cache: Cache, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Put new keys and values into a cache, and find the largest norm of its keys without reading all of them again.

    What was noted at the last update counts as long as the tensor of the keys is the same one and nobody has written to
    it since, so that it does not matter who filled, cropped, reordered or reset the cache meanwhile.

    Args:
        cache: any cache.
        key: (b, h_kv, n, d).
        value: (b, h_kv, n, d).
        layer: index of the layer in the cache.
        *args: further arguments of the cache's own `update`.
        **kwargs: further arguments of it.

    Returns:
        All keys and values of the layer, (b, h_kv, k, d), and the largest norm, (h_kv,) float32 (float64 for float64
        keys), or None for caches that keep their keys otherwise than as they came, and where torch does not count who
        writes to them: in graphs, and to tensors made in inference mode.
    """
    if torch.compiler.is_compiling():
        return (*cache.update(key, value, layer, *args, **kwargs), None)
    known = _noted(_keys(cache, layer))
    keys, values = cache.update(key, value, layer, *args, **kwargs)
    if _keys(cache, layer) is not keys or keys.is_inference():
        return keys, values, None
    longest = _longest(keys) if known is None else torch.maximum(_longest(key), known)
    _LONGEST[keys] = keys._version, longest
    return keys, values, longest


def _keys(cache: Cache, index: int) -> Tensor | None:
    """Return the keys of a layer that is there already and keeps them as they came, (b, h_kv, k, d)."""
    layers = getattr(cache, "layers", [])[index : index + 1]
    return next((layer.keys for layer in layers if type(layer) in (DynamicLayer, StaticLayer)), None)


def _noted(keys: Tensor | None) -> Tensor | None:
    """Return what was noted of keys that nobody has written to since."""
    if keys is None or keys.is_inference():
        return None
    version, longest = _LONGEST.get(keys, (None, None))
    return longest if version == keys._version else None


@torch.no_grad()
def _longest(keys: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.promote_types(keys.dtype, torch.float32))
    return norms.amax((0, 2))
