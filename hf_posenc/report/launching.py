"""What the commands that measure saved models share: names of models, and a run that stops with one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate import PartialState

from hf_posenc.errors import ConfigError, PosencError
from hf_posenc.evaluation.sharing import launched
from hf_posenc.evaluation.subject import without_folders

INTERRUPTED = 130
"""Exit status of a command that was stopped by Ctrl-C, as shells have it."""
PARTIAL_NAME = "partial"
"""Folder in the output in which finished scores are kept until the result is written."""


def named_paths(values: Sequence[str]) -> dict[str, str]:
    """Return name -> path of `NAME=PATH` values; alone, a folder is named by its last part, and a Hub name is one.

    Raises:
        ConfigError: a name or a path is empty, or two models have the same name.
    """
    models: dict[str, str] = {}
    for value in values:
        name, path = split_name(value)
        name = without_folders(path) if name is None else name
        if name in models:
            raise ConfigError(f"Two models are called {name!r}: give each a name of its own, NAME=PATH.")
        models[name] = path
    return models


def split_name(value: str) -> tuple[str | None, str]:
    """Return the name, None where there is none, and the path of `NAME=PATH`; a path that exists may hold a `=` itself.

    Raises:
        ConfigError: the name or the path is empty.
    """
    before, equals, after = value.partition("=")
    name, path = (None, value) if not equals or Path(value).exists() else (before, after)
    if not path.strip() or (name is not None and not name.strip()):
        raise ConfigError(f"{value!r} names no model: give PATH or NAME=PATH.")
    return name, path


def launch(run: Callable[[argparse.Namespace, PartialState], None], options: argparse.Namespace) -> int:
    """Call `run` with the options on every process that was launched, and return the exit status.

    0, or 2 with one line on stderr (130 for Ctrl-C), and another where scores are left in `options.output` to go on
    from.
    """
    processes = launched()
    try:
        run(options, processes)
    except (PosencError, KeyboardInterrupt) as error:
        stopped = isinstance(error, KeyboardInterrupt)
        print("stopped" if stopped else f"error: {error}", file=sys.stderr)
        if (partial := Path(options.output) / PARTIAL_NAME).exists():
            print(f"finished scores are kept in {partial}: give the same command to go on from them", file=sys.stderr)
        return INTERRUPTED if stopped else 2
    if processes.num_processes > 1:
        processes.destroy_process_group()
    return 0
