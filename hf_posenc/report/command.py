"""The `evaluate` command: several saved models, the same texts, one table and one plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console

from hf_posenc.data import EMBEDDED, HELD_OUT, Document, describe, load_documents
from hf_posenc.errors import ConfigError, PosencError
from hf_posenc.evaluation.checkpoints import evaluate_checkpoints
from hf_posenc.evaluation.documents import BOS_POLICIES
from hf_posenc.evaluation.partial import discard
from hf_posenc.evaluation.protocols import BY_SOURCE, PROTOCOLS, PSEUDO, SLIDING
from hf_posenc.evaluation.sharing import launched
from hf_posenc.pairs import load_pairs
from hf_posenc.report import check_output, length_table, write_report

PARTIAL_NAME = "partial"


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=PATH", help="Repeat for each model.")
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="Window lengths in tokens.")
    parser.add_argument("--documents", default=EMBEDDED, help='"embedded", a file, folder or glob, or a Hub dataset.')
    parser.add_argument("--split", default=HELD_OUT, help="Split of the embedded corpus or of the Hub dataset.")
    parser.add_argument("--min_characters", type=int, default=1, help="Leave out shorter documents.")
    parser.add_argument("--max_documents", type=int, help="Use only the first so many documents.")
    names = ", ".join([*PROTOCOLS, f"or {PSEUDO} for masked models, or {BY_SOURCE} for encoder-decoders"])
    parser.add_argument(
        "--protocol", nargs="+", default=[SLIDING], help=f"Any of {names}; sliding brings nonoverlapping with it."
    )
    parser.add_argument("--stride", type=int, help="Tokens that windows advance by; the protocol's own by default.")
    parser.add_argument("--bos_policy", help=f"One of {', '.join(BOS_POLICIES)}; the protocol's own by default.")
    parser.add_argument("--batch_size", type=int, default=1, help="Windows in one forward pass.")
    parser.add_argument("--title", default="Perplexity against length", help="Heading of table and plot.")
    parser.add_argument("--output", required=True, help="New folder for JSON, CSV, table, plots and page.")
    return parser


def named_paths(values: Sequence[str]) -> dict[str, str]:
    """Split `NAME=PATH` values into name -> path; a path alone is its own name.

    Raises:
        ConfigError: two models of the same name.
    """
    models: dict[str, str] = {}
    for value in values:
        name, equals, path = value.partition("=")
        path = path if equals else name
        if name in models:
            raise ConfigError(f"Two models are called {name!r}: give each a name of its own, NAME=PATH.")
        models[name] = path
    return models


def run(options: argparse.Namespace, processes: PartialState) -> None:
    """Evaluate on all processes, write and print on the main one.

    Scores of finished documents are kept in the output folder until the result is written: a run that was stopped goes
    on from them when it is given again.

    Raises:
        PosencError: what cannot be done, wherever possible before the first model is loaded.
    """
    import hf_posenc  # noqa: F401  (teaches AutoModelForCausalLM to load patched models)

    models = named_paths(options.model)
    partial = check_output(options.output) / PARTIAL_NAME
    if options.max_documents is not None and options.max_documents < 1:
        raise ConfigError(f"--max_documents must be at least 1; got {options.max_documents}.")
    texts, corpus = _texts(options)
    curves = evaluate_checkpoints(
        models,
        texts,
        options.lengths,
        protocols=options.protocol,
        stride=options.stride,
        batch_size=options.batch_size,
        bos_policy=options.bos_policy,
        processes=processes,
        partial=partial,
    )
    if processes.is_main_process:
        write_report(curves, options.output, corpus=corpus, title=options.title)
        discard(partial)
        Console().print(length_table(curves, title=options.title))
        print(f"written to {options.output}")


def _texts(options: argparse.Namespace) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return texts, or pairs of them for encoder-decoders, and what a result says about them."""
    if options.protocol == [BY_SOURCE]:
        split = "test" if options.split == HELD_OUT else options.split
        pairs = load_pairs(options.documents, split=split)[: options.max_documents]
        return pairs, describe([Document(source, target) for source, target in pairs])
    found = load_documents(options.documents, split=options.split, min_characters=options.min_characters)
    documents = found[: options.max_documents]
    return [document.text for document in documents], describe(documents)


def main(arguments: Sequence[str] | None = None, *, prog: str = "hf-posenc evaluate") -> int:
    """Parse, evaluate, print the table; return the exit status: 0, or 2 with one line on stderr."""
    options = build_parser(prog).parse_args(arguments)
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
