"""LayoutLM: as BERT, with the places of words on the page beside their order, which a patch leaves alone."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("layoutlm",),
        attention=("LayoutLMSelfAttention",),
        table="embeddings.position_embeddings",
        causal=False,
    )
)
