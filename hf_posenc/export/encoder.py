"""BERT and RoBERTa, read into one form: layers with their LayerNorm behind them, and a masked-language head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_posenc.export.route import Reason, Source

TYPES = ("bert", "camembert", "roberta", "xlm-roberta")
_BERT_HEAD = {
    "transform.dense": "cls.predictions.transform.dense",
    "transform.norm": "cls.predictions.transform.LayerNorm",
}
_ROBERTA_HEAD = {"transform.dense": "lm_head.dense", "transform.norm": "lm_head.layer_norm"}


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The weights of a whole encoder.

    Attributes:
        body: without positions, by BERT's names.
        head: weight and bias of `transform.dense` and `transform.norm`, and `bias`; empty where there is no head.
        projection: (vocab_size, hidden_size), or None where it is the word embedding or there is none.
    """

    body: dict[str, Tensor]
    head: dict[str, Tensor]
    projection: Tensor | None


def fits_encoder(source: Source) -> Reason:
    """Say why a source is not such an encoder with a GELU in its head."""
    config = source.config
    if source.geometry.causal:
        return "it is used as a decoder, and the target attends both ways"
    if not source.bare and source.model_type == "bert" and config.hidden_act != "gelu":
        return f"its head has the activation {config.hidden_act!r}, and that of the target is a GELU"
    return source.no_head_but_the_language_models()


def has_pooler(source: Source) -> bool:
    """Tell whether a bare model pools."""
    return any(name.startswith("pooler.") for name in source.weights())


def read_encoder(source: Source) -> Encoder:
    """Return the weights of a source of one of `TYPES`."""
    body = {name: weight for name, weight in source.weights().items() if "position" not in name}
    if source.bare:
        return Encoder(body=body, head={}, projection=None)
    named, output = source.model.state_dict(), source.model.get_output_embeddings()
    names = _BERT_HEAD if source.model_type == "bert" else _ROBERTA_HEAD
    head = {
        f"{ours}.{part}": named[f"{theirs}.{part}"] for ours, theirs in names.items() for part in ("weight", "bias")
    }
    last: Any = output
    return Encoder(
        body=body,
        head={**head, "bias": last.bias.detach()},
        projection=None if source.tied else last.weight.detach(),
    )


def renamed(weights: Mapping[str, Tensor], names: Mapping[str, str], prefix: str = "") -> dict[str, Tensor]:
    """Return weights with parts of their names replaced, in order, behind a prefix."""
    found = {}
    for name, weight in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[prefix + name] = weight
    return found
