"""Train the base checkpoint of the quickstart: `python scripts/pretrain.py --output_dir OUT [--steps N ...]`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from transformers import HfArgumentParser

from hf_posenc.conversion.pretrain import PretrainConfig, pretrain
from hf_posenc.errors import PosencError


@dataclass
class Arguments:
    """Where the trained model goes."""

    output_dir: str


def main() -> int:
    """Parse, train, print the held-out perplexity; return the exit status."""
    where, config = HfArgumentParser((Arguments, PretrainConfig)).parse_args_into_dataclasses()
    command = " ".join(["python", f"scripts/{Path(__file__).name}", *sys.argv[1:]])
    try:
        log = pretrain(config, where.output_dir, command=command)
    except PosencError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"held-out perplexity at {config.length}: {log['held_out_perplexity']:.3f}")
    print(f"as stored (float16): {log['held_out_perplexity_as_stored']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
