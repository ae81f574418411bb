"""BioGPT: a learned table whose first two rows belong to no position; causal."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("biogpt",),
        attention=("BioGptAttention",),
        table="embed_positions",
        table_offset=2,
    )
)
