"""The command and the script: one line a stage, one line an error, and the same weights on two processes."""

from __future__ import annotations

import argparse as sample
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_posenc.conversion.convert_command import main
from hf_posenc.quickstart import BASE
from tests.launching import TORCHRUN

ROOT = Path(__file__).parents[2]


def arguments(folder: Path, *, batch_size: int) -> list[str]:
    text = Path(str(sample.__file__)).read_text(encoding="utf-8")
    (folder / "text.txt").write_text(text[:40_000], encoding="utf-8")
    (folder / "recipe.yaml").write_text(f"tokens: 512\nbatch_size: {batch_size}\ncalibrate: {{rows: 4}}\n", "utf-8")
    asked = {"model": BASE, "encoding": "t5", "encoding_options": "{per_layer: true}", "length": 32}
    asked |= {"documents": folder / "text.txt", "recipe": folder / "recipe.yaml"}
    return [part for name, value in asked.items() for part in (f"--{name}", str(value))]


def test_the_command_converts_and_says_what_every_stage_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*arguments(tmp_path, batch_size=4), "--output_dir", str(tmp_path / "run")]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert [f"{stage} " in said for stage in ("replace", "absorb", "calibrate", "distill")] == [True] * 4
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert (result["tokens_seen"], result["steps"], result["length"]) == (512, 4, 32)
    assert main(asked) == 2
    assert "already holds a result" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--encoding_options", "7"], "must be a mapping"),
        (["--encoding", "alibbi"], "did you mean 'alibi'"),
        (["--recipe", "nowhere.yaml"], "There is no config file"),
        (["--model", "/nowhere"], "does not load"),
        (["--tokens", "-1"], "Recipe.tokens"),
    ],
)
def test_a_wrong_flag_is_one_line(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(tmp_path, batch_size=4), "--output_dir", str(tmp_path / "run"), *flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # behind transformers' bars
    assert error.startswith("error: ")
    assert said in error


@pytest.mark.slow
def test_two_processes_give_what_one_gives_with_the_doubled_batch(tmp_path: Path) -> None:
    weights = []
    for name, batch_size, launcher in (("one", 4, ()), ("two", 2, TORCHRUN)):
        asked = [*arguments(tmp_path, batch_size=batch_size), "--output_dir", str(tmp_path / name)]
        line = [sys.executable, *launcher, str(ROOT / "scripts" / "convert.py"), *asked]
        subprocess.run(line, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=500)
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    one, two = weights
    # what is added to every key changes no probability: its gradient is rounding, of which Adam makes whole steps
    for name in [name for name in one if name.endswith("c_attn.bias")]:
        one[name], two[name] = (torch.cat([given[name][:128], given[name][256:]]) for given in weights)
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4
    result = json.loads((tmp_path / "two" / "result.json").read_text(encoding="utf-8"))
    assert (result["processes"], result["tokens_seen"]) == (2, 512)
    assert torch.isfinite(one["transformer.wte.weight"]).all()
