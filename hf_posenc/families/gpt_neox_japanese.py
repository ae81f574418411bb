"""GPT-NeoX Japanese: a part of every head rotated; the bias of its last layer is returned to be added; causal."""

from __future__ import annotations

from hf_posenc.family import DeclaredAttention, Family, register_family

register_family(
    Family(
        model_types=("gpt_neox_japanese",),
        attention=("GPTNeoXJapaneseAttention",),
        rotary="rotary_emb",
        partial_rotary=True,
        declared=DeclaredAttention(
            projections=("query_key_value",),
            layout="grouped",
            output="dense",
            heads="num_attention_heads",
            returns=("dense_bias",),
            positional=True,
        ),
    )
)
