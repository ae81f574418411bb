"""Train the base checkpoint of the quickstart: `python scripts/pretrain.py --output_dir OUT [--steps N ...]`.

With `--encoding sinusoidal --encoding_options "{scale: 0.02}"`, or any other, train the same model on the same budget
with that in place of its learned table; `hf-posenc diagnose` and `compare` show both side by side.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from hf_posenc.config import encoding
from hf_posenc.conversion.finetune_config import parse_mapping
from hf_posenc.conversion.pretrain import PretrainConfig, pretrain
from hf_posenc.errors import PosencError


@dataclass
class Arguments:
    """Where the trained model goes, and what tells its positions."""

    output_dir: str
    encoding: str | None = field(default=None, metadata={"help": "In place of the learned table."})
    encoding_options: str = field(default="{}", metadata={"help": "Its fields as YAML, such as '{scale: 0.02}'."})


def main() -> int:
    """Parse, train, print the held-out perplexity; return the exit status."""
    where, config = HfArgumentParser((Arguments, PretrainConfig)).parse_args_into_dataclasses()
    command = " ".join(["python", f"scripts/{Path(__file__).name}", *sys.argv[1:]])
    try:
        options = parse_mapping(where.encoding_options, called="--encoding_options")
        chosen = None if where.encoding is None else encoding(where.encoding, **options)
        log = pretrain(config, where.output_dir, encoding=chosen, command=command)
    except PosencError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"held-out perplexity at {config.length}: {log['held_out_perplexity']:.3f}")
    print(f"as stored (float16): {log['held_out_perplexity_as_stored']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
