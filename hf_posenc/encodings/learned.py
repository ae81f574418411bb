"""A learned table of absolute positions, and the ways to give it positions that were never trained.

Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", section 3.1. Tiling: Beltagy et al. 2020,
"Longformer", section 5. Interpolation, recurrent and grouped positions: Zhu et al. 2024, "LongEmbed", section 4.2.
Hierarchical: Su 2020 (kexue.fm 7947). The sinusoidal fit has no source; it is a heuristic that measures itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.config import Choices, Encoding, EncodingConfig, register_encoding
from hf_posenc.errors import ConfigError, LengthError, UnsupportedEncodingError
from hf_posenc.positions import Geometry

SHARING = ("recurrent", "grouped")
"""Extensions that add no rows: several positions share one."""
LEAST_FIT = 0.9
"""R2 below which a sinusoidal fit is refused."""


def tile(table: Tensor, rows: int) -> Tensor:
    """Return (rows, d): row i is row i mod L of the (L, d) table, so that the first L stay bit-equal."""
    return table[torch.arange(rows, device=table.device) % table.shape[0]]


def interpolate(table: Tensor, rows: int) -> Tensor:
    """Return (rows, d): row i lies at i * L / rows between the rows of the (L, d) table.

    This is the anchor form: with s = rows / L a whole number, row i * s is row i of the table, bit-equal, and the rows
    after the last anchor repeat it.
    """
    return _between(table, torch.arange(rows, dtype=torch.float64) * len(table) / rows)


def align_corners(table: Tensor, rows: int) -> Tensor:
    """Return (rows, d), spread evenly between the first and the last row of the (L, d) table; these stay bit-equal."""
    return _between(table, torch.arange(rows, dtype=torch.float64) * (len(table) - 1) / max(rows - 1, 1))


def half_pixel(table: Tensor, rows: int) -> Tensor:
    """Return (rows, d) as `torch.nn.functional.interpolate` does: row i at (i + 1/2) * L / rows - 1/2."""
    places = (torch.arange(rows, dtype=torch.float64) + 0.5) * len(table) / rows - 0.5
    return _between(table, places.clamp(min=0, max=len(table) - 1))


def hierarchical(table: Tensor, rows: int, alpha: float) -> Tensor:
    """Return (rows, d), rows <= L^2: row i * L + j is alpha * u_i + (1 - alpha) * u_j; the first L stay bit-equal.

    u_i is (p_i - alpha * p_0) / (1 - alpha), p the (L, d) table, which makes row j < L the old p_j.
    """
    length, old = len(table), table.double()
    units = (old - alpha * old[0]) / (1 - alpha)
    index = torch.arange(length, rows, device=table.device)
    new = alpha * units[index // length] + (1 - alpha) * units[index % length]
    return torch.cat([table, new.to(table.dtype)])


def sinusoidal_fit(table: Tensor, rows: int) -> tuple[Tensor, float]:
    """Continue the columns of a (L, d) table as sums of sines and cosines, by least squares.

    How small a direction of the fit may be is chosen by predicting the last quarter of the rows from the others, and
    the fit is rated by that prediction, which is what an extension does.

    Returns:
        (rows, d), whose first L rows stay bit-equal, and the R2 of the prediction.
    """
    length, old = len(table), table.detach().double().cpu()
    pairs = max(min(table.shape[1], length // 2) // 2, 1)
    speeds = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    phases = torch.arange(rows, dtype=torch.float64)[:, None] * speeds
    basis = torch.cat([phases.sin(), phases.cos()], dim=1)  # (rows, 2 * pairs)
    train = length - max(length // 4, 1)
    held_out, spread = old[train:], (old[train:] - old.mean(0)).square().sum().clamp(min=1e-300)

    def fits(cut: float) -> float:
        missed = held_out - basis[train:length] @ _least_squares(basis[:train], old[:train], cut)
        return 1 - float(missed.square().sum() / spread)

    best = max((10.0**-digits for digits in range(1, 14)), key=fits)
    new = basis[length:] @ _least_squares(basis[:length], old, best)
    return torch.cat([table, new.to(table)]), fits(best)


def _least_squares(basis: Tensor, table: Tensor, cut: float) -> Tensor:
    """Return the coefficients of the smallest norm, without directions below `cut` times the largest."""
    inverse: Tensor = torch.linalg.pinv(basis, rtol=cut)
    return inverse @ table


def _between(table: Tensor, places: Tensor) -> Tensor:
    """Return the table read at fractional rows, (rows,) float64 on the CPU."""
    places = places.to(table.device)
    lower = places.floor().long()
    upper = (lower + 1).clamp(max=len(table) - 1)
    weight = (places - lower)[:, None].to(torch.promote_types(table.dtype, torch.float32))
    return torch.lerp(table[lower].to(weight.dtype), table[upper].to(weight.dtype), weight).to(table.dtype)


EXTEND = {"tile": tile, "interpolate": interpolate, "align_corners": align_corners, "half_pixel": half_pixel}
EXTENSIONS = ("none", *EXTEND, *SHARING, "hierarchical", "sinusoidal_fit")
KEEPING = ("none", "tile", "recurrent", "hierarchical", "sinusoidal_fit")


class LearnedEncoding(Encoding):
    """Adds a trained row of its position to the token embedding.

    Attributes:
        fit: R2 of the sinusoidal fit that the new rows came from, or None.
    """

    fit: float | None = None

    def __init__(self, config: Learned, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        trained = geometry.max_position_embeddings
        self.length = config.max_position_embeddings or trained
        rows = min(self.length, trained) if config.extension in SHARING else self.length
        self.weight = nn.Parameter(torch.empty(rows, geometry.hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return (b, n, hidden_size) in the dtype of the table.

        Raises:
            LengthError: a position has no row. Checked before the look-up, which on a GPU would poison the process.
        """
        rows = self.length
        if not torch.compiler.is_compiling() and not position_ids.is_meta and position_ids.numel():
            first, last = (int(end) for end in position_ids.aminmax())
            if first < 0 or last >= rows:
                wrong = first if first < 0 else last
                raise LengthError(
                    f"no position {wrong + 1}: learned table has {rows} rows. Shorten the input, extend the table with "
                    "Learned(max_position_embeddings=..., extension=...), or patch in an encoding without an end."
                )
        return nn.functional.embedding(self._row(position_ids), self.weight)

    def _row(self, position_ids: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        if self.config.extension == "recurrent":
            return position_ids % rows
        if self.config.extension == "grouped":
            return position_ids // -(-self.length // rows)
        return position_ids

    @torch.no_grad()
    def adopt(self, table: Tensor | None) -> None:
        """Copy the rows of the table being replaced, (L, hidden_size), extended or cut to this length."""
        if table is None or table.is_meta:
            return
        rows, extension = self.weight.shape[0], self.config.extension
        if rows <= table.shape[0]:
            extended = table[:rows]
        elif extension == "hierarchical":
            extended = hierarchical(table, rows, self.config.alpha)
        elif extension == "sinusoidal_fit":
            extended, self.fit = sinusoidal_fit(table, rows)
            if self.fit < LEAST_FIT:
                raise UnsupportedEncodingError(
                    f"sinusoids predict the last rows of this table with R2 {self.fit:.3f}, below {LEAST_FIT}: it does "
                    "not continue that way. Choose another extension, such as 'interpolate', and fine-tune."
                )
        else:
            extended = EXTEND[extension](table, rows)
        self.weight.copy_(extended)

    def max_positions(self) -> int:
        """Return the number of positions."""
        return self.length

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        fit = "" if self.fit is None else f", fit={self.fit:.4f}"
        return f"rows={self.weight.shape[0]}, length={self.length}, extension={self.config.extension}{fit}"


@register_encoding
@dataclass(frozen=True, kw_only=True)
class Learned(EncodingConfig):
    """A learned table of absolute positions.

    Attributes:
        max_position_embeddings: length in tokens, >= 1; None keeps the length of the model.
        extension: where positions beyond the model's length come from:
            `none`: there may be none.
            `tile`: row i mod L. `recurrent`: the same, with no rows of their own that training could tell apart.
            `interpolate`: every old row at s times its position, s = length / L, the others between them; the form in
            which old rows can be frozen. `grouped`: s positions share a row, s rounded up.
            `align_corners`, `half_pixel`: interpolation with the two other conventions for the ends.
            `hierarchical`: row i * L + j mixes rows i and j; old rows stay where they are. At most L^2 positions.
            `sinusoidal_fit`: sums of sines and cosines through the old rows; refused where they predict badly.
        alpha: share of the coarse position in `hierarchical`, in (0, 1) and not 0.5, where i * L + j and j * L + i
            would be one; below 0.5 the fine position counts more.
    """

    max_position_embeddings: int | None = None
    extension: str = "none"
    alpha: float = 0.4

    name: ClassVar[str] = "learned"
    label: ClassVar[str] = "Learned"
    module: ClassVar[type[Encoding]] = LearnedEncoding
    choices: ClassVar[Choices] = {"extension": EXTENSIONS}

    @property
    def within_length(self) -> str:
        """The trained rows stay where they were, unless the extension moves them apart."""
        return "kept" if self.extension in KEEPING else "either"

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        rows = self.max_position_embeddings
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise ConfigError(f"Learned.max_position_embeddings must be a positive integer or None, was: {rows!r}")
        if not (isinstance(self.alpha, float) and 0 < self.alpha < 1 and self.alpha != 0.5):
            raise ConfigError(f"Learned.alpha must lie in (0, 1) and not be 0.5, was: {self.alpha!r}")

    def check(self, geometry: Geometry) -> None:
        """Raise ConfigError where rows are asked for that nothing says how to fill."""
        rows, length = self.max_position_embeddings, geometry.max_position_embeddings
        if rows is not None and rows > length and self.extension == "none":
            raise ConfigError(
                f"Learned(max_position_embeddings={rows}) on a model of length {length} needs rows that were never "
                "trained; say where they come from with extension='tile' or extension='interpolate'."
            )
        if self.extension == "hierarchical" and rows is not None and rows > length**2:
            raise ConfigError(f"a hierarchical table of {length} rows reaches {length**2} positions, not {rows}")

    def for_model(self, geometry: Geometry, rope_parameters: Mapping[str, Any] | None = None) -> Learned:
        """Record the model's own length where none was given."""
        rows = self.max_position_embeddings or geometry.max_position_embeddings
        return dataclasses.replace(super().for_model(geometry, rope_parameters), max_position_embeddings=rows)
