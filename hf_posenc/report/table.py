"""Curves as a table for the terminal, with the notes its numbers refer to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation import LengthCurve
from hf_posenc.evaluation.protocols import FIXED_TARGET, NONOVERLAPPING, PROTOCOLS, SLIDING, in_words
from hf_posenc.plots.ticks import counted
from hf_posenc.report.comparability import by_protocol, check_comparable, tokenizers_differ

OVERLAP_NOTE = (
    "without overlap, the first tokens of every window count too: they have little context, which costs, and stand at "
    "places a model knows, which hides what happens past them"
)
_BITS_NOTE = "at the longest length within the trained one, or the shortest of all; compares across tokenizers"
_EFFECTIVE_NOTE = "up to here, longer context keeps the loss within 1 % of that at the trained length"
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Grid:
    """A table of curves before it is drawn.

    Attributes:
        headings: of the columns; the first `words` of them hold names, the others numbers.
        words: 1 or 2: models, and protocols where there are several.
        rows: cells as they are printed, with the marks of notes.
        notes: what the marks refer to, each beginning with its mark.
    """

    headings: list[str]
    words: int
    rows: list[list[str]]
    notes: list[str]


def length_grid(curves: Sequence[LengthCurve]) -> Grid:
    """Return a table of models by lengths and the notes its numbers refer to.

    A cell holds the perplexity, or "none" with the number of the note that gives the reason. Where protocols differ,
    each has a row of its own, and another for the mean that its origin reports if that is a different one.

    Raises:
        DataError: there are no curves, or they were measured in different ways.
    """
    check_comparable(curves)
    lengths = sorted({length for curve in curves for length in curve.lengths})
    groups = by_protocol(curves)
    notes = _Notes()
    n_words = 2 if len(groups) > 1 else 1
    extra: dict[str, Callable[[LengthCurve], str]] = {}
    if tokenizers_differ(curves):
        extra["bits/byte" + notes.mark(_BITS_NOTE)] = _bits_cell
    if FIXED_TARGET in groups:
        extra["effective" + notes.mark(_EFFECTIVE_NOTE)] = _effective_cell
    rows = []
    for name in dict.fromkeys(curve.name for curve in curves):
        for curve in (curve for curve in curves if curve.name == name):
            first = [name, curve.protocol][:n_words]
            cells = [_cell(curve, length, curve.ppl, notes) for length in lengths]
            rows.append([*first, *cells, *(cell(curve) for cell in extra.values())])
            if curve.protocol in PROTOCOLS and (mean := PROTOCOLS[curve.protocol].mean) and curve.ppl:
                first[-1] += ", own mean" + notes.mark(f"as the origin averages: {mean}")
                own = [_cell(curve, length, curve.origin_ppl, notes) for length in lengths]
                rows.append([*first, *own, *("" for _ in extra)])
    mark = notes.mark(OVERLAP_NOTE) if {NONOVERLAPPING, SLIDING} <= set(groups) else ""
    words = ["model", f"protocol{mark}"][:n_words]
    return Grid([*words, *(f"{length:,}" for length in lengths), *extra], n_words, rows, notes.lines())


def length_table(curves: Sequence[LengthCurve], *, title: str = "Perplexity against length") -> Group:
    """Return `length_grid` for rich to print, and below it the notes and how the numbers were measured.

    Raises:
        DataError: there are no curves, or they were measured in different ways.
    """
    grid = length_grid(curves)
    table = Table(title=escape(title), title_justify="left")
    for index, heading in enumerate(grid.headings):
        # where the terminal is narrow, names of models are broken, and never a number
        table.add_column(heading, justify="left" if index < grid.words else "right", no_wrap=index > 0)
    for row in grid.rows:
        table.add_row(*map(escape, row))
    # Not the table's own caption, which is wrapped to the width of the table.
    return Group(table, *(Text(line) for line in [*grid.notes, *map(describe_protocol, by_protocol(curves).values())]))


def describe_protocol(curves: Sequence[LengthCurve]) -> str:
    """Return one sentence saying how the numbers of one protocol were measured, or that there are none."""
    first = curves[0]
    if not any(curve.n_tokens for curve in curves):
        return "nothing could be measured"
    scored = _span([count for curve in curves for count in curve.n_tokens.values()])
    left_out = f" ({first.n_left_out:,} too short)" if first.n_left_out else ""
    start = {
        "none": "no BOS token",
        "prepend": "a BOS token before each document",
        "every_window": "special tokens around each window"
        if first.n_correct
        else "a BOS token in front of each window",
    }.get(first.bos_policy, f"BOS policy {first.bos_policy}")
    how = in_words(first.protocol, span_of_strides(curves))
    return f"{how}; {scored} scored in {counted(first.n_documents, 'document')}{left_out}, {start}"


def span_of_strides(curves: Sequence[LengthCurve]) -> str:
    """Return the strides of these curves in words: one number of tokens, or from which to which."""
    return _span([stride for curve in curves for stride in curve.stride.values()])


def _span(counts: Sequence[int]) -> str:
    """Return numbers of tokens in words, as "1 token", "16 to 32 tokens" or "no tokens"."""
    if len(set(counts)) < 2:
        return counted(counts[0], "token") if counts else "no tokens"
    return f"{min(counts):,} to {max(counts):,} tokens"


class _Notes:
    """Footnotes, each text once, numbered in the order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        number = self._numbers.setdefault(text, len(self._numbers) + 1)
        return str(number).translate(_SUPERSCRIPTS)

    def lines(self) -> list[str]:
        return [f"{self.mark(text)} {text}" for text in list(self._numbers)]


def _cell(curve: LengthCurve, length: int, ppl: Mapping[int, float], notes: _Notes) -> str:
    if length in curve.refused:
        return f"none{notes.mark(curve.refused[length])}"
    if length not in ppl:
        return ""
    text = in_figures(ppl[length])
    if curve.window[length] < length - 1:  # some protocols count the last target into the length
        text += notes.mark(f"no document is longer than {curve.window[length]:,} tokens")
    if curve.accuracy:
        text += f" ({curve.accuracy[length]:.1%})"
    return text


def in_figures(value: float, decimals: int = 2) -> str:
    """Return a number as a reader takes it in: with decimals below 1,000, none above, powers of ten from a million."""
    return f"{value:,.{decimals}f}" if abs(value) < 1000 else f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.1e}"


def _bits_cell(curve: LengthCurve) -> str:
    if curve.bits_per_byte is None or curve.reference_length is None:
        return ""
    return f"{curve.bits_per_byte[curve.reference_length]:.3f}"


def _effective_cell(curve: LengthCurve) -> str:
    """The effective length, where only the context grew; "or more" where it is the longest that was asked for."""
    if curve.protocol != FIXED_TARGET:
        return ""
    if curve.effective_length is None:
        return "not known"
    return f"{curve.effective_length:,}" + (" or more" if curve.effective_length == curve.lengths[-1] else "")
