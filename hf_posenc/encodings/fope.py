"""FoPE: a rotation whose pairs turn by mixtures of frequencies, without those that never turned in training.

Hua et al. 2024, "Fourier Position Embedding" (arXiv 2412.17739), section 4; checked against the `FourierEmbedding` of
the authors' olmo/model.py. Frequencies that do not finish one turn within the trained length are dropped. Of what is
left, every pair of a head has its own weighted sum of all cosines and its own of all sines: the identity plus noise,
drawn once. Scores depend on the distance up to that noise. The reference lets at most a quarter of the head's
dimensions come out as such pairs; here every frequency that is kept has a pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Choices, Encoding, register_encoding
from hf_posenc.errors import ConfigError
from hf_posenc.positions import Geometry, working_dtype
from hf_posenc.rotation import RotaryConfig, turn
from hf_posenc.scaling import is_number

SINES = {"one": 1.0, "zero": 0.0}


class FoPEEncoding(Encoding):
    """Turns pairs by sums of cosines and sums of sines.

    Parameters: `cosines` and `sines`, (key heads, frequencies, pairs) each; frozen unless the config has them trained.
    """

    def __init__(self, config: FoPE, geometry: Geometry) -> None:
        super().__init__()
        rotation: Any = config.rotation(geometry)
        self.pairing = config.pairing
        slowest = 2 * math.pi / geometry.max_position_embeddings
        self.inv_freq = [speed for speed in rotation.inv_freq if speed >= slowest]
        self.still, self.sine = len(rotation.inv_freq) - len(self.inv_freq), SINES[config.still_sines]
        kept = len(self.inv_freq)
        noise = torch.empty(2, geometry.num_key_value_heads, kept, kept)
        for part in noise:
            nn.init.xavier_normal_(part, gain=config.gain)
        cosines, sines = noise + torch.eye(kept)
        self.cosines = nn.Parameter(cosines.clone(), requires_grad=config.trainable)
        self.sines = nn.Parameter(sines.clone(), requires_grad=config.trainable)

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Turn queries or keys: (b, h, n, d), (b, n) -> (b, h, n, d); a query as the key head that it looks at."""
        dtype = working_dtype(states)  # the sums are taken in float64, which no autocast rounds
        speed = torch.tensor(self.inv_freq, dtype=torch.float64, device=position_ids.device)
        phases = position_ids[:, None, :, None].double() * speed  # (b, 1, n, frequencies)
        cos, sin = phases.cos() @ self.cosines.double(), phases.sin() @ self.sines.double()  # (b, h_kv, n, pairs)
        cos = nn.functional.pad(cos, (0, self.still), value=1.0).to(dtype)
        sin = nn.functional.pad(sin, (0, self.still), value=self.sine).to(dtype)
        shared = states.shape[1] // cos.shape[1]
        cos, sin = cos.repeat_interleave(shared, dim=1), sin.repeat_interleave(shared, dim=1)
        return turn(states, cos, sin, pairing=self.pairing)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"frequencies={len(self.inv_freq)}, still={self.still}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class FoPE(RotaryConfig):
    """Fourier position embedding; needs training.

    Attributes:
        gain: of the noise in the sums (Xavier's), >= 0; the authors have 0.3, 0.4 and 0.6 for 60, 180 and 1200 million
            parameters. At 0, the neutral value, every pair turns by its own frequency.
        still_sines: the sine of pairs that do not turn, whose cosine is 1: `one`, as in the reference code, which turns
            them all by the same eighth and grows them by sqrt(2), or `zero`, which leaves them as they are.
        trainable: let the weights of the sums be trained. Neutral value: False, as published.
        per_layer: sums of their own for every layer, as published, or one set for all.
    """

    gain: float = 0.3
    still_sines: str = "one"
    trainable: bool = False
    per_layer: bool = True

    name: ClassVar[str] = "fope"
    label: ClassVar[str] = "FoPE"
    module: ClassVar[type[Encoding]] = FoPEEncoding
    choices: ClassVar[Choices] = {"still_sines": SINES}

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        if not (is_number(self.gain) and self.gain >= 0):
            raise ConfigError(f"FoPE.gain must be a number of at least 0, was: {self.gain!r}")

    def check(self, geometry: Geometry) -> None:
        """Raise ConfigError where no frequency finishes a turn within the trained length, or the rotation is unfit."""
        rotation: Any = self.rotation(geometry)
        if rotation.inv_freq[0] < 2 * math.pi / geometry.max_position_embeddings:
            raise ConfigError(
                f"FoPE keeps frequencies that finish a turn within the trained length, and none does within "
                f"{geometry.max_position_embeddings} tokens"
            )
