"""The `retrieve` command: what several saved models find in texts, by length and depth."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from accelerate import PartialState
from rich.console import Console

from hf_posenc.data import HELD_OUT, describe, load_documents
from hf_posenc.evaluation.checkpoints import retrieve_checkpoints
from hf_posenc.evaluation.partial import discard
from hf_posenc.evaluation.retrieval import DEPTHS
from hf_posenc.evaluation.retrieval_tasks import TASKS
from hf_posenc.report import check_output
from hf_posenc.report.launching import PARTIAL_NAME, launch, named_paths
from hf_posenc.report.retrieval import TITLE, retrieval_table, write_retrieval


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=PATH", help="Repeat for each model.")
    parser.add_argument("--task", nargs="+", default=["passkey"], help=f"Any of {', '.join(TASKS)}.")
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="Tokens of prompt and answer together.")
    parser.add_argument("--depths", type=float, nargs="+", default=list(DEPTHS), help="Where the answer is: 0 to 1.")
    parser.add_argument("--trials", type=int, default=10, help="Prompts at each length and depth.")
    parser.add_argument("--digits", type=int, default=5, help="Digits of each number.")
    parser.add_argument("--documents", help='Texts to hide answers in, in place of a filler: as in "evaluate".')
    parser.add_argument("--split", default=HELD_OUT, help="Split of the embedded corpus or of the Hub dataset.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of keys, words and filler.")
    parser.add_argument("--batch_size", type=int, default=1, help="Prompts in one forward pass.")
    parser.add_argument("--title", default=TITLE, help="Heading of table and plot.")
    parser.add_argument("--output", required=True, help="New folder for JSON, table and plots.")
    return parser


def run(options: argparse.Namespace, processes: PartialState) -> None:
    """Measure on all processes, write and print on the main one; a run that was stopped goes on when given again.

    Raises:
        PosencError: what cannot be done, wherever possible before the first model is loaded.
    """
    import hf_posenc  # noqa: F401  (teaches AutoModelForCausalLM to load patched models)

    partial = check_output(options.output) / PARTIAL_NAME
    texts = [] if options.documents is None else load_documents(options.documents, split=options.split)
    grids = retrieve_checkpoints(
        named_paths(options.model),
        options.task,
        options.lengths,
        depths=options.depths,
        trials=options.trials,
        digits=options.digits,
        seed=options.seed,
        haystack=[document.text for document in texts] or None,
        batch_size=options.batch_size,
        processes=processes,
        partial=partial,
    )
    if processes.is_main_process:
        write_retrieval(grids, options.output, corpus=describe(texts) if texts else None, title=options.title)
        discard(partial)
        Console().print(retrieval_table(grids, title=options.title))
        print(f"written to {options.output}")


def main(arguments: Sequence[str] | None = None, *, prog: str = "hf-posenc retrieve") -> int:
    """Parse, measure, print the table; return the exit status: 0, or 2 with one line on stderr."""
    return launch(run, build_parser(prog).parse_args(arguments))
