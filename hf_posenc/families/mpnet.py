"""MPNet: RoBERTa's table and T5's bias beside it, both of which a patch takes out; bidirectional."""

from __future__ import annotations

from hf_posenc.family import DeclaredAttention, Family, register_family

register_family(
    Family(
        model_types=("mpnet",),
        attention=("MPNetSelfAttention",),
        table="embeddings.position_embeddings",
        counts_padding=True,
        declared=DeclaredAttention(
            projections=("q", "k", "v"),
            output="o",
            heads="num_attention_heads",
            causal=False,
            dropout="dropout",
            positional=True,
        ),
    )
)
