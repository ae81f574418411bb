"""CABLE: every token adds its own cost, per head, to reaching back over it.

Veisi et al. 2025, "Context-aware Biases for Length Extrapolation" (2503.08067). Token l costs softplus(w . x_l + b);
the score of query i and key j is lowered by the sum of the costs over j < l <= i. Checked against the authors'
`Cable.py`. FoX is the same sum with the opposite sign before w and b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.config import Encoding, register_encoding
from hf_posenc.gating import GatedConfig, GatedEncoding


class CableEncoding(GatedEncoding):
    """Bias of the summed costs of the tokens between key and query."""


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Cable(GatedConfig):
    """Costs that depend on the text; for causal models only.

    The weight w starts at 0: at first every token costs the same, as if by ALiBi.

    Attributes:
        bias_init: start of b in every head, no unit. The smaller, the less is lost: -5 lowers a score by 0.0067 per
            token. The reference starts from 0, by which every head loses 0.69 per token and sees a few tokens only.
            Neutral value: minus infinity, which could not be trained.
    """

    bias_init: float = -5.0

    name: ClassVar[str] = "cable"
    label: ClassVar[str] = "Cable"
    module: ClassVar[type[Encoding]] = CableEncoding
    sign: ClassVar[int] = 1
