"""An encoder and a decoder that are whole models, such as two BERTs: each attaches as its own model type does."""

from __future__ import annotations

from hf_posenc.family import Family, register_family

register_family(
    Family(
        model_types=("encoder-decoder",),
        attention=(),
        stacks=("encoder", "decoder"),
    )
)
