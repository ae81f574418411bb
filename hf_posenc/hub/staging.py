"""What of a folder is published, and the folder that holds just that."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hf_posenc.errors import CheckpointError
from hf_posenc.report import PLOT_NAME, RESULT_NAME

PUBLISHED = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "modeling_posenc.py",
    "posenc_[0-9a-f]*_*.py",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template.jinja",
    "loss.png",
    RESULT_NAME,
    PLOT_NAME,
)
"""What is published of a folder; checkpoints, logs and whatever else lies there stay where they are."""
LARGEST = 50 * 2**30
"""Bytes that the Hub takes as one file."""


def files_of(folder: Path) -> list[Path]:
    """Return the files to publish; raises CheckpointError where these are no model that somebody could load."""
    found = [path for path in sorted(folder.glob("*")) if any(PurePosixPath(path.name).match(p) for p in PUBLISHED)]
    names = {path.name for path in found}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise CheckpointError(f"{folder} is no saved model: it needs a config.json and weights as safetensors.")
    index = folder / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.exists() else set()
    if not shards <= names:
        raise CheckpointError(f"{folder} lacks {sorted(shards - names)[0]}, which its index names.")
    for path in found:
        if path.stat().st_size > LARGEST:
            raise CheckpointError(
                f"{path} has {path.stat().st_size:,} bytes and the Hub takes {LARGEST:,} as one file."
            )
        if path.suffix == ".safetensors":
            _require_whole(path)
    return found


def _require_whole(path: Path) -> None:
    """Raise CheckpointError where a safetensors file does not end where its header says."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, path.stat().st_size)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from error
    expected = 8 + length + max(ends, default=0)
    if expected != path.stat().st_size:
        raise CheckpointError(
            f"{path} has {path.stat().st_size:,} bytes where its header says {expected:,}; it is cut."
        )


def result_of(folder: Path, curves: str | Path | None) -> dict[str, Any]:
    """Return what the run noted, with the curves of an evaluation where there is one."""
    found: dict[str, Any] = {}
    extra = [] if curves is None else [Path(curves) / RESULT_NAME if Path(curves).is_dir() else Path(curves)]
    for path in (folder / RESULT_NAME, *extra):
        if path.exists() or path in extra:
            try:
                found |= json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path} is no result: {error}") from error
    run = found.get("config")
    if run:  # folders of this machine mean nothing elsewhere
        names = {key: run[key] for key in ("model", "output_dir") if key in run}
        names = {key: value if hub_name(value) else Path(value).name for key, value in names.items()}
        found["config"] = {**run, **names}
    return found


def hub_name(name: object) -> str | None:
    """Return `name` where it is one of a model on the Hub, and not a folder."""
    is_name = isinstance(name, str) and name.count("/") <= 1 and not name.startswith((".", "/")) and "\\" not in name
    return str(name) if is_name and "/" in str(name) and not Path(str(name)).exists() else None


def stage(source: Path, files: list[Path], stage: Path, result: Mapping[str, Any], curves: str | Path | None) -> None:
    """Fill a folder with what goes up; weights are linked where the disk allows it."""
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    for path in files:
        try:
            (stage / path.name).hardlink_to(path)
        except OSError:
            shutil.copyfile(path, stage / path.name)
    if result:
        (stage / RESULT_NAME).unlink(missing_ok=True)  # a link: writing would change the original
        (stage / RESULT_NAME).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot = None if curves is None else (Path(curves) if Path(curves).is_dir() else Path(curves).parent) / PLOT_NAME
    if plot is not None and plot.exists():
        shutil.copyfile(plot, stage / PLOT_NAME)
