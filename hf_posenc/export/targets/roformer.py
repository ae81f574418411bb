"""RoFormer: a BERT with a rotation of neighbouring dimensions, whose angles stand in a table that ends."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

from hf_posenc.export.carried import carried
from hf_posenc.export.encoder import TYPES, fits_encoder, has_pooler, read_encoder, renamed
from hf_posenc.export.rotation import interleaved, pair_frequencies, takes_rotation
from hf_posenc.export.route import Reason, Route, Source, Target, from_types, register_route
from hf_posenc.rotation import angles


def fits(source: Source) -> Reason:
    """Say why a source does not go."""
    if source.bare and has_pooler(source):
        return "it has a pooler, and the target has none"
    if source.model_type != "bert" and source.config.hidden_act != "gelu":
        return f"its head has a GELU, and that of the target the activation of its layers, {source.config.hidden_act!r}"
    return fits_encoder(source)


def table(source: Source) -> Tensor:
    """Return the sines, then the cosines, of every position, (rows, head_dim) float64; pairs that stay turn by 0."""
    speeds, factor = pair_frequencies(source)
    cos, sin = angles(torch.arange(source.rows)[None], speeds, attention_factor=factor, dtype=torch.float64)
    still = source.geometry.head_dim // 2 - len(speeds)
    sin = torch.nn.functional.pad(sin[0, 0], (0, still))
    return torch.cat([sin, torch.nn.functional.pad(cos[0, 0], (0, still), value=1.0)], dim=-1)


def build(source: Source) -> Target:
    """Return the RoFormer that computes what a BERT or RoBERTa with any static rotation computes, up to `rows`."""
    encoder, config = read_encoder(source), source.config
    prefix = "" if source.bare else "roformer."
    weights = {
        prefix + name: interleaved(source, weight) if ".self.query." in name or ".self.key." in name else weight
        for name, weight in encoder.body.items()
    }
    weights[f"{prefix}encoder.embed_positions.weight"] = table(source)
    names = {"transform.norm": "transform.LayerNorm"}
    weights |= renamed(encoder.head, names, "cls.predictions.")
    if not source.bare:
        weights["cls.predictions.decoder.bias"] = encoder.head["bias"]
    target = transformers.RoFormerConfig(
        **carried(
            source,
            max_position_embeddings=source.rows,
            embedding_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            layer_norm_eps=config.layer_norm_eps,
            type_vocab_size=config.type_vocab_size,
            hidden_dropout_prob=config.hidden_dropout_prob,
            attention_probs_dropout_prob=config.attention_probs_dropout_prob,
            rotary_value=False,
        )
    )
    cls = transformers.RoFormerModel if source.bare else transformers.RoFormerForMaskedLM
    limit = {"positions": f"{source.rows}, where its table of angles ends"}
    return Target(cls=cls, config=target, weights=weights, head=encoder.projection, limits=limit)


register_route(
    Route(
        name="roformer",
        writes="RoFormer, with its table of angles",
        rank=2,
        serves=from_types(*TYPES),
        takes=takes_rotation,
        fits=fits,
        build=build,
    )
)
