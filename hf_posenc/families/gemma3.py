"""Gemma 3 and others whose sliding and full layers rotate with parameters of their own; causal."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("gemma3_text", "modernbert-decoder", "olmo3"),
        attention=("Gemma3Attention", "ModernBertDecoderAttention", "Olmo3Attention"),
        rotary="rotary_emb",
    )
)
