"""Cohere and others whose rotated pairs are neighbouring dimensions, in whole heads or in a part of them; causal."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("cohere", "ernie4_5", "ernie4_5_moe", "helium"),
        attention=("CohereAttention", "Ernie4_5Attention", "Ernie4_5_MoeAttention", "HeliumAttention"),
        rotary="rotary_emb",
        interleaved=True,
    )
)

register_family(
    Family(
        model_types=("cohere2",),
        attention=("Cohere2Attention",),
        rotary="rotary_emb",
        interleaved=True,
        rotates="sliding_window",
    )
)

register_family(
    Family(
        model_types=("glm", "glm4"),
        attention=("GlmAttention", "Glm4Attention"),
        rotary="rotary_emb",
        partial_rotary=True,
        interleaved=True,
    )
)
