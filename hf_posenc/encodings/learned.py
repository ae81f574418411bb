"""A learned table of absolute positions, and two ways to give it rows that were never trained.

Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", section 3.1. Tiling: Beltagy et al. 2020,
"Longformer", section 5. Interpolation, anchor form: Zhu et al. 2024, "LongEmbed", section 4.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError, LengthError, did_you_mean
from hf_posenc.positions import Geometry

EXTENSIONS = ("none", "tile", "interpolate")


def tile(table: Tensor, rows: int) -> Tensor:
    """Return (rows, d): row i is row i mod L of the (L, d) table, so that the first L stay bit-equal."""
    return table[torch.arange(rows, device=table.device) % table.shape[0]]


def interpolate(table: Tensor, rows: int) -> Tensor:
    """Return (rows, d): row i lies at i * L / rows between the rows of the (L, d) table.

    This is the anchor form: with s = rows / L a whole number, row i * s is row i of the table, bit-equal, and the rows
    after the last anchor repeat it.
    """
    length = table.shape[0]
    steps = torch.arange(rows, dtype=torch.float64, device=table.device) * length / rows
    lower = steps.floor().long()
    upper = (lower + 1).clamp(max=length - 1)
    weight = (steps - lower)[:, None].to(torch.promote_types(table.dtype, torch.float32))
    return torch.lerp(table[lower].to(weight.dtype), table[upper].to(weight.dtype), weight).to(table.dtype)


class LearnedEncoding(Encoding):
    """Adds one trained row per position to the token embedding."""

    def __init__(self, config: Learned, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        rows = config.max_position_embeddings or geometry.max_position_embeddings
        self.weight = nn.Parameter(torch.empty(rows, geometry.hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return (b, n, hidden_size) in the dtype of the table.

        Raises:
            LengthError: a position has no row. Checked before the look-up, which on a GPU would poison the process.
        """
        rows = self.weight.shape[0]
        if not torch.compiler.is_compiling() and not position_ids.is_meta and position_ids.numel():
            first, last = (int(end) for end in position_ids.aminmax())
            if first < 0 or last >= rows:
                wrong = first if first < 0 else last
                raise LengthError(
                    f"no position {wrong + 1}: learned table has {rows} rows. Shorten the input, extend the table with "
                    "Learned(max_position_embeddings=..., extension=...), or patch in an encoding without an end."
                )
        return nn.functional.embedding(position_ids, self.weight)

    @torch.no_grad()
    def adopt(self, table: Tensor | None) -> None:
        """Copy the rows of the table being replaced, (L, hidden_size), extended or cut to this length."""
        if table is None or table.is_meta:
            return
        rows = self.weight.shape[0]
        if rows <= table.shape[0]:
            self.weight.copy_(table[:rows])
        else:
            extend = {"tile": tile, "interpolate": interpolate}[self.config.extension]
            self.weight.copy_(extend(table, rows))

    def max_positions(self) -> int:
        """Return the number of rows."""
        return self.weight.shape[0]

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"rows={self.weight.shape[0]}, extension={self.config.extension}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Learned(EncodingConfig):
    """A learned table of absolute positions.

    Attributes:
        max_position_embeddings: rows, >= 1; None keeps the length of the model.
        extension: where rows beyond the model's length come from: `none` (there may be none), `tile` or `interpolate`.
    """

    max_position_embeddings: int | None = None
    extension: str = "none"

    name: ClassVar[str] = "learned"
    label: ClassVar[str] = "Learned"
    module: ClassVar[type[Encoding]] = LearnedEncoding

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        rows = self.max_position_embeddings
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise ConfigError(f"Learned.max_position_embeddings must be a positive integer or None, was: {rows!r}")
        if self.extension not in EXTENSIONS:
            known = did_you_mean(str(self.extension), EXTENSIONS)
            raise ConfigError(f"unknown Learned.extension {self.extension!r}; {known}")

    def check(self, geometry: Geometry) -> None:
        """Raise ConfigError where rows are asked for that nothing says how to fill."""
        rows, length = self.max_position_embeddings, geometry.max_position_embeddings
        if rows is not None and rows > length and self.extension == "none":
            raise ConfigError(
                f"Learned(max_position_embeddings={rows}) on a model of length {length} needs rows that were never "
                "trained; say where they come from with extension='tile' or extension='interpolate'."
            )

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> Learned:
        """Record the model's own length where none was given."""
        rows = self.max_position_embeddings or geometry.max_position_embeddings
        return dataclasses.replace(self, max_position_embeddings=rows)
