"""The folder of a result: refused where it holds another one, and written whole or not at all."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from hf_posenc.errors import OutputError, OutputExistsError
from hf_posenc.provenance import versions

RESULT_NAME = "result.json"
PLOT_NAME = "perplexity.png"
TABLE_NAME = "table.txt"
_SCHEMA = 3  # 3: results name their tokenizer; files of 2 are read


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


def write_results(
    folder: Path, *, seed: int | None, corpus: Mapping[str, Any] | None, content: Mapping[str, Any]
) -> Path:
    """Write the `result.json` of a folder and return the folder; `seed` and `corpus` as in `result_header`.

    It comes last: its presence says that the rest is there.
    """
    write_result(folder / RESULT_NAME, {**result_header(seed=seed, corpus=corpus), **content})
    return folder


def write_table(folder: Path, text: RenderableType, *, width: int = 200) -> None:
    """Write what rich would print on so many columns into the table's file; the folder is made as needed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / TABLE_NAME).open("w", encoding="utf-8") as file:
        Console(file=file, width=width).print(text)


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
    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(f"{folder} is a file. Give another output folder.")
    if (folder / RESULT_NAME).exists():
        raise OutputExistsError(f"{folder} already holds a result. Give another output folder, or remove this one.")
    return folder
