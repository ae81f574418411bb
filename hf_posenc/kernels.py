"""The attention functions of modules that look none up, with the signature that those of transformers have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend step by step: scores and softmax in float32 at least.

    Args:
        module: unused; attention functions are given the module that calls them.
        query: (b, h, q, d).
        key: (b, h_kv, k, d).
        value: (b, h_kv, k, d).
        mask: None, boolean with True on what is seen, or additive; broadcastable to (b, h, q, k).
        scaling: factor on the product of a query and a key.
        dropout: share of the attention weights that is dropped.
        is_causal: whether no mask means that a query sees no later key.

    Returns:
        Output (b, q, h, d) and the attention weights (b, h, q, k), both in the dtype of the values.
    """
    groups = query.shape[1] // key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query.to(dtype) @ key.to(dtype).mT * scaling
    if mask is None and is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(
            scores.shape[-1] - scores.shape[-2]
        )
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = nn.functional.dropout(scores.softmax(-1).to(value.dtype), p=dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend by torch's fused kernels, which give no attention weights; arguments as in `eager`."""
    output = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal and mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


KERNELS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {"eager": eager, "sdpa": sdpa}
"""Name of a backend -> its attention function."""
