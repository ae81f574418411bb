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

PARTIAL_NAME = "partial"
"""Folder in the output in which finished scores are kept until the result is written."""


def named_paths(values: Sequence[str]) -> dict[str, str]:
    """Split `NAME=PATH` values into name -> path; alone, a folder is named by its last part, and a Hub name is one.

    Raises:
        ConfigError: two models of the same name.
    """
    models: dict[str, str] = {}
    for value in values:
        name, equals, path = value.partition("=")
        name, path = (name, path) if equals else (without_folders(name), name)
        if name in models:
            raise ConfigError(f"Two models are called {name!r}: give each a name of its own, NAME=PATH.")
        models[name] = path
    return models


def launch(run: Callable[[argparse.Namespace, PartialState], None], options: argparse.Namespace) -> int:
    """Call `run` with the options on every process that was launched, and return the exit status.

    0, or 2 with one line on stderr, and another where scores are left in `options.output` to go on from.
    """
    processes = launched()
    try:
        run(options, processes)
    except PosencError as error:
        print(f"error: {error}", file=sys.stderr)
        if (partial := Path(options.output) / PARTIAL_NAME).exists():
            print(f"finished scores are kept in {partial}: give the same command to go on from them", file=sys.stderr)
        return 2
    if processes.num_processes > 1:
        processes.destroy_process_group()
    return 0
