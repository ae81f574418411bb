"""Slow, readable twins of the ways to extend a learned table, in float64 and loops."""

from __future__ import annotations

from tests.naive import Row

Table = list[Row]


def at(table: Table, place: float) -> Row:
    """The table read between two rows; before the first and behind the last nothing changes any more."""
    place = min(max(place, 0.0), len(table) - 1.0)
    lower = int(place)
    upper = min(lower + 1, len(table) - 1)
    return [a + (place - lower) * (b - a) for a, b in zip(table[lower], table[upper], strict=True)]


def align_corners(table: Table, rows: int) -> Table:
    """First on first and last on last, the others evenly between."""
    return [at(table, i * (len(table) - 1) / (rows - 1)) for i in range(rows)]


def half_pixel(table: Table, rows: int) -> Table:
    """Rows as cells of equal width, read at the centres of the new cells."""
    return [at(table, (i + 0.5) * len(table) / rows - 0.5) for i in range(rows)]


def recurrent(table: Table, rows: int) -> Table:
    """Counting starts over at the end of the table."""
    return [table[i % len(table)] for i in range(rows)]


def grouped(table: Table, rows: int) -> Table:
    """So many neighbours share a row that the table lasts."""
    size = 1
    while size * len(table) < rows:
        size += 1
    return [table[i // size] for i in range(rows)]


def hierarchical(table: Table, rows: int, alpha: float = 0.4) -> Table:
    """Su 2020: a position is a coarse and a fine one."""
    units = [[(x - alpha * first) / (1 - alpha) for x, first in zip(row, table[0], strict=True)] for row in table]
    out = []
    for i in range(rows):
        coarse, fine = units[i // len(table)], units[i % len(table)]
        out.append([alpha * a + (1 - alpha) * b for a, b in zip(coarse, fine, strict=True)])
    return out
