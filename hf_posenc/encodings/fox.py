"""Forgetting attention: every token decides, per head, how much of what lies before it stays visible.

Lin et al. 2025, "Forgetting Transformer: Softmax Attention with a Forget Gate", equations 3-5. Token l has the gate
f_l = sigmoid(w . x_l + b); the score of query i and key j is lowered by the sum of log f_l over j < l <= i. Checked
against flash-linear-attention's `naive_forgetting_attn`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.config import Encoding, register_encoding
from hf_posenc.gating import GatedConfig, GatedEncoding


class FoXEncoding(GatedEncoding):
    """Bias of the summed logarithms of the forget gates between key and query."""


@register_encoding
@dataclass(frozen=True, kw_only=True)
class FoX(GatedConfig):
    """Forget gates; for causal models only.

    The weight w starts at 0: at first every token forgets the same, as if by ALiBi.

    Attributes:
        bias_init: start of b in every head, no unit. The larger, the less is forgotten: 5 lowers a score by 0.0067 per
            token. Neutral value: infinity, which could not be trained.
    """

    bias_init: float = 5.0

    name: ClassVar[str] = "fox"
    label: ClassVar[str] = "FoX"
    module: ClassVar[type[Encoding]] = FoXEncoding
    sign: ClassVar[int] = -1
