"""Publish a saved model on the Hub, with its code and its card, in one commit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_posenc.errors import PosencError
from hf_posenc.hub.push import push_to_hub


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Return the command line: one flag for every argument of `push_to_hub`."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", help="Saved model or run folder.")
    parser.add_argument("repo_id", help="owner/name on the Hub.")
    parser.add_argument("--base_model", help="Hub name of the base model; the run's own where it is left out.")
    parser.add_argument("--licence", help="SPDX identifier of the weights' licence; the base's where it is left out.")
    visibility = parser.add_mutually_exclusive_group()
    visibility.add_argument("--private", action="store_true", default=None, help="Make the repository private.")
    visibility.add_argument(
        "--public",
        action="store_false",
        dest="private",
        default=None,
        help="Make it public, even where the base is gated or no licence is known.",
    )
    parser.add_argument("--curves", help="result.json of an evaluation, or its folder, for the card.")
    parser.add_argument("--dry_run", help="New folder to write as it would be pushed, in place of pushing.")
    return parser


def main(arguments: Sequence[str] | None = None, *, prog: str = "hf-posenc push") -> int:
    """Parse, publish, print what went up; return the exit status: 0, or 2 with one line on stderr."""
    options = vars(build_parser(prog).parse_args(arguments))
    try:
        publication = push_to_hub(options.pop("folder"), options.pop("repo_id"), **options)
    except PosencError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written to {options['dry_run']}, nothing was pushed:" if options["dry_run"] else "pushed:")
    print(publication)
    return 0
