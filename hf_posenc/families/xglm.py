"""XGLM: fixed sinusoids, computed as far as they are needed, whose first two rows belong to no position; causal."""

from __future__ import annotations

from hf_posenc.family import DeclaredAttention, Family, register_family

register_family(
    Family(
        model_types=("xglm",),
        attention=("XGLMAttention",),
        table="embed_positions",
        table_offset=2,
        table_grows=True,
        declared=DeclaredAttention(
            projections=("q_proj", "k_proj", "v_proj"),
            output="out_proj",
            dropout="dropout",
        ),
    )
)
