"""Megatron-BERT and RemBERT: as BERT, with attention of their own; bidirectional, or causal as decoders."""

from __future__ import annotations

from hf_posenc.family import DeclaredAttention, Family, register_family

register_family(
    Family(
        model_types=("megatron-bert", "rembert"),
        attention=("MegatronBertSelfAttention", "RemBertSelfAttention"),
        table="embeddings.position_embeddings",
        declared=DeclaredAttention(
            projections=("query", "key", "value"),
            heads="num_attention_heads",
            causal="is_decoder",
            dropout="dropout",
        ),
    )
)
