"""Falcon, in its three layouts (a key head for every query head, for all, or for a group); causal.

It rotates, or adds ALiBi to the mask where `use_alibi` says so.
"""

from __future__ import annotations

from hf_posenc.family import DeclaredAttention, Family, register_family

register_family(
    Family(
        model_types=("falcon",),
        attention=("FalconAttention",),
        rotary="rotary_emb",
        switches=("use_alibi",),
        declared=DeclaredAttention(
            projections=("query_key_value",),
            layout="grouped",
            output="dense",
            key_value_heads="num_kv_heads",
            positional=True,
        ),
    )
)
