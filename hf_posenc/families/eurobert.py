"""Encoders with rotary positions: EuroBERT, Jina v3 and Nomic BERT; bidirectional."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("eurobert",),
        attention=("EuroBertAttention",),
        rotary="rotary_emb",
    )
)

register_family(
    Family(
        model_types=("jina_embeddings_v3", "nomic_bert"),
        attention=("JinaEmbeddingsV3Attention", "NomicBertAttention"),
        rotary="rotary_emb",
        token_type_buffer=True,
    )
)
