"""What every target takes over from the config of its source as it is."""

from __future__ import annotations

from typing import Any

from hf_posenc.export.route import Source

_AS_IT_IS = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache", "loss_type", "dtype")


def carried(source: Source, **fields: Any) -> dict[str, Any]:
    """Return the fields of a target's config: sizes, special tokens, dtype and the like, then those given."""
    config, geometry = source.config, source.geometry
    found = {name: getattr(config, name) for name in _AS_IT_IS if getattr(config, name, None) is not None}
    absent = {name: None for name in _AS_IT_IS if name.endswith("token_id") and name not in found}
    return {
        **found,
        **absent,
        "dtype": source.model.dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": geometry.num_attention_heads,
        "max_position_embeddings": source.stated,
        "tie_word_embeddings": source.tied,
        **fields,
    }
