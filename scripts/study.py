"""Measure what the stages of a conversion bring: `python scripts/study.py --percents 0.5 1 2 --seeds 0`.

Runs that are done are kept; the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys

from hf_posenc.conversion.study import ORIGINAL, RUNGS, TARGETS, cells, study
from hf_posenc.errors import PosencError


def main() -> int:
    """Parse, run, print where the summary lies; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    targets = [name for name in TARGETS if name != ORIGINAL]
    parser.add_argument("--output", default="model_cards/study", help="Folder of the study, new or begun.")
    parser.add_argument("--targets", nargs="+", choices=targets, default=targets, help="Encodings to convert to.")
    parser.add_argument("--rungs", nargs="+", choices=list(RUNGS), default=list(RUNGS), help="Sets of stages.")
    parser.add_argument("--percents", nargs="+", type=float, default=[0.5, 1, 2, 5, 10], help="Of pretraining tokens.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="Order of rows.")
    options = parser.parse_args()
    try:
        print(study(options.output, list(cells(options.targets, options.rungs, options.percents, options.seeds))))
    except PosencError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
