"""Measure what positions cost: `python scripts/benchmark.py [--short] [--rounds N] [--output FILE]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_posenc.benchmark import as_json, as_table, measure, rows_of

GOALS = Path(__file__).with_suffix(".json")


def main(
    short: Annotated[bool, typer.Option(help="Only the rows that take seconds.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often either side works.")] = 7,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("benchmark.json"),
) -> None:
    """Measure every row of the goals beside this script; print a table, write JSON."""
    outcomes = []
    for outcome in measure([row for row in rows_of(GOALS) if row.short or not short], rounds=rounds):
        outcomes.append(outcome)
        row = outcome.row
        print(f"{row.subject} against {row.against}, {row.work} {row.length}: {outcome.ratio:.3f}", flush=True)
    Console().print(as_table(outcomes))
    output.write_text(as_json(outcomes, rounds=rounds) + "\n")


if __name__ == "__main__":
    typer.run(main)
