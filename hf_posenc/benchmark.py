"""What positions cost: patched models against unpatched ones and stock families, in time, memory and accuracy.

Models are bodies of a few layers with random weights; a ratio says how much of a model of that shape positions take.
All that are held against one model take turns in one process, on one thread, and CPU time is what counts, so that other
work on the machine disturbs little. Peak memory is that of a process of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table

from hf_posenc.errors import ConfigError, did_you_mean
from hf_posenc.workload import LAYERS, Task, error, job, peak, seconds

LIMITS = {"ratio": "×", "seconds": " s", "MiB": " MiB"}
"""What a goal limits -> its unit."""
FLOOR = 1.5
"""How many times the error of the model that it is held against a subject in half precision may have."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One claim about what a subject takes.

    Attributes:
        subject: a stock model, or one with an encoding in it, `gpt2+alibi`.
        against: the model that it is held against for the same work; None where the goal is an absolute one.
        work: of `workload.Task`, as are `length` and `dtype`.
        length: tokens.
        goal: what is limited is to be at most this.
        limit: `ratio` of the least CPU times, least CPU `seconds`, or peak memory, `MiB`, beyond that of the other one.
        dtype: of weights and states.
        device: `cuda` for a row that means nothing on a CPU, else None.
        short: whether the row belongs to the short run.
        note: what binds where the goal is missed.
    """

    subject: str
    against: str | None = None
    work: str
    length: int
    goal: float
    limit: str = "ratio"
    dtype: str = "float32"
    device: str | None = None
    short: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        """Check the names; raises ConfigError."""
        if self.limit not in LIMITS:
            raise ConfigError(f"unknown limit {self.limit!r}; {did_you_mean(self.limit, LIMITS)}")
        if self.limit == "ratio" and self.against is None:
            raise ConfigError(f"a ratio needs a model to hold {self.subject!r} against.")
        self.task()  # checked when it is made

    def task(self, device: str = "cpu") -> Task:
        """Return what the models do, on that device."""
        return Task(work=self.work, length=self.length, dtype=self.dtype, device=device)

    @property
    def models(self) -> list[str]:
        """The names of the subject and of what it is held against."""
        return [self.subject] if self.against is None else [self.subject, self.against]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was measured for a row.

    Attributes:
        row: the claim.
        value: what the goal limits.
        median: of the ratios of the rounds, where that is a ratio.
        seconds: least CPU time of the subject, where time was measured.
        errors: in half precision, errors against float64 of the models of the row, root mean square and relative.
    """

    row: Row
    value: float
    median: float | None = None
    seconds: float | None = None
    errors: list[float] = field(default_factory=list)

    @property
    def met(self) -> bool:
        """Whether the goal is met, and in half precision the error within `FLOOR` times that of the other model."""
        return self.value <= self.row.goal and (not self.errors or self.errors[0] <= FLOOR * self.errors[1])


def rows_of(path: Path) -> list[Row]:
    """Read the claims of a JSON file, a list of objects with the fields of `Row`; raises ConfigError on a bad one."""
    return [Row(**fields) for fields in json.loads(path.read_text())]


def outcomes_of(path: Path) -> list[Outcome]:
    """Read back what `as_json` wrote to a file."""
    found = json.loads(path.read_text())["outcomes"]
    return [Outcome(**{**fields, "row": Row(**fields["row"])}) for fields in found]


def measure(rows: Iterable[Row], *, rounds: int, device: str = "cpu") -> Iterator[Outcome]:
    """Measure the rows on one thread, neighbours that are held against the same model in the same rounds.

    Args:
        rows: the claims; those for another device are left out.
        rounds: how often every model works, at least 1; all are warmed up once before.
        device: `cpu` or `cuda`.
    """
    rows = [row for row in rows if row.device in (None, device)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alike = itertools.groupby(rows, lambda row: (row.limit, row.against, row.task(device)))
        for (limit, against, task), group in alike:
            if limit == "MiB":
                yield from _memory(list(group), against, task)
            else:
                yield from _times(list(group), against, task, rounds=rounds)
    finally:
        torch.set_num_threads(threads)


def _memory(rows: list[Row], against: str | None, task: Task) -> Iterator[Outcome]:
    floor = 0.0 if against is None else peak(against, task)
    for row in rows:
        yield Outcome(row=row, value=peak(row.subject, task) - floor)


def _times(rows: list[Row], against: str | None, task: Task, *, rounds: int) -> Iterator[Outcome]:
    names = list(dict.fromkeys(name for row in rows for name in row.models))
    jobs = {name: job(name, task) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + 1):
        for name in names:
            times[name].append(seconds(jobs[name], task.device))
    del jobs
    errors = {name: error(name, task) for name in names} if task.dtype != "float32" else {}
    for row in rows:
        own = times[row.subject][1:]
        measured: dict[str, Any] = {"row": row, "seconds": min(own)}
        if row.limit == "seconds" or against is None:
            yield Outcome(value=min(own), **measured)
            continue
        other = times[against][1:]
        median = statistics.median(one / two for one, two in zip(own, other, strict=True))
        found = [errors[name] for name in row.models] if errors else []
        yield Outcome(value=min(own) / min(other), median=median, errors=found, **measured)


def cells(outcome: Outcome) -> list[str]:
    """Return what a table says of an outcome, under the names of `COLUMNS`."""
    row = outcome.row
    unit = LIMITS[row.limit]
    accuracy = f"{outcome.errors[0] / outcome.errors[1]:.2f}×" if outcome.errors else ""
    digits = 3 if row.limit == "ratio" else 1 if row.limit == "seconds" else 0
    work = row.work if row.dtype == "float32" else f"{row.work}, {row.dtype}"
    took = "" if outcome.seconds is None else f"{outcome.seconds:.3g} s"
    numbers = [f"{outcome.value:.{digits}f}{unit}", f"{row.goal:g}{unit}", took, accuracy]
    return [row.subject, row.against or "", work, f"{row.length:,}", *numbers]


COLUMNS = ("subject", "against", "work", "tokens", "measured", "goal", "time", "error")


def as_table(outcomes: Iterable[Outcome]) -> Table:
    """Return the outcomes as a table to print, missed goals in bold."""
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, overflow="fold")
    for outcome in outcomes:
        table.add_row(*cells(outcome), style=None if outcome.met else "bold")
    return table


def as_markdown(path: Path) -> str:
    """Return what `as_json` wrote to a file as a Markdown table, and what binds where a goal is missed."""
    head, outcomes = json.loads(path.read_text()), outcomes_of(path)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---|---|--:|--:|--:|--:|--:|"]
    missed = []
    for outcome in outcomes:
        row, shown = outcome.row, cells(outcome)
        if not outcome.met:
            shown[4] = f"**{shown[4]}**"
            reason = f"; {row.note}" if row.note else ""
            missed.append(f"- {row.subject}, {shown[2]} at {row.length:,}: {shown[4]} for {shown[5]}{reason}.")
        lines.append("| " + " | ".join(shown) + " |")
    time = "one thread's CPU time" if head["device"] == "cpu" else "time on the clock"
    met = f"{len(outcomes) - len(missed)} of {len(outcomes)} goals are met."
    stated = (
        f"torch {head['torch']}, transformers {head['transformers']}, {head['processor']}; {time}, the least of "
        f"{head['rounds']} rounds. {met}" + (" Missed, and what binds where that is known:" if missed else "")
    )
    return "\n".join([*lines, "", stated, *(["", *missed] if missed else [])])


def as_json(outcomes: Iterable[Outcome], *, rounds: int, device: str = "cpu") -> str:
    """Return the outcomes with the versions and the processor that they were measured with."""
    name = processor() if device == "cpu" else torch.cuda.get_device_name()
    head = {"torch": torch.__version__, "transformers": transformers.__version__, "processor": name, "device": device}
    found = [asdict(outcome) for outcome in outcomes]
    return json.dumps({**head, "threads": 1, "rounds": rounds, "layers": LAYERS, "outcomes": found}, indent=1)


def processor() -> str:
    """Return the kind of processor and the number of its cores."""
    return f"{platform.machine()}, {os.cpu_count()} cores"
