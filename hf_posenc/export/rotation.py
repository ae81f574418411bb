"""A rotation, or none, in the `rope_parameters` of stock models.

Two of transformers' own types hold what no other does. `longrope` with the same factors for short and long texts is any
static frequency for every pair. `llama3` with a factor of 1e30 is no rotation: every angle is too small for a cosine
other than 1, and its sine vanishes beside it. `linear` with that factor would be the same, but not in engines that lay
their tables out over the length times its factor.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from hf_posenc.config import EncodingConfig
from hf_posenc.encodings.drope import DroPE
from hf_posenc.encodings.lerope import LeRoPE
from hf_posenc.encodings.nope import NoPE
from hf_posenc.encodings.rope import RoPE
from hf_posenc.export.route import Reason, Source
from hf_posenc.rotation import interleaved_order, permuted_weight
from hf_posenc.scaling import frequencies

STILL = 1e30
"""Divisor of a frequency that leaves no angle."""
_HALF_SPLIT: dict[str, Any] = {"pairing": "half_split"}


def silent(config: EncodingConfig) -> bool:
    """Tell whether an encoding says nothing at all."""
    if isinstance(config, DroPE) and config.normalization != "none":
        return False
    bare = isinstance(config, DroPE) and (config.factor == 1 or config.coefficient == 0)
    return config.temperature is None and (isinstance(config, NoPE) or bare)


def takes_rotation(config: EncodingConfig) -> Reason:
    """Say why an encoding is not one static frequency for every pair, in all layers, or none at all."""
    if silent(config):
        return None
    if not isinstance(config, RoPE | LeRoPE):
        return f"{config.name} is no rotation by fixed frequencies, which is all that rope_parameters describe"
    if config.temperature is not None:
        return "its scores have a temperature, of which rope_parameters say nothing"
    if isinstance(config, LeRoPE) and config.per_layer:
        return "its frequencies differ from layer to layer, and a stock model has one set"
    if isinstance(config, RoPE) and config.mode in ("consistent", "hf_compat"):
        return (
            "its frequencies follow the length of the text; a stock model takes them from the longest call so far and "
            "leaves cached keys turned by older ones, so that decoding differs from a full forward by whole logits"
        )
    return None


def whole_heads(config: EncodingConfig) -> Reason:
    """Say why an encoding is not a static rotation of whole heads; see `takes_rotation`."""
    share = getattr(config, "partial_rotary_factor", None) or 1.0
    kind = ((getattr(config, "scaling", None) or {}).get("rope_type"),)
    if share != 1.0 and kind != ("proportional",):
        return takes_rotation(config) or f"it turns whole heads only, and the encoding {share:g} of them"
    return takes_rotation(config)


def rope_parameters(source: Source, *, container: bool = False) -> dict[str, Any]:
    """Return the parameters with which a stock rotary module turns as the encoding of the source does.

    Args:
        source: with an encoding that `takes_rotation`.
        container: use nothing beside `default` and `longrope`.
    """
    config, geometry = source.encoding, source.geometry
    if silent(config):
        if not container:
            return no_rotation(geometry.max_position_embeddings)
        theta, found, attention_factor = 10000.0, [0.0] * (geometry.head_dim // 2), 1.0
    else:
        plain: Any = dataclasses.replace(config, **_HALF_SPLIT) if isinstance(config, RoPE) else config
        native: dict[str, Any] | None = plain.rope_parameters(geometry)
        if native is not None and (native["rope_type"] == "default" or not container):
            return native
        theta, (found, attention_factor) = float(plain.theta or 10000.0), pair_frequencies(source)
    dim = 2 * len(found)
    divisors = [base / f if f else STILL for base, f in zip(frequencies(theta, dim), found, strict=True)]
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "partial_rotary_factor": dim / geometry.head_dim,
        "short_factor": divisors,
        "long_factor": divisors,
        "factor": 1.0,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": geometry.max_position_embeddings,
    }


def pair_frequencies(source: Source) -> tuple[list[float], float]:
    """Return the radians per token of every rotated pair, and the factor on cosine and sine."""
    if silent(source.encoding):
        return [], 1.0
    module: Any = source.module
    speeds, factor = list(module.inv_freq), float(module.attention_factor)
    if isinstance(source.encoding, LeRoPE):
        speeds = [
            speed * grown for speed, grown in zip(speeds, module.alpha.detach().double().exp().tolist(), strict=True)
        ]
    return speeds, factor


def no_rotation(length: int) -> dict[str, Any]:
    """Return the parameters of a rotation by nothing, for a model trained at that length in tokens.

    The two bounds on wavelengths are 1 and 1/4 of a token, so that every pair is slowed by the whole factor.
    """
    return {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "factor": STILL,
        "low_freq_factor": float(length),
        "high_freq_factor": 4.0 * length,
        "original_max_position_embeddings": length,
    }


def half_split(source: Source, weight: Tensor) -> Tensor:
    """Return a query or key projection, (heads * head_dim, ...), whose rotated pairs are those of `half_split`."""
    if getattr(source.encoding, "pairing", "half_split") == "half_split":
        return weight
    return permuted_weight(weight, interleaved_order(_rotated(source), source.geometry.head_dim).argsort())


def interleaved(source: Source, weight: Tensor) -> Tensor:
    """Return a query or key projection, (heads * head_dim, ...), whose rotated pairs are neighbours."""
    if getattr(source.encoding, "pairing", "half_split") == "interleaved":
        return weight
    return permuted_weight(weight, interleaved_order(_rotated(source), source.geometry.head_dim))


def _rotated(source: Source) -> int:
    return 2 * len(getattr(source.module, "inv_freq", ()))
