"""BERT: a learned table added before the embedding LayerNorm; bidirectional, or causal as a decoder."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("bert",),
        attention=("BertSelfAttention",),
        table="embeddings.position_embeddings",
        token_type_buffer=True,
    )
)
