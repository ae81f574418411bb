"""GPT-NeoX and others that rotate a part of every head; causal."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=(
            "gpt_neox",
            "glm4_moe",
            "minimax_m2",
            "nemotron",
            "persimmon",
            "phi",
            "phi3",
            "solar_open",
            "stablelm",
        ),
        attention=(
            "GPTNeoXAttention",
            "Glm4MoeAttention",
            "MiniMaxM2Attention",
            "NemotronAttention",
            "PersimmonAttention",
            "PhiAttention",
            "Phi3Attention",
            "SolarOpenAttention",
            "StableLmAttention",
        ),
        rotary="rotary_emb",
        partial_rotary=True,
    )
)
