"""BERT and its relatives: a learned table added before the LayerNorm; bidirectional, or causal as decoders."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("bert", "electra", "ernie", "mobilebert", "roc_bert"),
        attention=(
            "BertSelfAttention",
            "ElectraSelfAttention",
            "ErnieSelfAttention",
            "MobileBertSelfAttention",
            "RoCBertSelfAttention",
        ),
        table="embeddings.position_embeddings",
        token_type_buffer=True,
        mixes="trigram_input",
    )
)

register_family(
    Family(
        model_types=("bert-generation", "distilbert"),
        attention=("BertGenerationSelfAttention", "DistilBertSelfAttention"),
        table="embeddings.position_embeddings",
    )
)
