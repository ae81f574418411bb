"""The folder of a run: refused where it holds another one, resumable where it was killed, readable when it is done."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from hf_posenc.errors import ConfigError, OutputError, OutputExistsError

CONFIG, RESULT, PLOT, CHECKPOINTS, ADAPTER = "config.yaml", "result.json", "loss.png", "checkpoints", "adapter"


def require_free(output_dir: str | Path, told: Mapping[str, Any], *, resume: bool) -> None:
    """Check that a run may write into its folder.

    Args:
        output_dir: the folder.
        told: what the run is told, as plain data; the run to resume wrote it into `config.yaml`.
        resume: whether an unfinished run may be there.

    Raises:
        OutputExistsError: the folder holds a finished run, something else, or an unfinished run without `resume`.
        ConfigError: the unfinished run was told something else.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(f"{folder} is a file; a run needs a folder.")
    if (folder / RESULT).exists():
        raise OutputExistsError(f"{folder} already holds a result. Name another folder or delete this one.")
    if not resume and (folder / CHECKPOINTS).exists():
        raise OutputExistsError(f"{folder} holds an unfinished run. Resume it, name another folder or delete this one.")
    if (folder / "config.json").exists():
        raise OutputExistsError(f"{folder} holds a model, and a run would overwrite it. Name another folder.")
    if resume and (folder / CONFIG).exists():
        _require_same(told, yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8")))


def write_config(folder: Path, text: str) -> None:
    """Make the folder of a run, and write what the run is told into it.

    Raises:
        OutputError: that cannot be done.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{folder} cannot be written to: {error}. Name another folder.") from error


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None. A kill may leave the newest one half written."""
    found = (folder / CHECKPOINTS).glob("checkpoint-*")
    numbered = sorted((int(match[1]), path) for path in found if (match := re.search(r"-(\d+)$", path.name)))
    return next((path for _, path in reversed(numbered) if _is_complete(path)), None)


def write_result(folder: Path, record: dict[str, Any]) -> None:
    """Write `loss.png`, then `result.json`: a folder with a result is a finished run."""
    plot_loss(record["losses"], folder / PLOT)
    (folder / RESULT).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def plot_loss(losses: Sequence[Sequence[float]], path: Path) -> None:
    """Draw (step, nats per token) pairs as a curve into a PNG file."""
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.plot([step for step, _ in losses], [loss for _, loss in losses], marker=".")
    axes.set(xlabel="optimizer step", ylabel="training loss, nats per token")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _require_same(told: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    for name, now in told.items():
        then = written.get(name)
        if then != now and name != "output_dir":  # the folder may have been moved or be named another way
            raise ConfigError(f"The run to resume was started with {name} {then!r}, not {now!r}; give the same config.")


def _is_complete(checkpoint: Path) -> bool:
    """Whether the Trainer finished this checkpoint: its state is the last file it writes."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
