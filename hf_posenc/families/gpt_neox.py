"""GPT-NeoX and Pythia: partial rotary positions; causal."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("gpt_neox",),
        attention=("GPTNeoXAttention",),
        rotary="rotary_emb",
        partial_rotary=True,
    )
)
