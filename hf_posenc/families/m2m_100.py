"""M2M-100 and NLLB: computed tables that grow, with positions counted over what is not padding, behind its index."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("m2m_100",),
        attention=("M2M100Attention",),
        stacks=("encoder", "decoder"),
        layers="{stack}_layers",
        heads="{stack}_attention_heads",
        cross_attention="encoder_attn",
        table="embed_positions",
        table_grows=True,
        counts_padding=True,
    )
)

register_family(
    Family(
        model_types=("nllb-moe",),
        attention=("NllbMoeAttention",),
        stacks=("encoder", "decoder"),
        layers="{stack}_layers",
        heads="{stack}_attention_heads",
        cross_attention="cross_attention",
        table="embed_positions",
        table_grows=True,
        counts_padding=True,
    )
)
