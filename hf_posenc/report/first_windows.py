"""What is measured in the first window of every document, for readers: loss by position, and key tokens by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation import KeyTokenPerplexity, PositionCurve
from hf_posenc.evaluation.checkpoints import Measured
from hf_posenc.evaluation.result import check_alike
from hf_posenc.plots.ticks import counted
from hf_posenc.report.files import check_output, write_results, write_table
from hf_posenc.report.table import in_figures

POSITIONS_TITLE = "Loss by position in the window"
KEYS_TITLE = "Perplexity on the tokens that need a long context"
_KEYS_NOTE = (
    "key tokens: those that the long window makes likely and a short one does not; the other tokens of a text can be "
    "told from its last sentences, so that plain perplexity hardly shows them"
)
_OWN_KEYS = "each model chose its own key tokens: give all of them one --evaluator, or their numbers do not compare"


def positions_text(found: Measured[PositionCurve], *, title: str = POSITIONS_TITLE) -> Group:
    """Return, for rich to print, the mean loss of each doubling of the position, with a column a model.

    Raises:
        DataError: there are no curves, or they were not measured alike.
    """
    curves = found.results
    check_alike(curves, ("text_hash", "bos_policy", "length"))
    table = Table(title=escape(title), title_justify="left")
    table.add_column("positions", no_wrap=True)
    for curve in curves:
        table.add_column(escape(curve.name), justify="right")
    octaves = _octaves(curves[0].length)
    columns = [_by_octave(curve, octaves) for curve in curves]
    for row, (first, last) in enumerate(octaves):
        place = f"{first + 1:,}" if last == first + 1 else f"{first + 1:,} to {last:,}"
        table.add_row(place, *(f"{column[row]:.3f}" for column in columns))
    table.add_section()
    table.add_row("effective length", *(_effective(curve) for curve in curves))
    notes = [
        f"mean nats per token (lower is better) at each position of one window of {curves[0].length:,} tokens, over "
        f"{counted(curves[0].n_documents, 'document')} long enough to fill it",
        "effective length: from the trained length on, up to here the loss stays within 1 % of that before it; other "
        'positions hold other text, and the protocol "fixed_target" scores the same text under growing context',
    ]
    return Group(table, *map(Text, [*notes, *found.refused]))


def _octaves(length: int) -> list[tuple[int, int]]:
    """Return the positions first .. last - 1 of each doubling."""
    ends = [0, *(2**power for power in range(length.bit_length()) if 2**power < length), length]
    return list(pairwise(ends))


def _by_octave(curve: PositionCurve, octaves: Sequence[tuple[int, int]]) -> list[float]:
    """Return the mean loss of each doubling, whose bins are whole (`log_bins`)."""
    bins = list(zip(pairwise(curve.edges), curve.nll, strict=True))
    totals = [sum(nll * (b - a) for (a, b), nll in bins if first <= a < last) for first, last in octaves]
    return [total / (last - first) for total, (first, last) in zip(totals, octaves, strict=True)]


def _effective(curve: PositionCurve) -> str:
    if curve.effective_length is None:
        return "not known"
    return f"{curve.effective_length:,}" + (" or more" if curve.effective_length == curve.length else "")


def write_positions(
    found: Measured[PositionCurve],
    folder: Path | str,
    *,
    corpus: Mapping[str, Any] | None = None,
    title: str = POSITIONS_TITLE,
) -> Path:
    """Write `result.json`, `table.txt` and the plot `positions`, as PNG and SVG, into `folder` and return it.

    Raises:
        OutputExistsError: the folder already holds a result.
        DataError: there are no curves, or they were not measured alike.
    """
    from hf_posenc.plots import plot_positions  # matplotlib takes a second to import

    folder = check_output(folder)
    write_table(folder, positions_text(found, title=title))
    plot_positions(found.results, folder / "positions", title=title)
    return write_results(folder, seed=None, corpus=corpus, content=_content(found, "positions"))


def key_tokens_text(found: Measured[KeyTokenPerplexity], *, title: str = KEYS_TITLE) -> Group:
    """Return, for rich to print, the perplexity on key tokens and on all tokens, and which variant of LongPPL it is.

    Raises:
        DataError: there are no results, or those of a length were not measured alike.
    """
    results = found.results
    lengths = sorted({result.length for result in results})
    for length in lengths or [0]:
        alike = ("text_hash", "bos_policy", "evaluator", "short", "stride")
        check_alike([result for result in results if result.length == length], alike)
    table = Table(title=escape(title), title_justify="left")
    table.add_column("model")
    table.add_column("tokens", no_wrap=True)
    for length in lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    names = list(dict.fromkeys(result.name for result in results))
    for name in names:
        own = {result.length: result for result in results if result.name == name}
        rows = [own.get(length) for length in lengths]
        keys = ["none" if row is None or row.ppl is None else in_figures(row.ppl) for row in rows]
        table.add_row(escape(name), "key", *keys)
        table.add_row("", "all", *("none" if row is None else in_figures(row.plain_ppl) for row in rows))
        shares = ["" if row is None else f"{row.n_keys:,} of {row.n_tokens:,}" for row in rows]
        table.add_row("", "keys among all", *shares)
    evaluators = dict.fromkeys(result.evaluator for result in results)
    notes = [_KEYS_NOTE]
    notes += [f"at {length:,} tokens, {what}" for length, what in {r.length: r.variant for r in results}.items()]
    notes += [f"key tokens chosen by {name}" for name in evaluators if name is not None]
    notes += [_OWN_KEYS] if None in evaluators and len(names) > 1 else []
    return Group(table, *map(Text, [*notes, *found.refused]))


def write_key_tokens(
    found: Measured[KeyTokenPerplexity],
    folder: Path | str,
    *,
    corpus: Mapping[str, Any] | None = None,
    title: str = KEYS_TITLE,
) -> Path:
    """Write `result.json` and `table.txt` into `folder` and return it.

    Raises:
        OutputExistsError: the folder already holds a result.
        DataError: there are no results, or those of a length were not measured alike.
    """
    folder = check_output(folder)
    write_table(folder, key_tokens_text(found, title=title))
    return write_results(folder, seed=None, corpus=corpus, content=_content(found, "key_tokens"))


def _content(found: Measured[Any], kind: str) -> dict[str, Any]:
    return {kind: [result.to_dict() for result in found.results], "refused": list(found.refused)}
