"""GPT-2: a learned table added to the token embedding; causal."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("gpt2",),
        attention=("GPT2Attention",),
        table="wpe",
    )
)
