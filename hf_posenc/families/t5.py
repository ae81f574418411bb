"""T5 and its relatives: no table, a bias by buckets of distances in either stack, and scores that are not scaled.

No config says how long their texts were: 512 tokens in T5 (Raffel et al. 2020, section 3.1.2) and Switch Transformers
(Fedus et al. 2021), 1,024 in mT5 (Xue et al. 2020) and UMT5 (Chung et al. 2023), 4,096 in LongT5 (Guo et al. 2021).
"""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("t5", "switch_transformers"),
        attention=("T5Attention", "SwitchTransformersAttention"),
        stacks=("encoder", "decoder"),
        cross_attention="EncDecAttention",
        length="n_positions",
        usual_length=512,
        bias="relative_attention_bias",
    )
)

register_family(
    Family(
        model_types=("mt5", "umt5"),
        attention=("MT5Attention", "UMT5Attention"),
        stacks=("encoder", "decoder"),
        cross_attention="EncDecAttention",
        length="n_positions",
        usual_length=1024,
        bias="relative_attention_bias",
    )
)

register_family(
    Family(
        model_types=("longt5",),
        attention=("LongT5Attention",),
        stacks=("encoder", "decoder"),
        unreached=(
            (
                "encoder",
                "its attention is local: which keys a query sees, and their bias, are computed in blocks of its own; "
                "Stacks(decoder=...) patches the decoder alone",
            ),
        ),
        cross_attention="EncDecAttention",
        length="n_positions",
        usual_length=4096,
        bias="relative_attention_bias",
    )
)
