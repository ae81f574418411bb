"""BLOOM: ALiBi inside attention, which the declared forward leaves out; causal."""

from __future__ import annotations

from hf_posenc.family import DeclaredAttention, Family, register_family

register_family(
    Family(
        model_types=("bloom",),
        attention=("BloomAttention",),
        length="seq_length",
        declared=DeclaredAttention(
            projections=("query_key_value",),
            layout="grouped",
            output="dense",
            output_dropout="hidden_dropout",
            residual="residual",
            positional=True,
        ),
    )
)
