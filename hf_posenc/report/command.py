"""The `evaluate` command: several saved models, the same texts, one table and one plot."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console, Group

from hf_posenc.data import EMBEDDED, HELD_OUT, Document, describe, load_documents
from hf_posenc.errors import ConfigError
from hf_posenc.evaluation.checkpoints import evaluate_checkpoints, key_tokens_of_checkpoints, positions_of_checkpoints
from hf_posenc.evaluation.documents import BOS_POLICIES
from hf_posenc.evaluation.partial import discard
from hf_posenc.evaluation.protocols import BY_POSITION, BY_SOURCE, KEY_TOKENS, PROTOCOLS, PSEUDO, SLIDING
from hf_posenc.pairs import load_pairs
from hf_posenc.report.files import check_output
from hf_posenc.report.first_windows import key_tokens_text, positions_text, write_key_tokens, write_positions
from hf_posenc.report.launching import PARTIAL_NAME, launch, named_paths
from hf_posenc.report.table import length_table
from hf_posenc.report.writing import write_report

_PROTOCOLS = (
    f"Any of {', '.join(PROTOCOLS)}; sliding brings nonoverlapping with it. Or one alone: {PSEUDO} for masked models, "
    f"{BY_SOURCE} for encoder-decoders, {BY_POSITION} for the loss at each position of a window, {KEY_TOKENS} for the "
    "tokens that need a long context (LongPPL, or a named variant of it)."
)


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=PATH", help="Repeat for each model.")
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="Window lengths in tokens.")
    parser.add_argument("--documents", default=EMBEDDED, help='"embedded", a file, folder or glob, or a Hub dataset.')
    parser.add_argument("--split", default=HELD_OUT, help="Split of the embedded corpus or of the Hub dataset.")
    parser.add_argument("--min_characters", type=int, default=1, help="Leave out shorter documents.")
    parser.add_argument("--max_documents", type=int, help="Use only the first so many documents.")
    parser.add_argument("--protocol", nargs="+", default=[SLIDING], help=_PROTOCOLS)
    parser.add_argument("--stride", type=int, help="Tokens that windows advance by; the protocol's own by default.")
    parser.add_argument("--bos_policy", help=f"One of {', '.join(BOS_POLICIES)}; the protocol's own by default.")
    parser.add_argument(
        "--evaluator", metavar="PATH", help=f"With {KEY_TOKENS}: the model that chooses them; else each its own."
    )
    parser.add_argument("--batch_size", type=int, default=1, help="Windows in one forward pass.")
    parser.add_argument("--title", help="Heading of table and plot.")
    parser.add_argument("--output", required=True, help="New folder for JSON, CSV, table, plots and page.")
    return parser


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
    if options.evaluator is not None and options.protocol != [KEY_TOKENS]:
        raise ConfigError(f"--evaluator means nothing without --protocol {KEY_TOKENS}: leave it out.")
    texts, corpus = _texts(options)
    shared: dict[str, Any] = {
        "stride": options.stride,
        "bos_policy": options.bos_policy,
        "batch_size": options.batch_size,
        "processes": processes,
        "partial": partial,
    }
    found: Any
    write: Callable[..., Path]
    text: Callable[..., Group]
    if options.protocol == [BY_POSITION]:
        found = positions_of_checkpoints(models, texts, options.lengths, **shared)
        write, text = write_positions, positions_text
    elif options.protocol == [KEY_TOKENS]:
        found = key_tokens_of_checkpoints(models, texts, options.lengths, evaluator=options.evaluator, **shared)
        write, text = write_key_tokens, key_tokens_text
    else:
        found = evaluate_checkpoints(models, texts, options.lengths, protocols=options.protocol, **shared)
        write, text = write_report, length_table
    if processes.is_main_process:
        title = {} if options.title is None else {"title": options.title}
        write(found, options.output, corpus=corpus, **title)
        discard(partial)
        Console().print(text(found, **title))
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
    return launch(run, build_parser(prog).parse_args(arguments))
