"""BERT's relative_key and relative_key_query, which transformers dropped in version 5.

Huang et al. 2020, "Improve Transformer Models with Better Relative Position Embeddings", methods 1 to 4, as
transformers 4 wrote them: with E the row of the distance l - r, the score of query l and key r gains
q_l . E / sqrt(head_dim), and with relative_key_query also k_r . E / sqrt(head_dim). Checked against the code of
transformers 4's `BertSelfAttention`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Choices, Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import CheckpointError, ConfigError
from hf_posenc.positions import Geometry, Positions

TYPES = ("relative_key", "relative_key_query")
_LEGACY = re.compile(r"^(.*?)encoder\.layer\.(\d+)\.attention\.self\.distance_embedding\.weight$")


def legacy_tables(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the distance tables of a checkpoint of transformers 4 by the names that they have in a patched model.

    `...encoder.layer.N.attention.self.distance_embedding.weight`, (2 * max_position_embeddings - 1, head_dim), becomes
    `...posenc.layers.N.distance_embedding.weight` of a model patched with `BertRelative(per_layer=True)`, which
    `model.load_state_dict(legacy_tables(state), strict=False)` fills in.

    Raises:
        CheckpointError: there is no such table.
    """
    found = {_LEGACY.sub(r"\1posenc.layers.\2.distance_embedding.weight", name): name for name in state}
    tables = {new: state[name] for new, name in found.items() if new != name}
    if not tables:
        raise CheckpointError(
            "no distance_embedding.weight among the weights: the checkpoint was not trained with relative_key or "
            "relative_key_query, or it was saved by transformers 5, which drops them."
        )
    return tables


class BertRelativeEncoding(Encoding):
    """Bias of the products of query, and key, with the row of their distance; zero at the start, which changes nothing.

    The table is the one of legacy checkpoints, row for row; see `legacy_tables`.
    """

    def __init__(self, config: BertRelative, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        self.one_sided = geometry.causal
        self.reach = config.max_position_embeddings or geometry.max_position_embeddings
        if config.position_embedding_type == "relative_key":
            self.bias_settles_at = self.reach - 1
        self.scaling: float = geometry.head_dim**-0.5
        self.distance_embedding = nn.Embedding(2 * self.reach - 1, geometry.head_dim)
        nn.init.zeros_(self.distance_embedding.weight)

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor:
        """Return (b, h, q, k), float32 (float64 for float64 queries).

        Distances past the table take its first or last row, where the reference had no answer; keys ahead of a causal
        query count as distance 0.
        """
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        nearest = 0 if self.one_sided else 1 - self.reach
        index = positions.distance().clamp(nearest, self.reach - 1) - nearest  # (1|b, q, k)
        table = self.distance_embedding.weight.to(dtype)[nearest + self.reach - 1 :]  # (r, d)
        heads = query.shape[:2]
        total = (query.to(dtype) @ table.T).gather(-1, index[:, None].expand(*heads, -1, -1))
        if self.config.position_embedding_type == "relative_key":
            return total
        keys = self.scaling * key.to(dtype)
        if query.shape[2] * table.shape[1] < key.shape[1] * len(table):  # few queries: most rows meet no key
            met = torch.einsum("bhkd,bqkd->bhqk", keys, table[index].expand(len(key), -1, -1, -1))
        else:
            met = (keys @ table.T).gather(-1, index.mT[:, None].expand(*key.shape[:2], -1, -1)).mT
        return total + met.repeat_interleave(heads[1] // key.shape[1], dim=1)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return self.config.position_embedding_type


@register_encoding
@dataclass(frozen=True, kw_only=True)
class BertRelative(EncodingConfig):
    """Relative keys, and queries, of BERT; heads share the table.

    Attributes:
        position_embedding_type: `relative_key`, or `relative_key_query`, whose keys are divided by sqrt(head_dim)
            whatever the model does with its queries.
        max_position_embeddings: distances up to this number less one, in tokens, have a row; None takes the length of
            the model.
        per_layer: a table for every layer, as in legacy checkpoints, or one for all.
    """

    position_embedding_type: str = "relative_key"
    max_position_embeddings: int | None = None
    per_layer: bool = True

    name: ClassVar[str] = "bert_relative"
    label: ClassVar[str] = "BertRelative"
    module: ClassVar[type[Encoding]] = BertRelativeEncoding
    choices: ClassVar[Choices] = {"position_embedding_type": TYPES}

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        rows = self.max_position_embeddings
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise ConfigError(f"BertRelative.max_position_embeddings must be a positive integer or None, was: {rows!r}")

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> BertRelative:
        """Record the model's own length where none was given."""
        rows = self.max_position_embeddings or geometry.max_position_embeddings
        return dataclasses.replace(super().for_model(geometry, rope_parameters), max_position_embeddings=rows)
