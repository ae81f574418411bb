"""Scores of documents on disk while a run goes on, so that a run that was stopped goes on where it was.

One line of JSON a document and cut (its length and stride), in one file a process. A line is valid for its run only:
what was measured, with which protocol, on which model. Lines of other runs are passed over, and so is a last line that
was torn when the process was killed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hf_posenc.errors import OutputError

if TYPE_CHECKING:
    from accelerate import PartialState

Cut: TypeAlias = tuple[int, ...]  # the numbers by which documents were cut, such as length and stride


@dataclass(frozen=True, kw_only=True)
class DocumentScore:
    """What one document contributes.

    Attributes:
        index: its place in the corpus.
        nll: nats over all its scored targets.
        n_tokens: number of them.
        weighted, weight: its windows' means times their weights, and the weights, as the protocol's origin has them.
        n_correct: targets that the model would have chosen itself; None where that was not asked.
    """

    index: int
    nll: float
    n_tokens: int
    weighted: float
    weight: float
    n_correct: int | None = None


class PartialScores:
    """The scores of one run in `folder`, read when made, appended to by `keep`.

    Args:
        folder: where they lie; made where need be. None keeps nothing.
        run: everything that the scores depend on, apart from documents and cuts.
        processes: among which the documents are shared; each writes a file of its own.

    Raises:
        OutputError: the folder cannot be written to.
    """

    def __init__(
        self, folder: Path | str | None, run: dict[str, Any], *, processes: PartialState | None = None
    ) -> None:
        self._run = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()
        self._file: Path | None = None
        self._known: dict[tuple[Cut, str], dict[str, Any]] = {}
        if folder is None:
            return
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = folder / f"scores-{0 if processes is None else processes.process_index}.jsonl"
            with self._file.open("a", encoding="utf-8") as file:
                file.write("\n")  # ends a line that was torn
        except OSError as error:
            raise OutputError(f"{folder} cannot be written to: {error}. Give another folder.") from error
        for path in sorted(folder.glob("scores-*.jsonl")):
            self._read(path)

    def known(self, cut: Cut, document: str) -> dict[str, Any] | None:
        """Return the kept score of a document, given by its key, under this cut; None for no score."""
        return self._known.get((cut, document))

    def keep(self, cut: Cut, scores: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Append the scores of documents under this cut: the key of each, and what JSON can hold."""
        if self._file is None:
            return
        lines = (
            json.dumps({"run": self._run, "cut": cut, "document": document, "score": dict(score)}) + "\n"
            for document, score in scores
        )
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def _read(self, path: Path) -> None:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                    if row["run"] == self._run:
                        self._known[tuple(row["cut"]), row["document"]] = row["score"]
                except (ValueError, KeyError, TypeError):
                    continue


def discard(folder: Path | str) -> None:
    """Remove the partial scores of a run that is complete, and their folder if nothing else is in it."""
    folder = Path(folder)
    for path in folder.glob("scores-*.jsonl"):
        path.unlink()
    with suppress(OSError):
        folder.rmdir()
