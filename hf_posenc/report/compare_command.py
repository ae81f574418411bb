"""The `compare` command: results and models side by side, as a table, plots, a page, JSON and CSV."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_posenc.data import EMBEDDED, HELD_OUT
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import BOS_POLICIES
from hf_posenc.evaluation.protocols import PROTOCOLS
from hf_posenc.report import check_output
from hf_posenc.report.comparison import LENGTHS, compare
from hf_posenc.report.launching import INTERRUPTED
from hf_posenc.report.writing import PAGE_NAME, TITLE


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "sources", nargs="+", metavar="[NAME=]PATH", help="A result.json or its folder is read; a model is measured."
    )
    parser.add_argument("--output", required=True, help="New folder for JSON, CSV, table, plots and page.")
    models = parser.add_argument_group("models that have no result yet")
    models.add_argument("--documents", default=EMBEDDED, help='"embedded", a file, folder or glob, or a Hub dataset.')
    models.add_argument("--split", default=HELD_OUT, help="Split of the embedded corpus or of the Hub dataset.")
    models.add_argument("--max_documents", type=int, help="Use only the first so many documents.")
    spread = f"{LENGTHS[0]} to {LENGTHS[-1]:,}"
    models.add_argument(
        "--lengths", type=int, nargs="+", help=f"Window lengths; those of the results, else {spread} tokens."
    )
    models.add_argument(
        "--protocol",
        nargs="+",
        help=f"Any of {', '.join(PROTOCOLS)}; those of the results, else with and without overlap.",
    )
    models.add_argument("--stride", type=int, help="Tokens that windows advance by; the protocol's own by default.")
    models.add_argument("--bos_policy", help=f"One of {', '.join(BOS_POLICIES)}; the protocol's own by default.")
    models.add_argument("--batch_size", type=int, default=1, help="Windows in one forward pass.")
    parser.add_argument("--title", default=TITLE, help="Heading of table, plots and page.")
    return parser


def main(arguments: Sequence[str] | None = None, *, prog: str = "hf-posenc compare") -> int:
    """Parse, compare, print the tables; return the exit status: 0, or 2 with one line on stderr."""
    options = build_parser(prog).parse_args(arguments)
    try:
        check_output(options.output)  # before an hour of measuring, not after it
        found = compare(
            options.sources,
            documents=options.documents,
            split=options.split,
            max_documents=options.max_documents,
            lengths=options.lengths,
            protocols=options.protocol,
            stride=options.stride,
            bos_policy=options.bos_policy,
            batch_size=options.batch_size,
            title=options.title,
        )
        folder = found.write(options.output)
    except PosencError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    print(found)
    print(f"written to {folder}; open {folder / PAGE_NAME} in a browser")
    return 0
