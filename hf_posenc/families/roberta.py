"""RoBERTa and its relatives: as BERT, with positions that start behind the padding index."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=(
            "roberta",
            "camembert",
            "data2vec-text",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        attention=(
            "RobertaSelfAttention",
            "CamembertSelfAttention",
            "Data2VecTextSelfAttention",
            "RobertaPreLayerNormSelfAttention",
            "XLMRobertaSelfAttention",
            "XLMRobertaXLSelfAttention",
            "XmodSelfAttention",
        ),
        table="embeddings.position_embeddings",
        counts_padding=True,
        token_type_buffer=True,
    )
)
