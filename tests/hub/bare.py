"""An interpreter that has torch and transformers, and not this package: what somebody has who downloads a model."""

from __future__ import annotations

import functools
import os
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest


@functools.cache
def bare_python() -> Path:
    """An interpreter of its own, which sees the libraries of this one, but not what is installed here by reference."""
    folder = Path(tempfile.mkdtemp(prefix="bare-"))
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # references in .pth files, such as the one to a source tree, are followed in a site folder only, not in this one
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = subprocess.run(
        [python, "-I", "-c", "import importlib.util as u; print(u.find_spec('hf_posenc') is None)"],
        capture_output=True,
        text=True,
        check=True,
    )
    if found.stdout.strip() != "True":
        pytest.skip("this package was copied among the libraries, so no interpreter is without it")
    return python


def run_bare(
    code: str, arguments: Iterable[object], modules: Path, environment: Mapping[str, str] | None = None
) -> list[str]:
    """The lines that `code` prints there; `modules` is where transformers keeps the code that it runs."""
    done = subprocess.run(
        [bare_python(), "-I", "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HF_MODULES_CACHE": str(modules), **(environment or {})},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
