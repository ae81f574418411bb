"""Measure what the stages of a conversion bring: `python scripts/study.py --percents 0.5 1 2 --seeds 0`.

Runs that are done are kept; the same command goes on where it was stopped. Without runs to do, as with `--percents`
and nothing behind it, it writes the report again.
"""

from __future__ import annotations

import argparse
import sys

from hf_posenc.conversion.recipe import Recipe
from hf_posenc.conversion.study import RUNGS, TARGETS, TEXTS, cells, study
from hf_posenc.errors import PosencError


def main() -> int:
    """Parse, run, print where the report lies; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rates = [Recipe.learning_rate]
    parser.add_argument("--output", default="model_cards/study", help="Folder of the study, new or begun.")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS), help="Encodings.")
    parser.add_argument("--rungs", nargs="+", choices=list(RUNGS), default=list(RUNGS), help="Sets of stages.")
    parser.add_argument("--percents", nargs="*", type=float, default=[0.5, 1, 2, 5, 10], help="Of pretraining tokens.")
    parser.add_argument("--learning_rates", nargs="+", type=float, default=rates, help="The best one is reported.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="Order of rows.")
    parser.add_argument("--text", choices=list(TEXTS), default="unseen", help="By the original, in its pretraining.")
    parser.add_argument("--batch_size", type=int, default=Recipe.batch_size, help="Rows in a step.")
    asked = parser.parse_args()
    grid = (asked.targets, asked.rungs, asked.percents, asked.learning_rates, asked.seeds)
    todo = cells(*grid, text=asked.text, batch_size=asked.batch_size)
    try:
        print(study(asked.output, list(todo)))
    except PosencError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
