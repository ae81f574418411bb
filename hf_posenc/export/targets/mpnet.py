"""MPNet: a BERT with T5's bias of 32 buckets up to distance 128, which is hard-wired there."""

from __future__ import annotations

from typing import Any

import transformers

from hf_posenc.config import EncodingConfig
from hf_posenc.encodings.t5_bias import T5
from hf_posenc.export.carried import carried
from hf_posenc.export.encoder import TYPES, fits_encoder, has_pooler, read_encoder, renamed
from hf_posenc.export.route import Reason, Route, Source, Target, from_types, register_route

BUCKETS, DISTANCE = 32, 128
PADDING = 1
"""Index of the padding, which MPNet's positions count from whatever the config says."""
NAMES = {
    "attention.self.query": "attention.attn.q",
    "attention.self.key": "attention.attn.k",
    "attention.self.value": "attention.attn.v",
    "attention.output.dense": "attention.attn.o",
    "attention.output.LayerNorm": "attention.LayerNorm",
}


def takes(config: EncodingConfig) -> Reason:
    """Say why an encoding is not the bias that MPNet has."""
    if not isinstance(config, T5):
        return f"{config.name} is not T5's bias, which is the only one that an encoder among the stock models has"
    if (config.num_buckets, config.max_distance) != (BUCKETS, DISTANCE):
        return f"its buckets are not {BUCKETS} up to distance {DISTANCE}, which the target has whatever its config says"
    return "its tables differ from layer to layer, and the target has one" if config.per_layer else None


def fits(source: Source) -> Reason:
    """Say why a source does not go."""
    if source.bare and not has_pooler(source):
        return "it has no pooler, and a bare target has one"
    return fits_encoder(source)


def build(source: Source) -> Target:
    """Return the MPNet that computes what a BERT or RoBERTa with T5's bias computes on one segment.

    The first type embedding is folded into the word embedding, which is untied from the head then.
    """
    encoder, config = read_encoder(source), source.config
    module: Any = source.module
    body, head = dict(encoder.body), encoder.head
    words = body.pop("embeddings.word_embeddings.weight")
    folded = words + body.pop("embeddings.token_type_embeddings.weight")[0]
    rows = source.rows + PADDING + 1
    prefix = "" if source.bare else "mpnet."
    weights = renamed(body, NAMES, prefix) | {
        f"{prefix}embeddings.word_embeddings.weight": folded,
        f"{prefix}embeddings.position_embeddings.weight": words.new_zeros(rows, words.shape[1]),
        f"{prefix}encoder.relative_attention_bias.weight": module.weight.detach() * module.multiplier,
    }
    names = {"transform.dense": "lm_head.dense", "transform.norm": "lm_head.layer_norm"}
    weights |= renamed({name: weight for name, weight in head.items() if name != "bias"}, names)
    if not source.bare:
        weights |= {"lm_head.bias": head["bias"], "lm_head.decoder.bias": head["bias"]}
    target = transformers.MPNetConfig(
        **carried(
            source,
            max_position_embeddings=rows,
            tie_word_embeddings=False,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            layer_norm_eps=config.layer_norm_eps,
            relative_attention_num_buckets=BUCKETS,
            hidden_dropout_prob=config.hidden_dropout_prob,
            attention_probs_dropout_prob=config.attention_probs_dropout_prob,
        )
    )
    last = None if source.bare else words if encoder.projection is None else encoder.projection
    return Target(
        cls=transformers.MPNetModel if source.bare else transformers.MPNetForMaskedLM,
        config=target,
        weights=weights,
        head=last,
        limits={
            "segments": "the first; the target takes no token_type_ids",
            "positions": f"{source.rows}, where its empty table ends",
        },
    )


register_route(
    Route(
        name="mpnet",
        writes="MPNet, for texts of one segment",
        rank=1,
        serves=from_types(*TYPES),
        takes=takes,
        fits=fits,
        build=build,
    )
)
