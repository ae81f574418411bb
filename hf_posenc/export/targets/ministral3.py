"""Ministral 3: a Llama with a temperature that rises in steps of the trained length."""

from __future__ import annotations

import dataclasses
from typing import Any

import transformers

from hf_posenc.config import EncodingConfig
from hf_posenc.export.gated import fits_gated, gated_fields, untied_head
from hf_posenc.export.rotation import rope_parameters, whole_heads
from hf_posenc.export.route import Reason, Route, Source, Target, from_types, register_route, within

KIND = "ministral3"


def takes(config: EncodingConfig) -> Reason:
    """Say why an encoding is not that temperature over a static rotation of whole heads."""
    if getattr(config.temperature, "kind", None) != KIND:
        return f"it is for the temperature {KIND!r}; no stock model has another one over a rotation"
    return whole_heads(untempered(config))


def untempered(config: EncodingConfig) -> EncodingConfig:
    """Return the encoding without its temperature."""
    return dataclasses.replace(config, temperature=None)


def fits(source: Source) -> Reason:
    """Say why a source does not go."""
    config: Any = source.encoding
    scaling, length = getattr(config, "scaling", None) or {}, config.temperature.length
    original = scaling.get("original_max_position_embeddings", length)
    if original != length:
        return f"its steps are of {length} tokens, its scaling is from {original}, and the target has one length"
    return fits_gated(source, window=True, bias=False)


def build(source: Source) -> Target:
    """Return the Ministral 3 that computes what a Llama or Mistral with such a temperature computes."""
    temperature: Any = source.encoding.temperature
    rope = rope_parameters(within(source, untempered(source.encoding), source.module))
    rope |= {"llama_4_scaling_beta": temperature.scale, "original_max_position_embeddings": temperature.length}
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
        tempered=True,
    )
)
