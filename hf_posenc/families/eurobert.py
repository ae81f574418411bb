"""Encoders with rotary positions: EuroBERT, Jina v3, Nomic BERT; bidirectional."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("eurobert", "jina_embeddings_v3", "nomic_bert"),
        attention=("EuroBertAttention", "JinaEmbeddingsV3Attention", "NomicBertAttention"),
        rotary="rotary_emb",
    )
)
