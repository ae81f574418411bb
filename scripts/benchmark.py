"""Measure what positions cost, or write README's table: `python scripts/benchmark.py --help`."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console

from hf_posenc.benchmark import as_json, as_markdown, as_table, cells, measure, rows_of

GOALS = Path(__file__).with_suffix(".json")
RESULT = Path(__file__).with_name("benchmark_result.json")
README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"(?<=<!-- speed -->\n).*?(?=\n<!-- /speed -->)", flags=re.DOTALL)


def main(
    short: Annotated[bool, typer.Option(help="Only the rows that take seconds.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often every model works.")] = 7,
    only: Annotated[str, typer.Option(help="Only rows whose subject, work, dtype and limit contain this.")] = "",
    device: Annotated[str, typer.Option(help="cpu, or cuda: the same rows on a GPU, and those for one alone.")] = "cpu",
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("benchmark.json"),
    readme: Annotated[
        Path | None, typer.Option(help="Measure nothing: keep the JSON of this run, and write its table into README.")
    ] = None,
) -> None:
    """Measure every row of the goals beside this script; print a table, write JSON."""
    if readme is not None:
        RESULT.write_text(readme.read_text())
        README.write_text(BLOCK.sub(lambda _: as_markdown(RESULT), README.read_text()))
        return
    warnings.simplefilter("ignore", FutureWarning)  # transformers' own, about names that the oldest one needs
    transformers.logging.set_verbosity_error()
    rows = [row for row in rows_of(GOALS) if row.short or not short]
    rows = [row for row in rows if only in " ".join((row.subject, row.work, row.dtype, row.limit))]
    outcomes = []
    for outcome in measure(rows, rounds=rounds, device=device):
        outcomes.append(outcome)
        print(*cells(outcome), flush=True)
        output.write_text(as_json(outcomes, rounds=rounds, device=device) + "\n")
    Console().print(as_table(outcomes))


if __name__ == "__main__":
    typer.run(main)
