"""ALBERT: as BERT, with one attention module for all layers of a group; bidirectional."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("albert",),
        attention=("AlbertAttention",),
        layers="num_hidden_groups",
        table="embeddings.position_embeddings",
        token_type_buffer=True,
    )
)
