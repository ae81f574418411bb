"""Results for readers: JSON that holds everything, a table for the terminal, plots for a page.

Tables and plots are made from curves or from the JSON they were written to, never from numbers typed by hand.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hf_posenc.errors import DataError, OutputError, OutputExistsError
from hf_posenc.evaluation import LengthCurve
from hf_posenc.evaluation.protocols import NONOVERLAPPING, PROTOCOLS, SLIDING, in_words
from hf_posenc.plots import plot_lengths
from hf_posenc.provenance import versions

RESULT_NAME = "result.json"
PLOT_NAME = "perplexity.png"
TABLE_NAME = "table.txt"
_SCHEMA = 2
_BITS_NOTE = "at the longest length within the trained one; compare models of different tokenizers by this"
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def result_header(*, seed: int | None, corpus: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what every `result.json` begins with.

    Args:
        seed: the seed of the run, None where nothing was random.
        corpus: what identifies the texts, such as `data.describe(documents)`.
    """
    return {
        "schema": _SCHEMA,
        "seed": seed,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions(),
        "corpus": dict(corpus or {}),
    }


def write_result(path: Path | str, payload: Mapping[str, Any]) -> Path:
    """Write JSON with sorted keys, whole or not at all, and return its path. Folders are made as needed.

    Raises:
        ValueError: the payload holds NaN or an infinity, which JSON has no word for.
    """
    path = Path(path)
    text = json.dumps(payload, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, path)  # a reader, or a run that is killed, never sees half a result
    return path


def check_output(folder: Path | str) -> Path:
    """Return `folder` as a path if it is free to write to.

    Raises:
        OutputExistsError: it already holds a result, which would be mixed with the new one.
        OutputError: it cannot be written to.
    """
    folder = Path(folder)
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if above != folder and not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise OutputError(f"{folder} cannot be made: {above} is no folder that can be written to.")
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{folder} cannot be written to. Give another output folder.")
    if folder.exists() and (not folder.is_dir() or (folder / RESULT_NAME).exists()):
        raise OutputExistsError(f"{folder} already holds a result. Give another output folder, or remove this one.")
    return folder


def read_curves(path: Path | str) -> list[LengthCurve]:
    """Return the curves of a `result.json` (or of the folder it lies in).

    Raises:
        DataError: there is no such file, or it holds no curves.
    """
    path = Path(path)
    path = path / RESULT_NAME if path.is_dir() else path
    try:
        payload = json.loads(path.read_text(encoding="utf-8"))
        return [LengthCurve.from_dict(item) for item in payload["curves"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} holds no length curves: {error}") from error


def write_report(
    curves: Sequence[LengthCurve],
    folder: Path | str,
    *,
    seed: int | None = None,
    corpus: Mapping[str, Any] | None = None,
    title: str = "Perplexity against length",
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write `result.json`, `table.txt` and `perplexity.png` into `folder` and return it.

    `extra` goes into the JSON beside the curves.

    Raises:
        OutputExistsError: the folder already holds a result.
        DataError: there are no curves, or they were measured in different ways.
    """
    folder = check_output(folder)
    payload = result_header(seed=seed, corpus=corpus) | {"curves": [curve.to_dict() for curve in curves]}
    payload |= extra or {}
    table = length_table(curves, title=title)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / TABLE_NAME).open("w", encoding="utf-8") as file:
        Console(file=file, width=200).print(table)
    plot_lengths(curves, folder / PLOT_NAME, title=title)
    write_result(folder / RESULT_NAME, payload)  # last: its presence says that the rest is there
    return folder


def length_table(curves: Sequence[LengthCurve], *, title: str = "Perplexity against length") -> Group:
    """Return, for rich to print, a table of models by lengths and below it the notes its numbers refer to.

    A cell holds the perplexity, or "none" with the number of the note that gives the reason. Where protocols differ,
    each has a row of its own, and another for the mean that its origin reports if that is a different one.

    Raises:
        DataError: there are no curves, or they were measured in different ways.
    """
    check_comparable(curves)
    lengths = sorted({length for curve in curves for length in curve.lengths})
    groups = by_protocol(curves)
    notes = _Notes()
    table = Table(title=title, title_justify="left")
    table.add_column("model", no_wrap=True)
    if len(groups) > 1:
        table.add_column("protocol", no_wrap=True)
    for length in lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    # Perplexities per token of different tokenizers do not compare; bits per byte of the text do.
    tokenizers_differ = any(
        len({n for curve in group for n in curve.n_tokens.values()}) > 1 for group in groups.values()
    )
    if tokenizers_differ:
        table.add_column("bits/byte" + notes.mark(_BITS_NOTE), justify="right", no_wrap=True)
    for name in dict.fromkeys(curve.name for curve in curves):
        for curve in (curve for curve in curves if curve.name == name):
            first = [name, curve.protocol] if len(groups) > 1 else [name]
            bits = [_bits_cell(curve)] if tokenizers_differ else []
            table.add_row(*first, *(_cell(curve, length, curve.ppl, notes) for length in lengths), *bits)
            if curve.protocol in PROTOCOLS and (mean := PROTOCOLS[curve.protocol].mean) and curve.ppl:
                first[-1] += ", own mean" + notes.mark(f"as the origin averages: {mean}")
                table.add_row(*first, *(_cell(curve, length, curve.origin_ppl, notes) for length in lengths))
    if {NONOVERLAPPING, SLIDING} <= set(groups):
        notes.mark("what windows without overlap lose against sliding ones is the cost of tokens with little context")
    # Not the table's own caption, which is wrapped to the width of the table.
    return Group(table, *(Text(line) for line in [*notes.lines(), *map(describe_protocol, groups.values())]))


def describe_protocol(curves: Sequence[LengthCurve]) -> str:
    """Return one sentence saying how the numbers of one protocol were measured."""
    first = curves[0]
    counts = sorted({count for curve in curves for count in curve.n_tokens.values()})
    tokens = " to ".join(f"{count:,}" for count in dict.fromkeys(counts[:1] + counts[-1:])) or "no"
    left_out = f" ({first.n_left_out:,} too short)" if first.n_left_out else ""
    start = {
        "none": "no BOS token",
        "prepend": "a BOS token before each document",
        "every_window": "special tokens around each window",
    }[first.bos_policy]
    how = in_words(first.protocol, span_of_strides(curves))
    return f"{how}; {tokens} tokens scored in {first.n_documents:,} documents{left_out}, {start}"


def span_of_strides(curves: Sequence[LengthCurve]) -> str:
    """Return the strides of these curves in words: one number of tokens, or from which to which."""
    strides = sorted({stride for curve in curves for stride in curve.stride.values()})
    return " to ".join(f"{stride:,}" for stride in dict.fromkeys(strides[:1] + strides[-1:])) + " tokens"


def check_comparable(curves: Sequence[LengthCurve]) -> None:
    """Refuse to show side by side what was not measured alike.

    Raises:
        DataError: there are no curves, two of one protocol share a name, or texts, stride or BOS policy differ.
    """
    if not curves:
        raise DataError("There are no curves to show. Evaluate at least one model.")
    for group in by_protocol(curves).values():
        names = [curve.name for curve in group]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"Several curves are called {', '.join(repeated)}: give each model a name of its own.")
        for length in {length for curve in group for length in curve.stride}:
            strides = sorted({curve.stride[length] for curve in group if length in curve.stride})
            if len(strides) > 1:
                raise DataError(_DIFFER.format(field="stride", found=", ".join(map(str, strides))))
        _same(group, "bos_policy")
    plain = [curve for curve in curves if not _reshapes(curve.protocol)]
    for group in (plain, *by_protocol(curves).values()):
        _same(group, "text_hash")


_DIFFER = (
    "These curves differ in {field} ({found}), so their numbers cannot stand side by side. "
    "Evaluate all models in one run."
)


def _same(curves: Sequence[LengthCurve], field: str) -> None:
    found = sorted({str(getattr(curve, field)) for curve in curves})
    if len(found) > 1:
        raise DataError(_DIFFER.format(field=field, found=", ".join(found)))


def _reshapes(protocol: str) -> bool:
    """Whether a protocol measures other documents than it was given: joined, or only the long ones."""
    known = PROTOCOLS.get(protocol)
    return known is not None and (known.joined or known.fills)


def by_protocol(curves: Sequence[LengthCurve]) -> dict[str, list[LengthCurve]]:
    """Return the curves of each protocol, in the order of first appearance."""
    groups: dict[str, list[LengthCurve]] = {}
    for curve in curves:
        groups.setdefault(curve.protocol, []).append(curve)
    return groups


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
    value = ppl[length]
    text = f"{value:,.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"
    if curve.window[length] < length - 1:  # some protocols count the last target into the length
        text += notes.mark(f"no document is longer than {curve.window[length]:,} tokens")
    if curve.accuracy:
        text += f" ({curve.accuracy[length]:.1%})"
    return text


def _bits_cell(curve: LengthCurve) -> str:
    if curve.bits_per_byte is None or curve.reference_length is None:
        return ""
    return f"{curve.bits_per_byte[curve.reference_length]:.3f}"
