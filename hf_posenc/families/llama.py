"""Llama: rotary positions, grouped key and value heads; causal."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("llama",),
        attention=("LlamaAttention",),
        rotary="rotary_emb",
    )
)
