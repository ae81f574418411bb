"""`hf-posenc retrieve`: what it writes and prints, and how it says no."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hf_posenc.errors import DataError
from hf_posenc.evaluation import RetrievalGrid
from hf_posenc.evaluation.retrieval_grid import Trial
from hf_posenc.report.retrieval import plot_retrieval, retrieval_table, write_retrieval
from hf_posenc.report.retrieval_command import main
from tests.evaluation.models import gpt2, llama
from tests.evaluation.retrievers import characters

SCRIPT = Path(__file__).parents[2] / "scripts" / "retrieve.py"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two saved models with tokenizers; one of them has a table of 300 positions."""
    folder = tmp_path_factory.mktemp("retrieve")
    for name, model in (("gpt2", gpt2(300)), ("llama", llama())):
        model.save_pretrained(folder / name)  # type: ignore[operator]
        characters().save_pretrained(folder / name)
    return folder


def command(material: Path, output: Path, *more: str) -> list[str]:
    """The command line that measures the material into `output`."""
    chosen = ["--model", f"a={material / 'gpt2'}", "--model", f"b={material / 'llama'}"]
    sizes = ["--lengths", "310", "290", "--depths", "0", "1", "--trials", "1", "--batch_size", "2"]
    return [*chosen, *sizes, "--output", str(output), *more]


def test_it_writes_a_table_a_plot_and_every_trial(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *command(material, out, "--task", "passkey", "single_needle")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("passkey", "single_needle", "most probable", "25% by chance", "no position 301", "written to"):
        assert part in printed
    assert sorted(path.name for path in out.iterdir()) == ["result.json", "retrieval.png", "retrieval.svg", "table.txt"]
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    grids = [RetrievalGrid.from_dict(item) for item in result["retrieval"]]
    assert [(grid.name, grid.task) for grid in grids] == [
        (name, task) for name in "ab" for task in ("passkey", "single_needle")
    ]
    assert [len(grid.trials) for grid in grids] == [2, 2, 4, 4]
    assert result["seed"] == 0


def test_errors_are_one_line_and_come_before_any_model_is_loaded(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result.json").write_text("{}", encoding="utf-8")
    assert main(command(material, tmp_path)) == 2
    assert "already holds a result" in capsys.readouterr().err
    for wrong, message in (
        (["--task", "haystack"], "No retrieval task 'haystack'"),
        (["--depths", "2"], "depths must be numbers from 0"),
        (["--trials", "0"], "trials must be"),
        (["--model", f"a={tmp_path}"], "Two models are called 'a'"),
        (["--documents", str(tmp_path / "none")], "none"),
    ):
        assert main(command(material, tmp_path / "fresh", *wrong)) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
    assert not (tmp_path / "fresh").exists()


def test_what_was_not_measured_alike_does_not_stand_side_by_side(tmp_path: Path) -> None:
    trial = Trial(length=8, depth=0.5, place=0, expected=("1",), answer="1", found=1.0, nll=0.1, margin=2.0)
    grid = RetrievalGrid(
        name="a", task="passkey", lengths=(8, 16), depths=(0.5,), trials=(trial,), refused={16: "no"}, n_others=3,
        digits=5, seed=0, text_hash=None, trained_length=8, model_hash=None, dtype="float32", versions={},
    )  # fmt: skip
    with pytest.raises(DataError, match="no results"):
        retrieval_table([])
    with pytest.raises(DataError, match="a name of its own"):
        retrieval_table([grid, grid])
    with pytest.raises(DataError, match="differ in seed"):
        retrieval_table([grid, replace(grid, name="b", seed=1)])
    plots = plot_retrieval([grid, replace(grid, task="common_words", depths=(), trials=())], tmp_path / "p")
    assert ">none<" in plots[1].read_text(encoding="utf-8")
    assert write_retrieval([grid], tmp_path / "out") == tmp_path / "out"
    assert "100%" in (tmp_path / "out" / "table.txt").read_text(encoding="utf-8")
