"""RoFormer: neighbouring dimensions rotated by a table of finite length; bidirectional, or causal as decoder.

A patched model has no use for that table, and its length is no limit any more.
"""

from __future__ import annotations

from hf_posenc.family import DeclaredAttention, Family, register_family

register_family(
    Family(
        model_types=("roformer",),
        attention=("RoFormerSelfAttention",),
        interleaved=True,
        silent=("encoder.embed_positions",),
        declared=DeclaredAttention(
            projections=("query", "key", "value"),
            heads="num_attention_heads",
            causal="is_decoder",
            dropout="dropout",
            positional=True,
        ),
    )
)
