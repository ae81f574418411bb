"""transformers' own `ModelTesterMixin`: a patched class fails no test of it that the stock class passes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import transformers

from tests.checkpoints import cache_folder

pytestmark = pytest.mark.slow
# tests that a patched model is not meant to pass, and why
DIFFERENT = {
    f"test_model_rope_scaling_from_config_{case}": "rope_parameters describe the rotation that was replaced"
    for case in ("0_linear", "1_dynamic", "2_yarn")
} | {"test_model_rope_scaling_frequencies": "there is no rotary module left to test"}
STAND_INS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "distributed_testing_utils.py": "def run_distributed(*args, **kwargs):\n    raise NotImplementedError\n",
}


@pytest.fixture(scope="module")
def mixin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tests that the installed release of transformers ships in its source distribution."""
    pytest.importorskip("parameterized", reason="transformers' own tests need the package 'parameterized'")
    version = transformers.__version__
    archive = cache_folder() / f"transformers-{version}.tar.gz"
    if not archive.exists():
        options = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-qq", "-d", str(cache_folder()))
        pip = [sys.executable, "-m", "pip", "download", *options, f"transformers=={version}"]
        if subprocess.run(pip, capture_output=True).returncode:
            pytest.skip(f"the source distribution of transformers {version} cannot be fetched")
    folder = tmp_path_factory.mktemp("mixin")
    with tarfile.open(archive) as packed:
        inside = f"transformers-{version}/"
        members = [member for member in packed if member.name.startswith(f"{inside}tests/")]
        packed.extractall(folder, members=members, filter="data")
    tests = folder / inside / "tests"
    for path, text in STAND_INS.items():
        (tests / path).parent.mkdir(exist_ok=True)
        (tests / path).write_text(text)
    shutil.copy(Path(__file__).with_name("model_tester_subject.py"), tests / "test_subject.py")
    for package in (tests, tests / "exporters", tests / "generation"):
        (package / "__init__.py").touch()
    return tests.parent


def outcomes(mixin: Path, **environment: str) -> dict[str, str]:
    """Run the mixin on one subject: name of a test -> passed, skipped or failed."""
    report = mixin / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "--tb=short", "-p", "no:cacheprovider"]
    package = str(Path(__file__).parents[2])
    ran = subprocess.run(
        [*command, "tests/test_subject.py"],
        cwd=mixin,
        env={**os.environ, **environment, "PYTHONPATH": package},
        capture_output=True,
        text=True,
    )
    (mixin / "_".join(["log", *environment.values()])).write_text(ran.stdout + ran.stderr)
    assert report.exists(), ran.stdout + ran.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        found[case.attrib["name"]] = "failed" if kinds & {"failure", "error"} else "skipped" if kinds else "passed"
    report.unlink()
    return found


@pytest.fixture(scope="module", params=["GPT2", "Llama"])
def stock(request: pytest.FixtureRequest, mixin: Path) -> tuple[str, dict[str, str]]:
    """Return a family and what its stock classes make of the mixin."""
    found = outcomes(mixin, FAMILY=request.param)
    assert sum(outcome == "passed" for outcome in found.values()) > 60, found
    return request.param, found


@pytest.mark.parametrize("encoding", ["rope", "alibi"])
def test_a_patched_class_fails_no_test_that_the_stock_class_passes(
    encoding: str, stock: tuple[str, dict[str, str]], mixin: Path
) -> None:
    family, expected = stock
    found = outcomes(mixin, FAMILY=family, POSENC=encoding)
    assert found.keys() == expected.keys()
    worse = {name: found[name] for name, outcome in expected.items() if outcome == "passed" != found[name]}
    assert worse.keys() <= DIFFERENT.keys(), worse
