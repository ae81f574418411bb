"""Llama and its twins: RMSNorm, gated feed-forward layers and a rotation, under the same names in all of them."""

from __future__ import annotations

from typing import Any

from hf_posenc.export.carried import carried
from hf_posenc.export.route import Reason, Source

TYPES = ("llama", "mistral", "qwen2")


def fits_gated(source: Source, *, window: bool, bias: bool) -> Reason:
    """Say why a source is not such a model.

    Args:
        source: of one of `TYPES`.
        window: whether the target has a sliding window, the same in all layers.
        bias: whether its linear layers may have biases.
    """
    config = source.config
    windows = {kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
    if (getattr(config, "sliding_window", None) and not window) or windows:
        return "some of its layers see a window, which the target does not have"
    if not bias and any(name.endswith("bias") for name in source.weights()):
        return "its linear layers have biases, and those of the target have none"
    return source.no_head_but_the_language_models()


def gated_fields(source: Source, **fields: Any) -> dict[str, Any]:
    """Return the fields of a target's config that mean the same in all of these models, then those given."""
    config = source.config
    return carried(
        source,
        num_key_value_heads=source.geometry.num_key_value_heads,
        head_dim=source.geometry.head_dim,
        intermediate_size=config.intermediate_size,
        hidden_act=config.hidden_act,
        rms_norm_eps=config.rms_norm_eps,
        attention_dropout=config.attention_dropout,
        **fields,
    )


def untied_head(source: Source) -> Any:
    """Return the head where it has weights of its own, (vocab_size, hidden_size), or None."""
    head: Any = source.model.get_output_embeddings()
    return None if source.bare or source.tied else head.weight.detach()
