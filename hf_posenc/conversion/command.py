"""Fine-tune a causal language model by YAML and flags.

Every field of `FinetuneConfig` is a flag of the same name; a flag overrides the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from hf_posenc.conversion.finetune import dry_run, finetune
from hf_posenc.conversion.finetune_config import FinetuneConfig, read_config
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.sharing import launched


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Return the command line: the run's own options and one flag per config field."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file with any of the options below.")
    parser.add_argument("--dry_run", action="store_true", help="Print plan and token budget; train nothing.")
    parser.add_argument("--resume", action="store_true", help="Continue the unfinished run in output_dir.")
    for option in fields(FinetuneConfig):
        parser.add_argument(f"--{option.name}", default=argparse.SUPPRESS, help=option.metadata["help"])
    return parser


def show(text: str) -> None:
    """Print once, however many processes were launched."""
    launched().print(text)


def main(arguments: Sequence[str] | None = None, *, prog: str = "hf-posenc finetune") -> int:
    """Parse, train, print where the result lies; return the exit status: 0, or 2 with one line on stderr."""
    flags = vars(build_parser(prog).parse_args(arguments))
    path, dry, resume = flags.pop("config"), flags.pop("dry_run"), flags.pop("resume")
    try:
        config = read_config(path, flags)
        if dry:
            show(dry_run(config))
            return 0
        result = finetune(config, resume=resume)
    except PosencError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    loss, tokens = result.record["final_loss"], result.record["tokens_seen"]
    show(f"{result.output_dir}: loss {loss:.4f} after {tokens:,} tokens")
    return 0
