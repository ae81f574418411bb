"""Run the contract tests that go through transformers on every minor release of it that the package promises to take.

`make test-releases` calls it in an environment of its own, in which it installs one release after the other. Ends with
a table, and with exit status 1 where a release fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys

from packaging.requirements import Requirement
from packaging.version import Version

CONTRACTS = [f"tests/contracts/test_{name}.py" for name in ("decoding", "inputs", "native", "packing", "padding")]
"""Those that go through masks, caches, `generate` and the classes of transformers: half an hour for all releases."""
WORKERS = ["-n", "2", "--dist", "loadfile"]


def supported() -> list[str]:
    """Return the last patch of every minor release of transformers that pyproject.toml admits, oldest first."""
    requires = (Requirement(text) for text in importlib.metadata.requires("hf-posenc") or ())
    admitted = next(requirement.specifier for requirement in requires if requirement.name == "transformers")
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "transformers"], capture_output=True, text=True, check=True
    ).stdout
    versions = re.search(r"Available versions: (.*)", listed)
    if versions is None:
        raise SystemExit(f"pip lists no releases of transformers: {listed!r}")
    last: dict[tuple[int, int], Version] = {}
    for version in sorted(map(Version, versions[1].split(", "))):
        if version in admitted:
            last[version.major, version.minor] = version
    return [str(version) for version in last.values()]


def outcome(version: str, tests: list[str]) -> tuple[bool, str]:
    """Install one release and run tests on it: whether all passed, and pytest's last line or the installer's."""
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", f"transformers=={version}"]
    for command in (pip, [sys.executable, "-m", "pytest", "--no-header", "--tb=line", *WORKERS, *tests]):
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        if ran.returncode:
            return False, "\n  ".join([*failed[:5], *lines[-1:]])
    return True, lines[-1]


def main() -> None:
    """Parse the command line, try every release, print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="releases to try; every supported minor one by default")
    parser.add_argument("--tests", nargs="+", default=CONTRACTS, help="what to run on each")
    arguments = parser.parse_args()
    failed = []
    for version in arguments.versions or supported():
        passed, line = outcome(version, arguments.tests)
        print(f"transformers {version:<8} {'passed' if passed else 'FAILED'}  {line}", flush=True)
        failed += [] if passed else [version]
    if failed:
        raise SystemExit(f"failed on transformers {', '.join(failed)}")


if __name__ == "__main__":
    main()
