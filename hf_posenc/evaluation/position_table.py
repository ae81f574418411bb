"""What a table of positions shows by itself: where it was trained, and how well it tells places apart."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedFamilyError
from hf_posenc.family import find_family
from hf_posenc.hooks import Encoding
from hf_posenc.length import max_length, table_rows, table_start, trained_length

FULL_STRENGTH = 0.8
"""Share of the median norm below which a row counts as less trained than the others."""
_FIXED = 1e-3  # relative spread of norms below which a table is a formula, such as sinusoids: all rows are as long
_DEVIATIONS = 5.0  # of the norm of an untrained row, above which a row is trained
_TURNS = re.compile(r"((?!.*original).+_)?inv_freq")  # one rotation, or one for every type of layers
_NEAR = 16  # distances up to which places are neighbours


@dataclass(frozen=True, kw_only=True)
class TableReport:
    """A table of positions, row by row.

    Attributes:
        norms: (rows,) float64, the length of the row of every position.
        initial: the length that a row had before training, as far as the config says how it was drawn; else None.
        fixed: True for a table that follows a formula, as sinusoids do: all its rows are equally long.
        trained: positions up to the last row that ever moved from its initial level, None where that is not known.
        strong: positions up to the last row of at least `FULL_STRENGTH` of the median length.
        similarity: (rows,) float64, mean cosine between the rows of places at distance 0, 1, 2, ...
        pairs: the two columns to draw over growing positions, one that changes fast and one that changes slowly.
        columns: (rows, 2) float64, these two columns.
    """

    norms: Tensor
    initial: float | None
    fixed: bool
    trained: int | None
    strong: int
    similarity: Tensor
    pairs: tuple[int, int]
    columns: Tensor


@dataclass(frozen=True, kw_only=True)
class RotationReport:
    """Rotary frequencies, or those of sinusoids: how they tell places apart.

    Attributes:
        wavelengths: (pairs,) float64, tokens to a full turn, ascending.
        repeating: pairs that turn more than once within the length, and alone take far places for near ones.
        idle: pairs that turn less than a quarter within the length, and hardly tell places apart at all.
        similarity: (length,) float64, mean cosine of the angle between places at distance 0, 1, 2, ...
    """

    wavelengths: Tensor
    repeating: int
    idle: int
    similarity: Tensor


def table_report(model: nn.Module) -> TableReport | None:
    """Return what the table of a model shows, or None where it adds none to its embedding."""
    table = position_table(model)
    if table is None:
        return None
    norms = table.norm(dim=1)
    spread = float(norms.std() / norms.mean().clamp(min=1e-300))
    fixed = spread < _FIXED
    initial = _initial_norm(model, table.shape[1])
    fast, slow = _fast_and_slow(table)
    return TableReport(
        norms=norms,
        initial=initial,
        fixed=fixed,
        trained=None if fixed or initial is None else trained_rows(norms, initial, table.shape[1]),
        strong=_up_to(norms >= FULL_STRENGTH * norms.median()),
        similarity=mean_similarity(table),
        pairs=(fast, slow),
        columns=table[:, [fast, slow]],
    )


def _fast_and_slow(table: Tensor) -> tuple[int, int]:
    """Return, of the quarter of the columns that vary most, the one that changes fastest and the one that does not."""
    varied = table.var(0).topk(max(table.shape[1] // 4, 1)).indices
    changes = table[:, varied].diff(dim=0).square().sum(0) / table[:, varied].var(0).clamp(min=1e-12)
    return int(varied[changes.argmax()]), int(varied[changes.argmin()])


def position_table(model: Any) -> Tensor | None:
    """Return what a model adds to the embedding at every position, (positions, width) float64, or None."""
    for path, module in model.named_modules():
        if path.rsplit(".", 1)[-1] == "posenc":
            return _encoding_table(module, model)
    try:
        family = find_family(model.config.model_type).as_built(model)
    except UnsupportedFamilyError:
        return None
    if family.table is None or family.stacks:
        return None
    rows = table_rows(family.body_of(model).get_submodule(family.table))
    return rows.detach()[table_start(family, model.config) :].double().cpu()


def _encoding_table(encoding: Any, model: Any) -> Tensor | None:
    length = max_length(model) or trained_length(find_family(model.config.model_type), model.config)
    added = encoding.embed(torch.arange(length, device=model.device)[None])
    return None if added is None else added[0].detach().double().cpu()


def _initial_norm(model: Any, width: int) -> float | None:
    """Return the norm of a row as drawn: the deviation that the config names times sqrt(width)."""
    names = ("initializer_range", "init_std")
    deviation = next((value for name in names if (value := getattr(model.config, name, None))), None)
    return None if deviation is None else float(deviation) * math.sqrt(width)


def trained_rows(norms: Tensor, initial: float, width: int) -> int:
    """Return the number of positions up to the last row that is longer than untrained rows are.

    The norm of a row drawn from N(0, s^2) in `width` dimensions is s sqrt(width), give or take s / sqrt(2).
    """
    return _up_to(norms > initial * (1 + _DEVIATIONS / math.sqrt(2 * width)))


def _up_to(held: Tensor) -> int:
    """Return one more than the last index at which `held` is true, 0 where it never is."""
    found = held.nonzero()
    return int(found[-1]) + 1 if len(found) else 0


def mean_similarity(table: Tensor) -> Tensor:
    """Return the mean cosine between rows at distance 0, 1, ..., rows - 1: (rows, width) -> (rows,) float64.

    What all rows share tells no two of them apart, and is left out first. A row of zeros is similar to nothing.
    """
    rows = len(table)
    units = nn.functional.normalize(table.double() - table.double().mean(0), dim=1)
    spectrum = torch.fft.rfft(units, n=2 * rows, dim=0)  # sums over all pairs at a distance are an autocorrelation
    sums: Tensor = torch.fft.irfft(spectrum.abs().square().sum(1), n=2 * rows)[:rows]
    means: Tensor = sums / torch.arange(rows, 0, -1)
    return means


def rotation_report(model: nn.Module, length: int) -> RotationReport | None:
    """Return how the frequencies of a model, rotary or of sinusoids, tell `length` places apart; None without any.

    Where layers rotate in different ways, those of full attention count.
    """
    frequencies = next(_frequencies(model), None)
    return None if frequencies is None else describe_rotation(frequencies, length)


def _frequencies(model: Any) -> Iterator[Tensor]:
    """Yield the frequencies of the rotations and sinusoids of a model, (pairs,) float64 each, in radians a token."""
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, Encoding):  # a bias of the scores may be made of frequencies, and turns nothing
            held = [getattr(module, "inv_freq" if module.overrides("rotate") else "frequencies", ())]
        else:
            buffers = {name: buffer for name, buffer in module.named_buffers(recurse=False) if _TURNS.fullmatch(name)}
            held = [buffers[name] for name in sorted(buffers)]  # those of full attention before those of windows
        found = [torch.as_tensor(one, dtype=torch.float64).detach().cpu() for one in held]
        yield from (one for one in found if one.dim() == 1 and len(one))
    if not any(isinstance(module, Encoding) for module in modules) and _turns_by_a_table(model):
        config = model.config
        width = getattr(config, "rotary_dim", None) or config.hidden_size // config.num_attention_heads
        yield 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def _turns_by_a_table(model: Any) -> bool:
    """Whether a stock model reads its rotation from a table of sines, of frequencies that stand in no config."""
    try:
        family = find_family(model.config.model_type)
    except UnsupportedFamilyError:
        return False
    return family.sine_first or (family.interleaved and family.rotary is None)


def describe_rotation(frequencies: Tensor, length: int) -> RotationReport:
    """Return how frequencies in radians a token, (pairs,), tell `length` places apart."""
    wavelengths = (2 * math.pi / frequencies.clamp(min=1e-12)).sort().values
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return RotationReport(
        wavelengths=wavelengths,
        repeating=int((wavelengths < length).sum()),
        idle=int((wavelengths > 4 * length).sum()),
        similarity=angles.cos().mean(1),
    )


def closest_stranger(similarity: Tensor) -> tuple[int, float] | None:
    """Return the distance, beyond the neighbours, whose places look most alike, and that likeness; None if too short.

    Neighbours are places up to 16 apart.
    """
    if len(similarity) <= _NEAR + 1:
        return None
    at = int(similarity[_NEAR + 1 :].argmax()) + _NEAR + 1
    return at, float(similarity[at])
