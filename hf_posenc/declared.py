"""The declared forward: one function that runs the attention modules of which a record says how they attend.

Some attention classes compute their scores themselves and look no attention function up, so that the interposer cannot
get in between. What such a class does apart from positions is little, and differs in names more than in kind; a record
of these names (`DeclaredAttention`) is all that the function here needs. Whether a record is true is not believed but
tried: see `trial`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import BackendError
from hf_posenc.family import DeclaredAttention, Family
from hf_posenc.interposer import interposed, posenc_attention
from hf_posenc.kernels import KERNELS


@dataclass(frozen=True)
class DeclaredForward:
    """The forward of an attention module as a record declares it, run by the interposer in place of the stock one."""

    record: DeclaredAttention

    def __call__(self, module: Any, hidden_states: Tensor, *, posenc_call: Any, **inputs: Any) -> Any:
        """Attend with the encoding of the module's joint.

        Args:
            module: the attention module.
            hidden_states: (b, q, hidden_size).
            posenc_call: the interposer's account of this call.
            **inputs: what the stock forward takes; only the mask and the residual are looked at.

        Returns:
            What the stock forward returns: the output (b, q, hidden_size), the attention weights or None, and more
            where the record says so.
        """
        record, cache = self.record, posenc_call.cache
        query, key, value = self.split(module, hidden_states)
        past = 0
        if cache is not None:
            layer = getattr(module, record.layer)
            past = cache.get_seq_length(layer)
            past = int(past) if record.local or record.hides_future else past
            key, value = posenc_call.update(key, value, layer)
        mask = self.mask(module, inputs.get("attention_mask"), past, query, key)
        output, weights = posenc_attention(
            module,
            query,
            key,
            value,
            mask,
            posenc_call=posenc_call,
            scaling=self.scaling(module, query),
            dropout=_share(getattr(module, record.dropout)) if module.training else 0.0,
            is_causal=is_causal(module, record),
        )
        output = output.flatten(2)
        if record.output:
            output = getattr(module, record.output)(output)
        if record.output_dropout:
            share = _share(getattr(module, record.output_dropout))
            output = nn.functional.dropout(output, p=share, training=module.training)
        if record.residual:
            output = output + inputs[record.residual]
        returned = (output, weights, *(getattr(module, name) for name in record.returns))
        return list(returned) if record.listed else returned

    def split(self, module: Any, states: Tensor) -> tuple[Tensor, ...]:
        """Return queries (b, h, n, d), keys and values (b, h_kv, n, d) for hidden states (b, n, hidden_size)."""
        record = self.record
        heads = int(getattr(module, record.heads))
        kept = key_value_heads(module, record)
        parts = [getattr(module, name)(states) for name in record.projections]
        if record.clip and getattr(module, record.clip):
            bound = getattr(module, record.clip)
            parts = [part.clamp(min=-bound, max=bound) for part in parts]
        if len(parts) == 3:
            split = [part.unflatten(-1, (count, -1)) for part, count in zip(parts, (heads, kept, kept), strict=True)]
        elif record.layout == "contiguous":
            split = list(parts[0].unflatten(-1, (heads + 2 * kept, -1)).split([heads, kept, kept], dim=-2))
        else:
            groups = parts[0].unflatten(-1, (kept, heads // kept + 2, -1))  # (b, n, h_kv, h / h_kv + 2, d)
            split = [groups[..., :-2, :].flatten(-3, -2), groups[..., -2, :], groups[..., -1, :]]
        return tuple(part.transpose(1, 2) for part in split)

    def scaling(self, module: Any, query: Tensor) -> float:
        """Return the factor on the product of a query, (b, h, n, d), and a key."""
        given = self.record.scaling
        if given is None:
            return float(query.shape[-1] ** -0.5)
        return float(getattr(module, given) if isinstance(given, str) else given)

    def mask(self, module: Any, mask: Tensor | None, past: int, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the mask for an attention function, (b, 1, q, k), with what the module itself would hide added to it.

        Args:
            module: the attention module.
            mask: that it was given.
            past: number of keys in the cache before this call.
            query: (b, h, q, d).
            key: (b, h_kv, k, d).
        """
        record, shape = self.record, (query.shape[2], key.shape[2])
        if mask is not None:
            mask = mask if mask.dtype != torch.bool or not record.mask_hides else ~mask
            mask = mask.expand(-1, -1, *shape)
        local = record.local is not None and getattr(module, record.local[0]) == "local"
        if not local and not record.hides_future:
            return mask
        back = torch.arange(past, past + shape[0])[:, None] - torch.arange(shape[1])[None]  # (q, k)
        seen = back >= 0
        if local and record.local:
            seen &= back < getattr(module.__dict__["config"], record.local[1])
        seen = seen.to(query.device)[None, None]
        if mask is None:
            return seen
        return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _share(dropout: Any) -> float:
    return float(getattr(dropout, "p", dropout))


def is_causal(module: Any, record: DeclaredAttention) -> bool:
    """Tell whether a query of this attention module sees no later key."""
    return bool(getattr(module, record.causal) if isinstance(record.causal, str) else record.causal)


def key_value_heads(module: Any, record: DeclaredAttention) -> int:
    """Return the number of key heads of an attention module."""
    return int(getattr(module, record.key_value_heads or record.heads))


def check_declared_backend(record: DeclaredAttention, backend: str | None, model: str) -> None:
    """Raise BackendError where declared attention cannot be run on a backend; `model` names it in the message."""
    if (backend or "eager") not in KERNELS:
        raise BackendError(
            f"the attention of {model} looks up no attention function and is run as its record declares it, which goes "
            f"by {' or '.join(KERNELS)} and not by {backend!r}; load the model with attn_implementation='eager'."
        )
    if record.mask_hides and backend == "sdpa":
        raise BackendError(
            f"{model} turns its mask around in a way that goes wrong with the one for 'sdpa'; use eager."
        )


def replacement(stock: type[nn.Module], label: str, family: Family) -> type[nn.Module]:
    """Return the class that a patch gives the attention modules of one stock class; `label` goes before its name."""
    inner = DeclaredForward(family.declared) if family.declared else None
    return interposed(stock, label, inner)  # type: ignore[arg-type]
