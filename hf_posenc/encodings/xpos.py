"""xPos: a rotation whose pairs also fade with distance, the fast ones first.

Sun et al. 2022, "A Length-Extrapolatable Transformer", equations 12-14; checked against the authors' torchscale.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.config import Encoding, register_encoding
from hf_posenc.errors import ConfigError, LengthError
from hf_posenc.positions import Geometry, working_dtype
from hf_posenc.rotation import RotaryConfig
from hf_posenc.scaling import is_number

LARGEST_STATE = 256.0
"""Magnitude of queries and keys for which the scales leave room in a format."""


class XPosEncoding(Encoding):
    """Queries shrink by fade^(position / scale_base) and keys grow by it, so that a score fades with distance."""

    def __init__(self, config: XPos, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        self.center = config.center_in(geometry)
        rotation: Any = config.rotation(geometry)
        self.rotation, pairs = rotation, len(rotation.inv_freq)
        self.fade = [(k / pairs + 0.4) / 1.4 for k in range(pairs)]

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate and shrink queries: (b, h, n, d), (b, n) -> (b, h, n, d); raises LengthError as `rotate_key` does."""
        return self._scaled(self.rotation.rotate(states, position_ids), position_ids, 1)

    def rotate_key(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate and grow keys: (b, h_kv, n, d), (b, n) -> (b, h_kv, n, d).

        Raises:
            LengthError: a position so far from the centre that the scales leave the numbers of the states' format.
        """
        return self._scaled(self.rotation.rotate(states, position_ids), position_ids, -1)

    def reach(self, dtype: torch.dtype) -> int:
        """Return how far from the centre, in tokens, positions may lie in that format."""
        room = math.log(torch.finfo(dtype).max / LARGEST_STATE)
        return int(room / -math.log(self.fade[0]) * self.config.scale_base)

    def _scaled(self, states: Tensor, position_ids: Tensor, sign: int) -> Tensor:
        steps = position_ids.double() - self.center
        if not torch.compiler.is_compiling() and not steps.is_meta and steps.numel():
            furthest, reach = float(steps.abs().max()), self.reach(states.dtype)
            if furthest > reach:
                raise LengthError(
                    f"xPos reaches {reach} tokens from its centre {self.center} in {states.dtype}, and a position lies "
                    f"{furthest:.0f} away: its scales would overflow. Shorten the input or raise XPos.scale_base."
                )
        logs = torch.tensor(self.fade, dtype=torch.float64, device=steps.device).log()
        scale = (sign * steps[:, None, :, None] / self.config.scale_base * logs).exp()  # (b, 1, n, pairs)
        interleaved = self.config.pairing == "interleaved"
        scale = scale.repeat_interleave(2, dim=-1) if interleaved else torch.cat([scale, scale], dim=-1)
        scale = scale.to(working_dtype(states))
        width = scale.shape[-1]
        return torch.cat([(states[..., :width] * scale).to(states.dtype), states[..., width:]], dim=-1)

    def max_positions(self) -> int:
        """Return the positions that float32 can express."""
        return self.center + self.reach(torch.float32) + 1

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"scale_base={self.config.scale_base}, center={self.center}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class XPos(RotaryConfig):
    """xPos; causal models only.

    Attributes:
        scale_base: tokens after which a pair has faded once, > 0; the larger, the nearer to plain RoPE.
        center: position at which the scales are 1, >= 0. It cancels in every score and says only where numbers are
            small; None takes half of the trained length.
    """

    scale_base: float = 512.0
    center: int | None = None

    name: ClassVar[str] = "xpos"
    label: ClassVar[str] = "XPos"
    module: ClassVar[type[Encoding]] = XPosEncoding

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        if not (is_number(self.scale_base) and self.scale_base > 0):
            raise ConfigError(f"XPos.scale_base must be a positive number of tokens, was: {self.scale_base!r}")
        center = self.center
        if center is not None and (isinstance(center, bool) or not isinstance(center, int) or center < 0):
            raise ConfigError(f"XPos.center must be a position of at least 0, or None, was: {center!r}")

    def center_in(self, geometry: Geometry) -> int:
        """Return the position at which the scales are 1."""
        return geometry.max_position_embeddings // 2 if self.center is None else self.center

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> XPos:
        """Fill in the rotation, and the centre, from the model."""
        return dataclasses.replace(super().for_model(geometry, rope_parameters), center=self.center_in(geometry))

    def check(self, geometry: Geometry) -> None:
        """Raise UnsupportedEncodingError for an encoder, ConfigError where the rotation does not fit."""
        super().check(geometry)
        self.causal_only(geometry, "towards keys ahead its scores grow with distance instead of fading")
