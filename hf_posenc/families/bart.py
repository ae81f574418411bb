"""BART and others of its plan: an encoder and a decoder with a table of positions each, learned or computed.

The decoders count slots of the cache, and neither stack takes `position_ids`; a patched one counts what its mask shows.
"""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("bart", "mbart", "plbart"),
        attention=("BartAttention", "MBartAttention", "PLBartAttention"),
        stacks=("encoder", "decoder"),
        layers="{stack}_layers",
        heads="{stack}_attention_heads",
        cross_attention="encoder_attn",
        table="embed_positions",
        table_offset=2,
    )
)

register_family(
    Family(
        model_types=("blenderbot", "blenderbot-small", "marian", "pegasus"),
        attention=("BlenderbotAttention", "BlenderbotSmallAttention", "MarianAttention", "PegasusAttention"),
        stacks=("encoder", "decoder"),
        layers="{stack}_layers",
        heads="{stack}_attention_heads",
        cross_attention="encoder_attn",
        table="embed_positions",
    )
)
