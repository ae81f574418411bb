"""GPT, the first one: a learned table, and attention that hides what is ahead by itself; causal, without a cache."""

from __future__ import annotations

from hf_posenc.family import DeclaredAttention, Family, register_family

register_family(
    Family(
        model_types=("openai-gpt",),
        attention=("Attention",),
        table="positions_embed",
        declared=DeclaredAttention(
            projections=("c_attn",),
            output="c_proj",
            heads="n_head",
            hides_future=True,
            dropout="attn_dropout",
            output_dropout="resid_dropout",
            listed=True,
        ),
    )
)
