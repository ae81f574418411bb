"""`hf-posenc evaluate` by position and on key tokens: what it writes and prints, and how it says no."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_posenc.errors import ConfigError, DataError
from hf_posenc.evaluation import (
    KeyTokenPerplexity,
    PositionCurve,
    key_token_perplexity,
    perplexity_by_position,
)
from hf_posenc.evaluation.checkpoints import Measured
from hf_posenc.evaluation.position import log_bins
from hf_posenc.report.command import main
from hf_posenc.report.first_windows import _by_octave, _octaves, positions_text
from hf_posenc.report.launching import named_paths
from tests.evaluation.models import gpt2, llama
from tests.evaluation.retrievers import characters

TEXTS = ["Never did a text repeat itself so little as this one; " * 3, "Another text, and again it goes on: " * 4]
WINDOW = 96


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models whose tokens are characters, one of them with a table of 64 positions, and two texts."""
    folder = tmp_path_factory.mktemp("windows")
    models: Any = {"gpt2": gpt2(64), "llama": llama()}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        characters().save_pretrained(folder / name)
    for index, text in enumerate(TEXTS):
        (folder / f"{index}.txt").write_text(text, encoding="utf-8")
    return folder


def command(material: Path, output: Path, *more: str) -> list[str]:
    """The command line that measures the material into `output`."""
    models = ["--model", f"short={material / 'gpt2'}", "--model", f"long={material / 'llama'}"]
    return [*models, "--documents", str(material / "*.txt"), "--output", str(output), *more]


def loaded(material: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(material / "llama")


def test_loss_by_position_is_written_as_python_measures_it(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(command(material, out, "--protocol", "by_position", "--lengths", str(WINDOW))) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "short: length=96: no position 65" in printed  # the others are measured all the same
    assert sorted(path.name for path in out.iterdir()) == ["positions.png", "positions.svg", "result.json", "table.txt"]
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    (curve,) = map(PositionCurve.from_dict, result["positions"])
    expected = perplexity_by_position(loaded(material), TEXTS, WINDOW, tokenizer=characters(), name="long")
    assert curve.nll == pytest.approx(expected.nll, rel=1e-6)
    assert (curve.name, curve.n_documents, curve.tokenizer) == ("long", 2, "llama")
    assert result["corpus"]["documents"] == 2
    bins = [(nll, b - a) for nll, (a, b) in zip(expected.nll, pairwise(expected.edges), strict=True) if a >= 64]
    assert f"│ 65 to 96 │ {sum(nll * wide for nll, wide in bins) / 32:.3f} │" in printed


@given(st.integers(1, 3000))
def test_doublings_are_made_of_whole_bins(length: int) -> None:
    edges = log_bins(length)
    losses = [float(at % 7) for at in range(len(edges) - 1)]
    octaves = _octaves(length)
    assert {first for first, _ in octaves} | {length} <= set(edges)
    curve: Any = type("Curve", (), {"edges": edges, "nll": losses})
    total = sum(nll * (b - a) for nll, (a, b) in zip(losses, pairwise(edges), strict=True))
    found = zip(_by_octave(curve, octaves), octaves, strict=True)
    assert sum(mean * (last - first) for mean, (first, last) in found) == pytest.approx(total)


def test_a_model_without_a_name_has_that_of_its_folder(material: Path) -> None:
    path = str(material / "llama")
    assert named_paths([path, "mine=x", "owner/name"]) == {"llama": path, "mine": "x", "owner/name": "owner/name"}
    with pytest.raises(ConfigError, match="Two models are called 'llama'"):
        named_paths([path, f"llama={path}"])


def test_key_tokens_are_written_and_say_which_variant_they_are(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = ("--protocol", "key_tokens", "--lengths", "60", str(WINDOW))
    assert main(command(material, tmp_path / "own", *shared)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("LongPPL variant: short context 7 by 1, keys chosen by the model itself", "give all of them one"):
        assert part in printed
    assert "short: length=96: no position 65" in printed
    results = json.loads((tmp_path / "own" / "result.json").read_text(encoding="utf-8"))["key_tokens"]
    found = [KeyTokenPerplexity.from_dict(item) for item in results]
    assert [(item.name, item.length) for item in found] == [("short", 60), ("long", 60), ("long", 96)]
    expected = key_token_perplexity(loaded(material), TEXTS, 60, tokenizer=characters())
    assert found[1].n_keys == expected.n_keys
    assert found[1].key_nll_sum == pytest.approx(expected.key_nll_sum, rel=1e-5)

    judged = ("--evaluator", str(material / "llama"), "--stride", "3", "--bos_policy", "prepend")
    assert main(command(material, tmp_path / "judged", *shared, *judged)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "key tokens chosen by llama" in printed
    assert "chosen by the model itself" not in printed
    results = json.loads((tmp_path / "judged" / "result.json").read_text(encoding="utf-8"))["key_tokens"]
    assert results[0]["n_keys"] == results[1]["n_keys"]  # the same tokens for both models
    assert {item["stride"] for item in results} == {3}


def test_what_cannot_be_measured_is_one_line(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, message in (
        (["--protocol", "by_position", "--lengths", "16", "32"], "takes the length of one window"),
        (["--protocol", "by_position", "--lengths", "16", "--stride", "4"], "no stride"),
        (["--protocol", "sliding", "key_tokens", "--lengths", "16"], "as the only protocol"),
        (["--protocol", "sliding", "--lengths", "16", "--evaluator", "x"], "--evaluator means nothing without"),
        (["--protocol", "pseudo", "--lengths", "16", "--bos_policy", "none"], "bos_policy means nothing"),
        (["--protocol", "key_tokens", "--lengths", "4000"], "No document has 4001 tokens"),
    ):
        assert main(command(material, tmp_path / "out", *more)) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("error:") == 1
        assert "Traceback" not in said
    only = [
        "--model",
        f"m={material / 'gpt2'}",
        "--documents",
        str(material / "*.txt"),
        "--output",
        str(tmp_path / "o"),
    ]
    assert main([*only, "--protocol", "by_position", "--lengths", "96"]) == 2
    assert "m: length=96: no position 65" in capsys.readouterr().err
    with pytest.raises(DataError, match="no results"):
        positions_text(Measured([]))
