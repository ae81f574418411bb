"""GPT-J and CodeGen: neighbouring dimensions of a part of every head, rotated by a table of sines; causal."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("gptj", "codegen"),
        attention=("GPTJAttention", "CodeGenAttention"),
        rotary="rotary_emb",
        partial_rotary=True,
        interleaved=True,
        sine_first=True,
        ends=True,
    )
)
