"""Whisper: the decoder, which writes text by a learned table; the encoder, which hears sound, is left alone."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("whisper",),
        attention=("WhisperAttention",),
        stacks=("decoder",),
        unreached=(
            ("encoder", "it hears frames of sound, always 30 seconds of them, and adds its whole table to every input"),
        ),
        layers="{stack}_layers",
        heads="{stack}_attention_heads",
        cross_attention="encoder_attn",
        length="max_target_positions",
        table="embed_positions",
    )
)
