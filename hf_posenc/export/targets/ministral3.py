"""Ministral 3: a Llama with a temperature that rises in steps of the trained length."""

from __future__ import annotations

from typing import Any

import transformers

from hf_posenc.config import EncodingConfig
from hf_posenc.encodings.tempered import Tempered
from hf_posenc.export.gated import fits_gated, gated_fields, untied_head
from hf_posenc.export.rotation import rope_parameters, whole_heads
from hf_posenc.export.route import Reason, Route, Source, Target, from_types, register_route, within

KIND = "ministral3"


def takes(config: EncodingConfig) -> Reason:
    """Say why an encoding is not that temperature over a static rotation of whole heads."""
    if not isinstance(config, Tempered) or config.kind != KIND:
        return f"it is for Tempered(kind={KIND!r}); no stock model has another temperature over a rotation"
    return whole_heads(config.inner())


def fits(source: Source) -> Reason:
    """Say why a source does not go."""
    config: Any = source.encoding
    scaling = getattr(config.inner(), "scaling", None) or {}
    original = scaling.get("original_max_position_embeddings", config.length)
    if original != config.length:
        return f"its steps are of {config.length} tokens, its scaling is from {original}, and the target has one length"
    return fits_gated(source, window=True, bias=False)


def build(source: Source) -> Target:
    """Return the Ministral 3 that computes what a Llama or Mistral with such a temperature computes."""
    config: Any = source.encoding
    module: Any = source.module
    rope = rope_parameters(within(source, config.inner(), module.inner))
    rope |= {"llama_4_scaling_beta": config.scale, "original_max_position_embeddings": config.length}
    rope.pop("partial_rotary_factor", None)
    target = transformers.Ministral3Config(
        **gated_fields(source, sliding_window=getattr(source.config, "sliding_window", None), rope_parameters=rope)
    )
    prefix = "" if source.bare else "model."
    return Target(
        cls=transformers.Ministral3Model if source.bare else transformers.Ministral3ForCausalLM,
        config=target,
        weights={prefix + name: weight for name, weight in source.weights().items()},
        head=untied_head(source),
    )


register_route(
    Route(
        name="ministral3",
        writes="Ministral3, a temperature in steps",
        rank=1,
        serves=from_types("llama", "mistral"),
        takes=takes,
        fits=fits,
        build=build,
    )
)
