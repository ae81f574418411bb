"""ModernBERT: sliding and full layers that rotate with parameters of their own; bidirectional."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("modernbert",),
        attention=("ModernBertAttention",),
        rotary="rotary_emb",
    )
)
