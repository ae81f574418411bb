"""Attention with a bias by distance in torch's flex_attention, whose kernels look the bias up as they go.

A score gains the entry of a table, one number for every head and distance, that the positions of its query and key
point at. Slots do not matter, so padding, caches and gaps need no other form. Keys of another text of a packed row are
hidden there, too.

On a GPU the kernel is compiled, as transformers compiles it, and gradients reach the table; this has not been tried.
On a CPU there is no backward pass, which is refused by name, and the kernel is not compiled: torch 2.13 writes code
that does not build once lengths change. There it holds the scores of all pairs, and `sdpa` is the fast backend.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers.integrations.flex_attention import compile_friendly_flex_attention

from hf_posenc.config import Encoding
from hf_posenc.errors import BackendError
from hf_posenc.reach import bias_by_distance
from hf_posenc.scores import Output, Scores, additive, tempered

FLEX = "flex_attention"
"""What transformers calls this backend."""


def carries(encoding: Encoding) -> bool:
    """Tell whether whatever the encoding does to scores it does by distance, in every layer."""
    layers = getattr(encoding, "layers", None)
    if layers is not None:
        return all(carries(layer) for layer in layers)
    return encoding.only_adds() and encoding.overrides("bias") == encoding.overrides("distance_bias")


def check_cache(cache: Any, backend: str | None) -> None:
    """Raise BackendError for a static cache whose length this backend's mask reads while layers add to it."""
    if backend == FLEX and getattr(cache, "is_compileable", False):
        raise BackendError(
            f"{FLEX} sees later tokens, or fails, over a static cache of transformers; use a DynamicCache, or "
            "model.set_attn_implementation('sdpa')."
        )


def attend_flex(scores: Scores, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
    """Attend with a bias that a kernel looks up by distance, if there is one, and with packed texts kept apart.

    Args:
        scores: of a call whose encoding this backend `carries`; the mask is None, additive or boolean, or the
            `BlockMask` that transformers makes for this backend.
        query: (b, h, q, d), rotated, not scaled.
        key: (b, h_kv, k, d), rotated.
        value: (b, h_kv, k, d).
        **given: of what stock attention functions are given, `softcap` and `kernel_options` are heeded.

    Returns:
        Output (b, q, h, d), and None for the attention weights, which this backend does not give.

    Raises:
        BackendError: a backward pass on a CPU, dropout, or attention sinks, for none of which there is a kernel.
    """
    of_query, of_key, table = _places(scores, query)
    _refuse_unable(given, query, key, value, *([] if table is None else [table]))
    softcap, mask, added, factor = given.get("softcap"), _block_mask(scores, query, key), None, scores.factor
    if isinstance(scores.mask, Tensor):
        added = additive(scores.mask, scores.dtype).expand(*query.shape[:3], -1)  # (b, h, q, k)
    if factor is not None:
        query = tempered(query, factor)
        factor = factor.expand(*query.shape[:3])  # (b, h, q)

    own_text, text = _texts(scores, query)

    def changed(score: Tensor, row: Tensor, head: Tensor, place: Tensor, slot: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if table is not None:
            bias = table[head, of_query[row, place] - of_key[row, slot]]
            score = score + (bias if factor is None else bias * factor[row, head, place])
        if text is not None and own_text is not None:
            score = torch.where(own_text[row, place] == text[row, slot], score, -torch.inf)
        return score if added is None else score + added[row, head, place, slot]

    compiled = partial(compile_friendly_flex_attention, training=torch.is_grad_enabled())
    kernel: Any = flex_attention if query.device.type == "cpu" else compiled
    output: Tensor = kernel(
        query,
        key,
        value,
        score_mod=changed,
        block_mask=mask,
        enable_gqa=query.shape[1] != key.shape[1],
        scale=scores.scaling,
        kernel_options=given.get("kernel_options"),
    )
    return output.transpose(1, 2).contiguous(), None


def _places(scores: Scores, query: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return of every query, (b, q), and key, (b, k), what differs by their place in a table, and the table, (h, n).

    There is none where the encoding leaves the scores alone.
    """
    of_query, of_key, rows = scores.positions.query, scores.positions.key, query.shape[0]
    if not scores.encoding.overrides("distance_bias"):
        return of_query, of_key, None
    known, asked = scores.positions.known, (FLEX, of_key.shape[1])
    if asked not in known:  # once a forward: the numbers have to come from the device
        known[asked] = int(of_query.min() - of_key.max()), int(of_query.max() - of_key.min())
    lowest, highest = known[asked]
    table = bias_by_distance(scores, torch.arange(lowest, highest + 1, device=query.device))
    # tensors alone differ between calls: for other whole numbers a kernel would be compiled again
    return (of_query - lowest).expand(rows, -1), of_key.expand(rows, -1), table.expand(query.shape[1], -1)


def _texts(scores: Scores, query: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return of which packed text each query, (b, q), and each key, (b, k), is; None for both in rows of one text."""
    documents = scores.positions.documents
    if documents is None:
        return None, None
    documents = documents.expand(query.shape[0], -1)
    return documents[:, scores.positions.own_slots()], documents


def _refuse_unable(given: dict[str, Any], *states: Tensor) -> None:
    if states[0].device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in states):
        raise BackendError(
            f"{FLEX} has no backward pass on a CPU; ask within torch.no_grad(), or train with "
            "model.set_attn_implementation('sdpa')."
        )
    lacking = "dropout" if given.get("dropout") else "sinks" if given.get("s_aux") is not None else None
    if lacking is not None:
        raise BackendError(f"{FLEX} knows no {lacking} beside a bias; use eager, or a model without {lacking}.")


def _block_mask(scores: Scores, query: Tensor, key: Tensor) -> BlockMask | None:
    """Return what hides keys block by block: the mask of the call, or a causal one where that was left to us."""
    mask: Any = scores.mask
    past = scores.past
    if isinstance(mask, BlockMask):
        return mask
    if not scores.triangle:
        return None

    def seen(row: Tensor, head: Tensor, place: Tensor, slot: Tensor) -> Tensor:
        return slot <= place + past

    return create_block_mask(seen, None, None, query.shape[2], key.shape[2], device=query.device)
