"""RoBERTa: as BERT, with positions that start behind the padding index."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("roberta",),
        attention=("RobertaSelfAttention",),
        table="embeddings.position_embeddings",
        counts_padding=True,
        token_type_buffer=True,
    )
)
