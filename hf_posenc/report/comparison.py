"""Several results or models side by side: what may share an axis does, and the rest stands apart with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_posenc.data import EMBEDDED, HELD_OUT, describe, load_documents
from hf_posenc.errors import ConfigError, DataError
from hf_posenc.evaluation import LengthCurve
from hf_posenc.evaluation.checkpoints import evaluate_checkpoints
from hf_posenc.evaluation.protocols import SLIDING
from hf_posenc.evaluation.subject import without_folders
from hf_posenc.report.comparability import Panel, panels
from hf_posenc.report.files import RESULT_NAME
from hf_posenc.report.launching import split_name
from hf_posenc.report.rows import curve_rows
from hf_posenc.report.writing import TITLE, holds_curves, read_curves, report_text, write_report

LENGTHS = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Curves side by side.

    Attributes:
        curves: all of them, in the order given, each model under a name of its own.
        corpus: what identifies the texts of those that were measured here, empty where all were read.
        title: heading of tables, plots and page.
    """

    curves: tuple[LengthCurve, ...]
    corpus: Mapping[str, Any]
    title: str = TITLE

    @property
    def panels(self) -> list[Panel]:
        """The curves in groups that share an axis; each group but the first says why it stands apart."""
        return panels(self.curves)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row a model, protocol and length (`report.rows.curve_rows`), as `Dataset.from_list` takes them."""
        return curve_rows(self.curves)

    def __str__(self) -> str:
        """Return the tables as text."""
        console = Console(file=StringIO(), width=200, record=True)
        console.print(report_text(self.panels, title=self.title))
        return console.export_text().rstrip()

    def write(self, folder: Path | str) -> Path:
        """Write table, plots, page, rows and JSON into a new folder and return it, as `report.write_report` does.

        Raises:
            OutputExistsError: the folder already holds a result.
        """
        return write_report(self.curves, folder, corpus=self.corpus, title=self.title)


def compare(
    sources: Sequence[str | Path | LengthCurve],
    *,
    documents: str = EMBEDDED,
    split: str = HELD_OUT,
    max_documents: int | None = None,
    lengths: Sequence[int] | None = None,
    protocols: Sequence[str] | None = None,
    stride: int | None = None,
    bos_policy: str | None = None,
    batch_size: int = 1,
    title: str = TITLE,
) -> Comparison:
    """Put results and models side by side.

    A `result.json`, or a folder with one that holds curves, is read. Every other folder or Hub name is a model, which
    is measured. Measured differently or on other texts, curves are kept apart (`Comparison.panels`).

    Args:
        sources: files, folders, Hub names or curves. `NAME=PATH` names the model; of a result with several models, it
            goes before each name. Without, names that several sources share get the name of the source before them.
        documents, split, max_documents: texts for the models, as in `data.load_documents`; only the first so many.
        lengths: window lengths for the models; by default those of the results that are read, else 128 to 2,048.
        protocols: for the models; by default those of the results that are read, else with and without overlap.
        stride, bos_policy, batch_size: for the models, as in `perplexity_by_length`.
        title: heading of tables, plots and page.

    Raises:
        ConfigError: nothing to compare, or a source without a path.
        DataError: a result without curves, or curves that cannot be told apart by name.
        CheckpointError: a model cannot be loaded.
        UnknownNameError, ConfigError, UnsupportedFamilyError: as in `perplexity_by_length`.
    """
    if isinstance(sources, (str, Path, LengthCurve)) or not sources:
        raise ConfigError("Give a list of results or models to compare, with at least one in it.")
    if max_documents is not None and max_documents < 1:
        raise ConfigError(f"max_documents must be at least 1; got {max_documents}.")
    found = [_Source.of(source) for source in sources]
    read = [curve for source in found for curve in source.curves]
    models = {source.called: source.path for source in found if not source.curves}
    if len(models) < sum(not source.curves for source in found):
        raise ConfigError("Two of the models share a name: give each a name of its own, NAME=PATH.")
    corpus: dict[str, Any] = {}
    if models:
        texts = load_documents(documents, split=split)[:max_documents]
        corpus = describe(texts) | {"source": documents}
        measured = evaluate_checkpoints(
            models,
            [text.text for text in texts],
            lengths or sorted({length for curve in read for length in curve.lengths}) or LENGTHS,
            protocols=protocols or list(dict.fromkeys(curve.protocol for curve in read)) or [SLIDING],
            stride=stride,
            bos_policy=bos_policy,
            batch_size=batch_size,
        )
        own = {name: [curve for curve in measured if curve.name == name] for name in models}
        found = [source if source.curves else source.measured(own[source.called]) for source in found]
    return Comparison(curves=tuple(_named_apart(found)), corpus=corpus, title=title)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One of the things to compare: `curves` are empty for a model that is still to be measured."""

    name: str
    path: str
    curves: tuple[LengthCurve, ...] = ()

    @classmethod
    def of(cls, given: str | Path | LengthCurve) -> _Source:
        """Read what is given where it holds curves.

        Raises:
            DataError: a file that is no result, or a folder whose result holds no curves and that is no model.
        """
        if isinstance(given, LengthCurve):
            return cls(name="", path=given.name, curves=(given,))
        before, path = split_name(str(given))
        name = before or ""
        if path.endswith(".json") or holds_curves(path):
            return cls(name=name, path=path, curves=tuple(read_curves(path)))
        if (Path(path) / RESULT_NAME).exists() and not (Path(path) / "config.json").exists():
            raise DataError(f"{path} holds a result without length curves, and no model that could be measured.")
        return cls(name=name, path=path)

    def measured(self, curves: Sequence[LengthCurve]) -> _Source:
        """Return the source with the curves of its model, which bear its name already."""
        return replace(self, name="", curves=tuple(curves))

    @property
    def called(self) -> str:
        """The name of the model: the one given, or that of its folder or on the Hub."""
        return self.name or without_folders(self.path)

    @property
    def label(self) -> str:
        """What tells this source from others: its name, or the folder that it lies in."""
        place = Path(self.path)
        return self.name or (place.absolute().parent.name if place.name == RESULT_NAME else place.stem)

    def renamed(self, *, always: bool) -> list[LengthCurve]:
        """Return the curves under the name given to the source, or with its label before their own names."""
        single = len({curve.name for curve in self.curves}) == 1
        if self.name and single:
            return [replace(curve, name=self.name) for curve in self.curves]
        if self.name or always:
            return [replace(curve, name=f"{self.label}: {curve.name}") for curve in self.curves]
        return list(self.curves)


def _named_apart(sources: Sequence[_Source]) -> list[LengthCurve]:
    """Return all curves once each, with their source's label before names that mean several models."""
    plain = [source.renamed(always=False) for source in sources]
    hashes: dict[str, set[str | None]] = {}
    for curve in (curve for curves in plain for curve in curves):
        hashes.setdefault(curve.name, set()).add(curve.model_hash)
    shared = {name for name, found in hashes.items() if len(found) > 1}
    found: list[LengthCurve] = []
    for source, curves in zip(sources, plain, strict=True):
        clash = bool(shared.intersection(curve.name for curve in curves))
        for curve in source.renamed(always=True) if clash else curves:
            if curve not in found:  # the same measurement, given twice
                found.append(curve)
    return found
