"""What rotary encodings share: turning states by angles, scores of turned states, and the fields of their configs.

Su et al. 2021, "RoFormer", equations 14-16 and 34. Two pairings are in use: `half_split` turns dimension k with
k + half (GPT-NeoX, Llama), `interleaved` turns 2k with 2k + 1 (GPT-J, RoFormer).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_posenc.config import Encoding, EncodingConfig, encoding
from hf_posenc.errors import UnsupportedEncodingError
from hf_posenc.positions import Geometry, working_dtype

ROTATION = ("theta", "partial_rotary_factor", "scaling", "pairing")
"""Fields of `RoPE` that encodings over a rotation have as well."""
PAIRINGS = ("half_split", "interleaved")
UNSEEN = -1e30
"""Score of a key that an encoding hides: no weight in any softmax, and finite, so that gradients are."""


def angles(
    position_ids: Tensor, inv_freq: Sequence[float], *, attention_factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine times the attention factor, each (b, 1, n, pairs) in `dtype`; phases are float64.

    Args:
        position_ids: (b, n), integers or, between them, float64.
        inv_freq: radians per token of every pair.
        attention_factor: factor on both; scores grow by its square.
        dtype: of the result.
    """
    speed = torch.tensor(inv_freq, dtype=torch.float64, device=position_ids.device)
    phases = position_ids[:, None, :, None].double() * speed  # (b, 1, n, pairs)
    return (phases.cos() * attention_factor).to(dtype), (phases.sin() * attention_factor).to(dtype)


def turn(states: Tensor, cos: Tensor, sin: Tensor, *, pairing: str | None = None) -> Tensor:
    """Turn the leading dimensions of (b, h, n, d) by (b, 1, n, pairs) angles, 2 * pairs <= d; the rest is bit-equal.

    Computed in the dtype of the angles, returned in the dtype of `states`.
    """
    if cos.requires_grad or sin.requires_grad or torch.compiler.is_compiling():
        return _turned(states, cos, sin, pairing)
    result: Tensor = _Turn.apply(states, cos, sin, pairing)  # type: ignore[no-untyped-call]
    return result


def _turned(states: Tensor, cos: Tensor, sin: Tensor, pairing: str | None) -> Tensor:
    width = 2 * cos.shape[-1]
    first, second = (half.to(cos.dtype) for half in _halves(states, width, pairing))
    halves = [half.to(states.dtype) for half in (first * cos - second * sin, second * cos + first * sin)]
    turned = [torch.stack(halves, dim=-1).flatten(-2)] if pairing == "interleaved" else halves
    return torch.cat([*turned, states[..., width:]], dim=-1)


def _halves(states: Tensor, width: int, pairing: str | None) -> tuple[Tensor, Tensor]:
    """Return the first and the second of every pair, views (..., pairs)."""
    if pairing == "interleaved":
        return states[..., 0:width:2], states[..., 1:width:2]
    return states[..., : width // 2], states[..., width // 2 : width]


class _Turn(torch.autograd.Function):
    """The same, written in place; its gradient is turned back, and keeps nothing but the angles."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor, pairing: str | None) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairing = pairing
        width = 2 * cos.shape[-1]
        result = torch.empty_like(states)
        first, second = (half.to(cos.dtype) for half in _halves(states, width, pairing))
        parts = _halves(result, width, pairing)
        # no fused product and sum: it would round otherwise than the plain formula, and so than trained frequencies
        if states.dtype == cos.dtype:
            torch.mul(first, cos, out=parts[0]).sub_(second * sin)
            torch.mul(second, cos, out=parts[1]).add_(first * sin)
        else:
            parts[0].copy_((first * cos).sub_(second * sin))
            parts[1].copy_((second * cos).add_(first * sin))
        result[..., width:] = states[..., width:]
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _Turn.apply(gradient, cos, -sin, ctx.pairing), None, None, None  # type: ignore[no-untyped-call]


def interleaved_order(rotary_dim: int, head_dim: int) -> Tensor:
    """Return the order (head_dim,) int64 that makes a half-split head an interleaved one.

    `states[..., order]` turned in the interleaved pairing is the half-split result in that same order, so that scores
    stay what they are. `order.argsort()` leads back.
    """
    paired = torch.arange(rotary_dim).view(2, -1).T.flatten()
    return torch.cat([paired, torch.arange(rotary_dim, head_dim)])


def permuted_weight(weight: Tensor, order: Tensor) -> Tensor:
    """Return a query or key projection whose heads come out in that order: (heads * head_dim, ...), the same shape.

    Bit-equal rows in another order; biases, (heads * head_dim,), go through the same way. Convolution layers such as
    GPT-2's keep outputs in the last dimension: transpose them first.
    """
    return weight.view(-1, len(order), *weight.shape[1:])[:, order].reshape(weight.shape)


def products(query: Tensor, key: Tensor) -> Tensor:
    """Return the scores of (b, h, q, d) queries on (b, h_kv, k, d) keys: (b, h, q, k), float32 (float64 for float64).

    Consecutive query heads share a key head where there are fewer of those.
    """
    dtype = working_dtype(query)
    grouped = query.to(dtype).unflatten(1, (key.shape[1], -1))  # (b, h_kv, shared, q, d)
    scores: Tensor = grouped @ key.to(dtype)[:, :, None].mT
    return scores.flatten(1, 2)


R = TypeVar("R", bound="RotaryConfig")


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(EncodingConfig):
    """What encodings have that change what a rotary model does with its rotation.

    Attributes:
        theta: base of the frequencies, > 1; None takes the model's own, or 10000 where it has none.
        partial_rotary_factor: rotated fraction of the head, in (0, 1]; None takes the model's own, or 1.
        scaling: a scaling as RoPE takes it; None keeps the one that the model has.
        pairing: `half_split` or `interleaved`, as RoPE takes it; None takes that of the model's weights.
    """

    theta: float | None = None
    partial_rotary_factor: float | None = None
    scaling: dict[str, Any] | None = None
    pairing: str | None = None

    @property
    def within_length(self) -> str:
        """On a rotary model some of these change nothing before the trained length is reached."""
        return "either"

    def __post_init__(self) -> None:
        """Check the fields and bring `scaling` into one spelling; raises ConfigError."""
        super().__post_init__()
        object.__setattr__(self, "scaling", self._rope().to_dict()["scaling"])

    def _rope(self) -> EncodingConfig:
        return encoding("rope", **{field: getattr(self, field) for field in ROTATION})

    def check(self, geometry: Geometry) -> None:
        """Raise ConfigError where the rotation does not fit, UnsupportedEncodingError where it grows with the text."""
        self.rotation(geometry)

    def rotation(self, geometry: Geometry) -> Encoding:
        """Return the encoding that turns states by their position; `inv_freq` and `attention_factor` are its numbers.

        Raises:
            ConfigError: the fields do not fit the geometry.
            UnsupportedEncodingError: the rotation depends on the length of the text.
        """
        rotation = self._rope().build(geometry)
        if rotation.rotation_grows_after is not None:
            raise UnsupportedEncodingError(
                f"{type(self).__name__} needs a rotation that does not change while the text grows, and scaling "
                f"{self.scaling} does; choose mode='frozen', or a static scaling such as yarn or ntk."
            )
        return rotation

    def for_model(self: R, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> R:
        """Fill in theta, rotated fraction, scaling and original length from the model."""
        filled = self._rope().for_model(geometry, rope_parameters).to_dict()
        return dataclasses.replace(
            super().for_model(geometry, rope_parameters), **{field: filled[field] for field in ROTATION}
        )

    def causal_only(self, geometry: Geometry, reason: str) -> None:
        """Raise UnsupportedEncodingError, with the reason, for a model in which a query sees later keys."""
        if not geometry.causal:
            raise UnsupportedEncodingError(f"{type(self).__name__} is for causal models only: {reason}.")
