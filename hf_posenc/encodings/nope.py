"""No position encoding: order reaches the model through the causal mask alone.

Haviv et al. 2022, "Transformer Language Models without Positional Encodings Still Learn Positional Information";
Kazemnejad et al. 2023, "The Impact of Positional Encoding on Length Generalization in Transformers".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.config import Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import UnsupportedEncodingError
from hf_posenc.positions import Geometry


class NoPEEncoding(Encoding):
    """Every hook neutral."""

    def __init__(self, config: NoPE, geometry: Geometry) -> None:
        super().__init__()


@register_encoding
@dataclass(frozen=True, kw_only=True)
class NoPE(EncodingConfig):
    """No position encoding.

    Attributes:
        allow_bidirectional: let an encoder have it, which then sees a bag of words (Haviv et al. report a masked
            perplexity of 147 where learned positions reach 4). Neutral value: False.
    """

    allow_bidirectional: bool = False

    name: ClassVar[str] = "nope"
    label: ClassVar[str] = "NoPE"
    module: ClassVar[type[Encoding]] = NoPEEncoding

    def check(self, geometry: Geometry) -> None:
        """Raise UnsupportedEncodingError for a model that is not causal, unless that was asked for."""
        if not geometry.causal and not self.allow_bidirectional:
            raise UnsupportedEncodingError(
                "NoPE was asked for on a bidirectional model, which would see its input as a bag of words: order "
                "reaches a model without positions only through a causal mask. Choose another encoding, or "
                "NoPE(allow_bidirectional=True) if that is the experiment."
            )
