"""ESM: RoBERTa's table, or from ESM-2 on a rotation in its place, as `position_embedding_type` says; bidirectional."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("esm",),
        attention=("EsmSelfAttention",),
        table="embeddings.position_embeddings",
        rotary="rotary_embeddings",
        either=True,
        counts_padding=True,
    )
)
