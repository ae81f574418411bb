"""SmolLM3 and EXAONE 4: rotary positions, with layers in between that have none; causal.

EXAONE 4 without windows rotates in all layers, none of which is then a sliding one.
"""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("smollm3",),
        attention=("SmolLM3Attention",),
        rotary="rotary_emb",
        rotates="use_rope",
    )
)

register_family(
    Family(
        model_types=("exaone4", "exaone_moe"),
        attention=("Exaone4Attention", "ExaoneMoeAttention"),
        rotary="rotary_emb",
        rotates="is_sliding",
    )
)
