"""Where a result comes from: versions, machine, source revision. A number without these does not exist."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "peft")


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of the libraries that decide what a run computes."""
    import hf_posenc  # when called: the package's front page may import this module

    found = {"python": platform.python_version(), "hf_posenc": hf_posenc.__version__}
    return found | {name: _version(name) for name in _PACKAGES}


def git_state() -> dict[str, str | bool] | None:
    """Return `revision` and `dirty` of the repository that this package runs from; None outside one."""
    folder = Path(__file__).resolve().parent
    revision = _git(folder, "rev-parse", "HEAD")
    # An installed copy can lie inside somebody else's repository: only tracked source has a revision of its own.
    if revision is None or _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": bool(changes)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(("git", *arguments), cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
