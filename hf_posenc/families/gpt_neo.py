"""GPT-Neo: a learned table; scores without a scale; every second layer sees the nearest keys only; causal."""

from __future__ import annotations

from hf_posenc.family import DeclaredAttention, Family, register_family

register_family(
    Family(
        model_types=("gpt_neo",),
        attention=("GPTNeoSelfAttention",),
        table="wpe",
        declared=DeclaredAttention(
            projections=("q_proj", "k_proj", "v_proj"),
            output="out_proj",
            layer="layer_id",
            scaling=1.0,
            hides_future=True,
            local=("attention_type", "window_size"),
            dropout="attn_dropout",
            output_dropout="resid_dropout",
        ),
    )
)
