"""The input side of a patched model: where positions are resolved, and where the old encoding's modules stood.

The body's class is swapped for a subclass whose forward resolves the positions of the call once, adds or replaces
what the encoding puts on the token embedding, and sends the positions down to the attention modules as a keyword.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_posenc.caching import evict, held_mask, note, remembered
from hf_posenc.config import Encoding
from hf_posenc.errors import ConfigError
from hf_posenc.family import Family
from hf_posenc.flex import check_cache
from hf_posenc.interposer import CACHE_ARGUMENTS, check_backend, uses_key_positions
from hf_posenc.joint import Joint
from hf_posenc.positions import Positions, carried, carrying, padding_mask, resolve, within_documents

DOCUMENTS = "document_ids"
"""Keyword of every patched model's forward, (b, n) int64: tokens of a row with equal numbers are one text and see no
other. Positions start again in each, unless `position_ids` say otherwise."""
_UNHEARD = {
    **dict.fromkeys(("layer_past", "past_key_value"), "pass the cache as past_key_values"),
    "decoder_position_ids": "positions count the tokens that decoder_attention_mask shows",
}
"""Keywords that a model may take for further ones, which reach nobody, and what to do instead."""


class PositionTable(nn.Module):
    """Stands where the model had its table of positions, and gives what the encoding adds to the token embedding."""

    joint: Joint

    def __init__(self, joint: Joint) -> None:
        super().__init__()
        self.__dict__["joint"] = joint  # not a submodule: the encoding belongs to the body

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return (b, n, hidden_size) in the model's dtype, or an integer zero where the encoding adds nothing.

        An integer zero leaves the dtype of what it is added to alone. The arguments, which differ between models and
        count slots of the cache in some, are not looked at.
        """
        running: Any = carried()  # a table is asked by its body alone
        ids: Tensor = running.query
        added: Tensor | None = self.joint.encoding(ids)
        if added is None:
            return torch.zeros((), dtype=torch.long, device=ids.device)
        dtype: torch.dtype = self.joint.body.dtype  # type: ignore[assignment]
        return added.to(dtype)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return type(self.joint.encoding).__name__


class NoRotation(nn.Module):
    """Stands where the model had its rotary module: the angle is zero everywhere.

    Args:
        width: columns of the cosines, off which the attention modules read how much of a head to rotate.
        sine_first: whether they expect the sines before the cosines.
    """

    def __init__(self, *, width: int, sine_first: bool = False) -> None:
        super().__init__()
        self.width = width
        self.sine_first = sine_first

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return cosines of one and sines of zero, each (1, n, width) in the dtype of `x`, (b, n, hidden_size)."""
        shape = (1, x.shape[1], self.width)
        cosines, sines = x.new_ones(shape), x.new_zeros(shape)
        return (sines, cosines) if self.sine_first else (cosines, sines)


class Unheard(nn.Module):
    """Stands where the model computed positions of which no attention module hears any more."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return an empty (0, 0), whatever is asked."""
        return torch.empty(0, 0)


def rotary_width(rotary: nn.Module) -> int:
    """Return the last dimension of the cosines that a rotary module gives, by asking it for those of one position."""
    device = next(rotary.buffers()).device
    states, position_ids = torch.zeros(1, 1, 1, device=device), torch.zeros(1, 1, dtype=torch.long, device=device)
    layer_types = list(getattr(rotary, "layer_types", ()))[:1]
    # without its decorators, which look at the length of the text and refill the frequencies
    cosines: Tensor = inspect.unwrap(type(rotary).forward)(rotary, states, position_ids, *layer_types)[0]
    return cosines.shape[-1]


_asked = threading.local()


@contextmanager
def _asking(inputs: dict[str, Any]) -> Iterator[None]:
    """Keep inputs for the body while a head runs that does not take them."""
    before = getattr(_asked, "inputs", {})
    _asked.inputs = {**before, **inputs}
    try:
        yield
    finally:
        _asked.inputs = before


def positioned_forward(stock: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward of a patched model class: on the body itself, positions are resolved first."""
    signature = inspect.signature(stock.forward)
    parameters = list(signature.parameters)[1:]
    dropped = {"position_ids", DOCUMENTS} - set(parameters)

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "posenc_family" not in self.__dict__:  # no body
            packed = kwargs.get(DOCUMENTS) is not None or kwargs.get(f"decoder_{DOCUMENTS}") is not None
            if packed and getattr(self.config, "is_encoder_decoder", False):
                raise ConfigError("document_ids say of one stack who sees whom; an encoder-decoder takes none.")
            held = {name: kwargs.pop(name) for name in dropped if name in kwargs}  # a head would drop them
            if not held:
                return stock.forward(self, *args, **kwargs)
            with _asking(held):
                return stock.forward(self, *args, **kwargs)
        joint = self.posenc_joints[0]
        with joint.running(self):
            encoding = joint.encoding
        kwargs.update(zip(parameters, args, strict=False))
        for name in _UNHEARD.keys() & kwargs.keys() - set(parameters):
            if kwargs[name] is not None:
                raise ConfigError(f"{stock.__name__} would drop {name} without a word; {_UNHEARD[name]}.")
        for name, value in getattr(_asked, "inputs", {}).items():
            if kwargs.get(name) is None:
                kwargs[name] = value
        positions, cache = _prepare(self, encoding, kwargs, takes_ids="position_ids" in parameters)
        handed = {"posenc_positions": positions} if self.posenc_family.declared is None else {}
        # for tables and declared attention, to which no model hands further arguments down
        with joint.running(self), carrying(positions):
            output = stock.forward(self, **handed, **kwargs)
        if uses_key_positions(encoding):
            # the cache may have been made inside; whoever holds it next finds the positions of its keys beside it
            held = output.values() if hasattr(output, "values") else output
            visible = _visible(self, encoding)
            for kept in {id(item): item for item in (cache, *held) if isinstance(item, Cache)}.values():
                note(kept, positions.key)
                if visible is not None:
                    evict(kept, visible, kwargs.get("attention_mask"))
        return output

    forward.__signature__ = _with_documents(signature)  # type: ignore[attr-defined]
    return forward


def unpacked_forward(stock: type[nn.Module]) -> Callable[..., Any]:
    """Return the stock forward, but that it refuses `document_ids`, which it would drop without a word."""
    signature = inspect.signature(stock.forward)

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop(DOCUMENTS, None) is not None:
            raise ConfigError(
                f"transformers itself computes this encoding, and {stock.__name__} cannot keep packed texts apart by "
                "document_ids; leave them out and give it one text a row."
            )
        return stock.forward(self, *args, **kwargs)

    forward.__signature__ = _with_documents(signature)  # type: ignore[attr-defined]
    return forward


def _visible(model: Any, encoding: Encoding) -> tuple[int, int] | None:
    """Return how far back queries see, or None where they see all, or as far as a window of the model's own says."""
    declared = model.posenc_family.declared
    windows = [getattr(model.config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if any(windows) or (declared is not None and (declared.local or declared.hides_future)):
        return None  # such a window counts the keys that a cache holds
    return encoding.visible


def _with_documents(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature that names `document_ids`: Trainer hands a model what its signature names."""
    listed = list(signature.parameters.values())
    extra = inspect.Parameter(DOCUMENTS, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Tensor | None)
    end = len(listed) - (listed[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*listed[:end], extra, *listed[end:]])


def _prepare(model: Any, encoding: Encoding, kwargs: dict[str, Any], *, takes_ids: bool) -> tuple[Positions, Any]:
    """Resolve the positions of a call and write what the stock forward must see into its keywords."""
    family: Family = model.posenc_family
    if kwargs.get("position_ids") is not None and not takes_ids and family.declared is None:
        raise ConfigError(
            f"position_ids were given to {model.posenc_stock.__name__}, which takes none: it counts the tokens that "
            "the attention mask shows, behind those in the cache. Leave them out."
        )
    states, ids = kwargs.get("inputs_embeds"), kwargs.get("input_ids")
    given: Any = states if states is not None else ids
    length, device = given.shape[1], given.device
    cache = next((kwargs[name] for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)
    check_cache(cache, model.config._attn_implementation)
    documents = _documents(model, encoding, kwargs, cache, given)
    positions = _positions(model, kwargs, cache, uses_key_positions(encoding), length, device, documents)
    kwargs["attention_mask"] = held_mask(cache, kwargs.get("attention_mask"), given.shape[:2])
    explicit = kwargs.get("position_ids") is not None or documents is not None
    if explicit and kwargs.get("attention_mask") is None:
        # positions that jump or repeat would be taken for packed sequences and cut the mask; they say where, not whom
        past = int(cache.get_seq_length()) if cache is not None else 0
        kwargs["attention_mask"] = torch.ones(given.shape[0], past + length, dtype=torch.long, device=device)
    kwargs.pop("position_ids", None)
    if takes_ids:
        kwargs["position_ids"] = positions.query
    if family.token_type_buffer and kwargs.get("token_type_ids") is None:
        kwargs["token_type_ids"] = torch.zeros(given.shape[:2], dtype=torch.long, device=device)
    if family.table is None and encoding.overrides("embed"):
        states = model.get_input_embeddings()(ids) if states is None else states
        added: Tensor | None = encoding(positions.query)
        kwargs["inputs_embeds"] = states if added is None else states + added.to(states.dtype)
        kwargs["input_ids"] = None
    return positions, cache


def _documents(model: Any, encoding: Encoding, kwargs: dict[str, Any], cache: Any, given: Tensor) -> Tensor | None:
    """Take out of the keywords which text every token is of, (b, n) int64 or None, and check it."""
    documents: Tensor | None = kwargs.pop(DOCUMENTS, None)
    if documents is None:
        return None
    if documents.shape != given.shape[:2] or documents.is_floating_point():
        raise ConfigError(
            f"document_ids must be whole numbers, one a token, {tuple(given.shape[:2])}; these are "
            f"{documents.dtype}, {tuple(documents.shape)}."
        )
    if cache is not None and int(cache.get_seq_length()):
        raise ConfigError(
            "document_ids were given with a cache that holds tokens already, of which nobody knows what text they are "
            "of; pack whole rows, or go on with one text a row and without document_ids."
        )
    mixes = getattr(model.config, model.posenc_family.mixes or "", False)
    if mixes or not any("posenc_joint" in module.__dict__ for module in model.modules()):
        raise ConfigError(
            f"{model.posenc_stock.__name__} {'mixes neighbouring tokens' if mixes else 'computes its scores itself'}, "
            "where packed texts cannot be kept apart; leave document_ids out and give it one text a row."
        )
    check_backend(encoding, model.config._attn_implementation, packed=True)
    takes = inspect.signature(model.posenc_stock.forward).parameters
    if cache is None and kwargs.get("use_cache") is None and "use_cache" in takes:
        kwargs["use_cache"] = False  # what a cache holds, the next call would see without regard to documents
    return documents.to(given.device, torch.long)


def _positions(
    model: Any,
    kwargs: dict[str, Any],
    cache: Any,
    keys_matter: bool,
    length: int,
    device: torch.device,
    documents: Tensor | None,
) -> Positions:
    """Return the positions of the new tokens and, where they matter, of the cached ones before them."""
    mask = padding_mask(kwargs.get("attention_mask"))
    explicit, ids = kwargs.get("position_ids"), kwargs.get("input_ids")
    past_length = cache.get_seq_length() if cache is not None else 0
    if model.posenc_family.counts_padding:
        padding = model.config.pad_token_id
        explicit = None if explicit is None else (explicit - padding - 1).clamp(min=0)
        if mask is None and ids is not None and cache is None:
            mask = ids.ne(padding)
    if documents is not None and explicit is None:
        explicit = within_documents(documents, mask)
    past, counted = None, explicit is None
    if keys_matter and cache is not None:
        past_length = int(past_length)
        covers = mask is not None and mask.shape[-1] >= past_length + length
        past = remembered(cache, past_length)
        counted = counted and past is None  # whoever filled the cache may have handed positions over
        if past is None:
            past = resolve(
                past_length,
                position_ids=None,
                mask=mask[:, :past_length] if mask is not None and covers else None,
                past=None,
                past_length=0,
                device=device,
            )
    query = resolve(length, position_ids=explicit, mask=mask, past=past, past_length=past_length, device=device)
    parts = [query] if past is None else [past.to(device), query]
    rows = max(map(len, parts))
    key = torch.cat([part.expand(rows, -1) for part in parts], dim=-1)
    return Positions(query=query, key=key, documents=documents, counted=counted)
