"""A folder with everything that curves say: JSON, rows, table, plots, and a page for the browser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from hf_posenc.errors import DataError
from hf_posenc.evaluation import LengthCurve
from hf_posenc.evaluation.protocols import FIXED_TARGET
from hf_posenc.report.comparability import Panel, panels, tokenizers_differ
from hf_posenc.report.files import PLOT_NAME, RESULT_NAME, check_output, write_results, write_table
from hf_posenc.report.rows import write_rows
from hf_posenc.report.table import length_table

PAGE_NAME = "index.html"
TITLE = "Perplexity against length"


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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} holds no length curves: {error}") from error


def holds_curves(folder: Path | str) -> bool:
    """Whether a folder has a result that says it holds curves; that of a run which only trained has none."""
    try:
        return bool(json.loads((Path(folder) / RESULT_NAME).read_text(encoding="utf-8")).get("curves"))
    except (OSError, ValueError, AttributeError):
        return False


def write_report(
    curves: Sequence[LengthCurve],
    folder: Path | str,
    *,
    seed: int | None = None,
    corpus: Mapping[str, Any] | None = None,
    title: str = TITLE,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write what curves say into `folder` and return it.

    `result.json` holds all of it and `extra` beside the curves; `curves.csv` and `curves.jsonl` one row a model,
    protocol and length; `table.txt`, `index.html` and the plots, each as PNG and SVG, are for reading. Curves that were
    not measured alike stand apart, with the reason: their plots are `perplexity-2` and so on.

    Raises:
        OutputExistsError: the folder already holds a result.
        DataError: there are no curves, or two of them cannot be told apart by name.
    """
    from hf_posenc.report.page import page  # matplotlib takes a second to import

    folder = check_output(folder)
    found = panels(curves)
    text = report_text(found, title=title)
    write_table(folder, text)
    for number, panel in enumerate(found, 1):
        _plot(panel, folder, "" if number == 1 else f"-{number}", title)
    (folder / PAGE_NAME).write_text(page(found, title=title), encoding="utf-8")
    write_rows(curves, folder)
    content = {"curves": [curve.to_dict() for curve in curves], **(extra or {})}
    return write_results(folder, seed=seed, corpus=corpus, content=content)


def report_text(found: Sequence[Panel], *, title: str = TITLE) -> Group:
    """Return, for rich to print, one table a panel, each but the first under the reason why it stands apart."""
    tables: list[Group | Text] = []
    for panel in found:
        tables += [Text(f"\n{panel.reason}")] if panel.reason else []
        tables.append(length_table(panel.curves, title=title))
    return Group(*tables)


def _plot(panel: Panel, folder: Path, suffix: str, title: str) -> None:
    """Draw a panel: perplexity, or bits per byte across tokenizers; and what only growing context shows."""
    from hf_posenc.plots import BITS_PER_BYTE, GAIN, PERPLEXITY, plot_effective_lengths, plot_lengths

    quantity = BITS_PER_BYTE if tokenizers_differ(panel.curves) else PERPLEXITY
    name = Path(PLOT_NAME).stem if quantity is PERPLEXITY else "bits_per_byte"
    plot_lengths(panel.curves, folder / f"{name}{suffix}", title=title, quantity=quantity)
    growing = [curve for curve in panel.curves if curve.protocol == FIXED_TARGET and curve.ppl]
    if growing:
        plot_lengths(growing, folder / f"gain{suffix}", title="What context brings", quantity=GAIN)
    if any(curve.effective_length is not None for curve in growing):
        plot_effective_lengths(growing, folder / f"effective_length{suffix}")
