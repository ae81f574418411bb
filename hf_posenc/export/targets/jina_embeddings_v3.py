"""Jina embeddings v3: a BERT with a rotation, type embeddings and pooler included."""

from __future__ import annotations

import transformers

from hf_posenc.export.carried import carried
from hf_posenc.export.encoder import TYPES, fits_encoder, has_pooler, read_encoder, renamed
from hf_posenc.export.rotation import half_split, rope_parameters, whole_heads
from hf_posenc.export.route import Reason, Route, Source, Target, from_types, register_route

NAMES = {
    "encoder.layer.": "layers.",
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "post_mlp_layernorm",
}
"""Names in a BERT -> names here, to be replaced in this order."""


def fits(source: Source) -> Reason:
    """Say why a source does not go."""
    if source.bare and not has_pooler(source):
        return "it has no pooler, and a bare target has one"
    return fits_encoder(source)


def build(source: Source) -> Target:
    """Return the Jina v3 encoder that computes what a BERT or RoBERTa with a rotation of whole heads computes."""
    encoder, config = read_encoder(source), source.config
    turned = {
        name: half_split(source, weight) if ".self.query." in name or ".self.key." in name else weight
        for name, weight in encoder.body.items()
    }
    weights = renamed(turned, NAMES, "" if source.bare else "roberta.")
    names = {"transform.dense": "lm_head.dense", "transform.norm": "lm_head.layer_norm"}
    weights |= renamed({name: weight for name, weight in encoder.head.items() if name != "bias"}, names)
    if not source.bare:
        weights |= {"lm_head.bias": encoder.head["bias"], "lm_head.decoder.bias": encoder.head["bias"]}
    target = transformers.JinaEmbeddingsV3Config(
        **carried(
            source,
            # releases before 5.24 look the types of segments up in a buffer of this length
            max_position_embeddings=max(source.stated, source.rows),
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            layer_norm_eps=config.layer_norm_eps,
            type_vocab_size=config.type_vocab_size,
            hidden_dropout_prob=config.hidden_dropout_prob,
            attention_probs_dropout_prob=config.attention_probs_dropout_prob,
            rope_parameters=rope_parameters(source),
        )
    )
    cls = transformers.JinaEmbeddingsV3Model if source.bare else transformers.JinaEmbeddingsV3ForMaskedLM
    return Target(cls=cls, config=target, weights=weights, head=encoder.projection)


register_route(
    Route(
        name="jina_embeddings_v3",
        writes="JinaEmbeddingsV3",
        rank=1,
        serves=from_types(*TYPES),
        takes=whole_heads,
        fits=fits,
        build=build,
        runs="llama.cpp as an embedding model, without the head",
    )
)
