"""SmolLM3: rotary positions, with layers in between that have none; causal."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("smollm3",),
        attention=("SmolLM3Attention",),
        rotary="rotary_emb",
        rotates="use_rope",
    )
)
