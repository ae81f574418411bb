"""ALiBi in flash attention, whose kernels take no bias: extra head dimensions carry it, exactly, into the scores.

Softmax does not see what all keys of a query share, so that minus slope times distance is slope times position of the
key. With a slope beside every query and a position beside every key, that is what their product gains. It goes through
whatever flash attention function transformers has, and wherever padding, packing or a cache put a key, since positions
count and not slots.

In half precision slopes and positions stand as sums of three parts, products of which kernels add up in float32. One
column more makes it a distance again: a query's own position, which no result shows. Without it, the gradient of a
slope would be a small difference of large sums, of terms that kernels have rounded. What float32 rounds off these sums
stays below the rounding of the weights for queries some 15,000 tokens before the last key in float16, and 100,000 in
bfloat16, with the steepest of ALiBi's slopes; flatter ones reach farther.

The products are those that kernels are documented to form; none of this has been tried on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.flash_attention import get_target_dtype

from hf_posenc.config import Encoding
from hf_posenc.errors import BackendError
from hf_posenc.positions import Positions, working_dtype
from hf_posenc.scores import Attend, Output, Scores, exactly, in_parts, tempered

PARTS = 3
PAIRS = [(slope, place) for slope in range(PARTS) for place in range(PARTS - slope)]
"""Parts of a slope and of a position whose product counts; what the others give is below float32's rounding."""
STEP = 16.0
"""What slopes are multiplied, and positions divided by, so that float16 holds both, up to a million tokens."""
MULTIPLE = 8
"""Kernels take head dimensions that are multiples of it."""
WIDEST = 256
"""The largest head dimension that kernels take."""


def is_flash(backend: str | None) -> bool:
    """Tell whether a backend is flash attention, of whatever version or kernel, over a cache that is not paged."""
    return "flash" in str(backend) and "|" not in str(backend)


def rides(encoding: Encoding) -> bool:
    """Tell whether whatever the encoding does to scores is, in every layer, a slope."""
    layers = getattr(encoding, "layers", None)
    if layers is not None:
        return all(rides(layer) for layer in layers)
    slopes = not encoding.overrides("bias") or encoding.separable_slopes() is not None
    return encoding.only_adds() and slopes


class _Named:
    """An attention module with the config of its model, in which flash attention looks up the name of its kernel."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.config = module.__dict__["config"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def by_name(stock: Callable[..., Output]) -> Callable[..., Output]:
    """Return a flash attention function of transformers that can be called for a module with a view of its config."""

    def attend(module: nn.Module, *states: Any, **given: Any) -> Output:
        return stock(_Named(module), *states, **given)

    return attend


def kernel_dtype(module: nn.Module, query: Tensor) -> torch.dtype:
    """Return the dtype in which flash attention multiplies queries, which it casts where they come in float32."""
    target: torch.dtype | None = get_target_dtype(query, module)
    return query.dtype if target is None else target


def attend_flash(scores: Scores, attend: Attend, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
    """Attend with slopes that ride in extra head dimensions.

    Args:
        scores: of a call whose encoding has `separable_slopes`; its `dtype` is that in which the kernel multiplies, its
            mask a padding mask, (b, k) or longer, or None.
        attend: a flash attention function.
        query: (b, h, q, d), rotated, not scaled; the last of the keys are theirs.
        key: (b, h_kv, k, d), rotated.
        value: (b, h_kv, k, d).
        **given: what else `attend` is given; `is_causal`, `softcap`, `s_aux` and `cu_seq_lens_k` are heeded.

    Returns:
        Output (b, q, h, d), and what `attend` gives for attention weights.

    Raises:
        BackendError: what the kernel would have to do beside is out of its reach, or positions go back along a row.
    """
    of_query, of_key = _columns(scores, query)
    width = -(-(query.shape[-1] + of_key.shape[-1]) // MULTIPLE) * MULTIPLE
    _refuse_unable(scores, width=width, **given)
    query, key = _widened(tempered(query, scores.factor), of_query, width), _widened(key, of_key, width)
    padded = nn.functional.pad(value, (0, width - value.shape[-1]))
    mask = None if scores.mask is None else scores.mask[:, : key.shape[2]]
    output, weights = attend(query, key, padded, mask, scores.positions.own_slots())
    return output[..., : value.shape[-1]], weights


def _widened(states: Tensor, columns: Tensor, width: int) -> Tensor:
    """Return states, (b, h, n, d), with columns, (1|b, 1|h, n, c), behind them, and zeros: (b, h, n, width)."""
    filled = nn.functional.pad(columns, (0, width - states.shape[-1] - columns.shape[-1]))
    return torch.cat([states, filled.to(states.dtype).expand(*states.shape[:3], -1)], dim=-1)


def _columns(scores: Scores, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return what stands beside queries, (1|b, h, q, c), and beside keys, (1|b, 1, k, c), in the dtype of the kernel.

    Positions count from the last key's, which keeps numbers small where a text goes on.
    """
    slopes, wide = scores.encoding.separable_slopes(), working_dtype(query)
    if slopes is None:
        raise BackendError(f"the bias of {type(scores.encoding).__name__} is no slope, and flash attention takes none.")
    origin = scores.positions.key[:, -1:]
    own, others = ((x - origin).to(wide) / STEP for x in (scores.positions.query, scores.positions.key))
    with exactly(query.device):
        rise = (slopes.to(query.device, wide) * (STEP / scores.scaling))[None, :, None]
        rise = rise if scores.factor is None else rise * scores.factor  # (1|b, h, 1|q)
        level = -rise * own[:, None] / STEP**2  # (1|b, h, q)
    rises, places = in_parts(rise, scores.dtype, PARTS), in_parts(others, scores.dtype, PARTS)
    of_query = torch.stack(torch.broadcast_tensors(*(rises[i] for i, _ in PAIRS), level.to(scores.dtype)), dim=-1)
    of_key = torch.stack([*(places[j] for _, j in PAIRS), torch.full_like(places[0], STEP**2)], dim=-1)
    return of_query, of_key[:, None]


def _refuse_unable(scores: Scores, *, width: int, **given: Any) -> None:
    """Raise BackendError where a kernel would leave something out, or where a later key has an earlier position."""
    lacking = {
        "attend to later keys": not given["is_causal"],
        "take a mask of pairs": scores.mask is not None and scores.mask.ndim != 2,
        "cap scores": given.get("softcap") is not None,
        "have attention sinks": given.get("s_aux") is not None,
        f"have heads of more than {WIDEST - MULTIPLE} dimensions": width > WIDEST,
    }
    for what, asked in lacking.items():
        if asked:
            raise BackendError(
                f"flash attention cannot {what} where its head dimensions carry the bias of "
                f"{type(scores.encoding).__name__}; use model.set_attn_implementation('sdpa')."
            )
    known, asked_of = scores.positions.known, ("ascending", scores.positions.key.shape[1])
    if asked_of not in known:
        known[asked_of] = _ascending(scores.positions, given.get("cu_seq_lens_k"))
    if not known[asked_of]:
        raise BackendError(
            "positions go back along a row, and a bias in head dimensions of flash attention is one of keys behind a "
            "query; pass cu_seq_lens_q and _k and max_length_q and _k for packed texts, or use "
            "model.set_attn_implementation('sdpa'), with document_ids."
        )


def _ascending(positions: Positions, ends: Tensor | None) -> bool:
    """Tell whether no key has a smaller position than the one before it, unless a packed text starts there.

    Args:
        positions: of the call.
        ends: where packed texts start and end in the only row, (texts + 1,), or None.
    """
    back = positions.key.diff(dim=-1) < 0
    if ends is not None:
        back[:, ends[1:-1].long() - 1] = False
    return not bool(back.any())
