"""`scripts/evaluate.py` from the command line, by one process and by two."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.evaluation.models import gpt2, llama
from tests.launching import TORCHRUN

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "evaluate.py"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two saved models with tokenizers and seven texts of different lengths."""
    folder = tmp_path_factory.mktemp("evaluate")
    characters = ["Ġ", *map(chr, range(33, 127))]  # ASCII in the byte-level alphabet, where a space is written Ġ
    core = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(characters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, build in (("gpt2", gpt2), ("llama", llama)):
        build().save_pretrained(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder / name)
    for index in range(7):
        text = f"Document {index} says " + "the same thing again, " * (index + 1)
        (folder / f"{index}.txt").write_text(text, encoding="utf-8")
    return folder


def arguments(material: Path, output: Path) -> list[str]:
    """The command line that evaluates the material into `output`."""
    models_ = ["--model", f"a={material / 'gpt2'}", "--model", f"b={material / 'llama'}"]
    return [
        *models_,
        "--lengths",
        "128",
        "32",
        "--batch_size",
        "4",
        "--documents",
        str(material / "*.txt"),
        "--output",
        str(output),
    ]


def close(left: object, right: object) -> bool:
    """Whether two JSON values agree, numbers to 1e-6: batches differ where processes share the documents."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(close(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(close, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-6)
    return left == right


def run_here(monkeypatch: pytest.MonkeyPatch, command_line: list[str]) -> int:
    """Run the script's `main` in this process."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *command_line])
    status: int = runpy.run_path(str(SCRIPT))["main"]()
    return status


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert run_here(monkeypatch, arguments(material, one)) == 0
    printed = capsys.readouterr().out
    assert "none¹" in printed
    assert "no position 65" in printed

    launched = subprocess.run(
        [sys.executable, *TORCHRUN, str(SCRIPT), *arguments(material, two)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=300,
        check=False,
    )
    assert launched.returncode == 0, launched.stderr
    assert launched.stdout.count("written to") == 1  # one process prints
    first, second = (json.loads((folder / "result.json").read_text(encoding="utf-8")) for folder in (one, two))
    assert close(first, second)
    assert [curve["n_documents"] for curve in second["curves"]] == [7] * 4
    assert [curve["protocol"] for curve in second["curves"]] == ["nonoverlapping", "sliding"] * 2
    assert not (two / "partial").exists()
    assert (two / "perplexity.png").stat().st_size > 10_000


def test_errors_are_one_line_and_come_before_any_work(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result.json").write_text("{}", encoding="utf-8")
    assert run_here(monkeypatch, arguments(material, tmp_path)) == 2
    assert "already holds a result" in capsys.readouterr().err
    fresh = arguments(material, tmp_path / "fresh")
    for wrong, message in (
        (["--model", f"a={material / 'llama'}"], "Two models are called 'a'"),
        (["--protocol", "slidding"], "did you mean 'sliding'"),
        (["--protocol", "yarn"], "default stride of 'yarn'"),
        (["--bos_policy", "sometimes"], "No bos_policy 'sometimes'"),
    ):
        assert run_here(monkeypatch, [*fresh, *wrong]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "fresh").exists()


def test_what_was_measured_before_an_error_is_kept_and_used(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(material, tmp_path / "out")
    assert run_here(monkeypatch, [*command, "--model", f"c={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "no causal language model" in said
    assert "finished scores are kept" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["partial"]
    assert run_here(monkeypatch, command) == 0
    assert not (tmp_path / "out" / "partial").exists()
    assert len(json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))["curves"]) == 4
