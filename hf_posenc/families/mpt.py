"""MPT: ALiBi from a table of finite length, which nobody reads any more in a patched model; causal."""

from __future__ import annotations

from hf_posenc.family import DeclaredAttention, Family, register_family

register_family(
    Family(
        model_types=("mpt",),
        attention=("MptAttention",),
        length="max_seq_len",
        ends=True,
        declared=DeclaredAttention(
            projections=("Wqkv",),
            output="out_proj",
            heads="n_heads",
            scaling="softmax_scale",
            clip="clip_qkv",
            mask_hides=True,
            dropout="attn_dropout_p",
            positional=True,
        ),
    )
)
