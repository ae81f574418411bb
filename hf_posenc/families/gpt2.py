"""GPT-2, with GPT-SW3, which is one, and GPTBigCode: a learned table added to the token embedding; causal."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("gpt2", "gpt_bigcode"),
        attention=("GPT2Attention", "GPTBigCodeAttention"),
        table="wpe",
    )
)
