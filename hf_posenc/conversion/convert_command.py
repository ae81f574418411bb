"""Convert a language model to another position encoding, and bring its quality back with few tokens.

A recipe is a YAML file of those fields of `posenc.Recipe` that are to differ from what is recommended for the model and
the encoding: `tokens: 250000`, `distill: {weight: 0.9}`, `calibrate: null`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hf_posenc.config import encoding
from hf_posenc.conversion.convert import Conversion, convert
from hf_posenc.conversion.defaults import recipe_for
from hf_posenc.conversion.finetune_config import parse_mapping, read_mapping
from hf_posenc.conversion.recipe import Recipe
from hf_posenc.data import EMBEDDED, HELD_OUT, load_documents
from hf_posenc.errors import CheckpointError, PosencError
from hf_posenc.evaluation.sharing import launched
from hf_posenc.hub.loading import from_pretrained


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="Checkpoint to start from: a folder or a Hub name.")
    parser.add_argument("--encoding", required=True, help="Position encoding to convert to.")
    parser.add_argument("--encoding_options", default="{}", help="Its fields as YAML, e.g. '{per_layer: true}'.")
    parser.add_argument("--output_dir", required=True, help="Run folder to create.")
    parser.add_argument("--documents", default=EMBEDDED, help='"embedded", a file, folder or glob, or a Hub dataset.')
    parser.add_argument("--recipe", help="YAML file with fields of the recipe; the others are as recommended.")
    parser.add_argument("--tokens", type=int, help="Training budget in tokens, in place of the recipe's.")
    parser.add_argument("--length", type=int, help="Tokens a row; the length the model was trained for by default.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of document order and of all that is drawn.")
    parser.add_argument("--resume", action="store_true", help="Continue the unfinished run in output_dir.")
    return parser


def run(options: argparse.Namespace) -> Conversion:
    """Load, convert and write; raises PosencError where that cannot be done."""
    config = encoding(options.encoding, **parse_mapping(options.encoding_options, called="--encoding_options"))
    fields = {} if options.recipe is None else read_mapping(Path(options.recipe))
    fields |= {} if options.tokens is None else {"tokens": options.tokens}
    Recipe.from_dict(fields)  # what is wrong with it is said before anything is loaded
    texts = [document.text for document in load_documents(options.documents)]
    apart = load_documents(EMBEDDED, split=HELD_OUT) if options.documents == EMBEDDED else None
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = from_pretrained(options.model, dtype=torch.float32)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{options.model!r} does not load: {error}") from error
    return convert(
        model,
        config,
        texts,
        recipe_for(model, config, **fields),
        tokenizer=tokenizer,
        held_out=None if apart is None else [document.text for document in apart],
        length=options.length,
        output_dir=options.output_dir,
        resume=options.resume,
        seed=options.seed,
    )


def main(arguments: Sequence[str] | None = None, *, prog: str = "hf-posenc convert") -> int:
    """Parse, convert, print what every stage did; return the exit status: 0, or 2 with one line on stderr."""
    options = build_parser(prog).parse_args(arguments)
    try:
        done = run(options)
    except PosencError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    launched().print(f"{done}\nwritten to {options.output_dir}")
    return 0
