"""The `hf-posenc` command: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import SplinterConfig, SplinterForQuestionAnswering
from typer.testing import CliRunner

import hf_posenc as posenc
from hf_posenc import cli
from hf_posenc.quickstart import BASE
from tests.models import SUBJECTS, tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gpt2")
    SUBJECTS["gpt2"].fresh().save_pretrained(folder)
    return str(folder)


def run(*arguments: str) -> str:
    """What the command prints; an error of ours is raised, as `main` would report it."""
    result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
    return result.output


def test_inspect_says_how_far_positions_reach_and_what_would_change(checkpoint: str) -> None:
    said = run("inspect", checkpoint, "--encoding", "rope", "--options", "{theta: 500}")
    for part in ("GPT2LMHeadModel", "Embedding at wpe", "64", "transformer.h.1.attn", "RotaryGPT2Attention", "500"):
        assert part in said, said


def test_inspect_proposes_a_record_for_a_family_that_has_none(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    SplinterForQuestionAnswering(SplinterConfig(vocab_size=200, **small)).save_pretrained(tmp_path)
    said = " ".join(run("inspect", str(tmp_path)).split())
    assert "no family record" in said
    assert "position_embeddings" in said


def test_patch_saves_what_python_would_have_patched(checkpoint: str, tmp_path: Path) -> None:
    said = run("patch", checkpoint, "--encoding", "alibi", "--output", str(tmp_path / "out"))
    assert "AlibiGPT2Attention" in said
    assert "cache: off by" in said  # the certificate
    expected = posenc.patch(SUBJECTS["gpt2"].fresh(), posenc.Alibi())
    ids = tokens(1, 100)
    assert torch.equal(posenc.from_pretrained(tmp_path / "out")(input_ids=ids).logits, expected(input_ids=ids).logits)


def test_patch_leaves_a_folder_that_is_not_empty_alone(checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(posenc.errors.OutputExistsError, match="not empty"):
        run("patch", checkpoint, "--encoding", "alibi", "--output", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("encoding", "options", "said"),
    [
        ("alibbi", "{}", "'alibi'"),
        ("rope", "{thetta: 1}", "'theta'"),
        ("rope", "{theta", "YAML"),
        ("rope", "[1, 2]", "mapping"),
        ("rope", "{partial_rotary_factor: 0.125}", "even"),
    ],
)
def test_a_wrong_encoding_is_refused_before_anything_is_written(
    checkpoint: str, tmp_path: Path, encoding: str, options: str, said: str
) -> None:
    with pytest.raises(posenc.PosencError, match=said):
        run("patch", checkpoint, "--encoding", encoding, "--options", options, "--output", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_errors_are_one_line_and_exit_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["hf-posenc", "patch", BASE, "--encoding", "nopee", "--output", str(tmp_path / "o")]
    )
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: unknown encoding 'nopee'")


def test_diagnose_says_what_it_found_and_keeps_it(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (tmp_path / "text.txt").write_text(
        "To be, or not to be, that is the question: whether 'tis nobler in the mind. " * 8
    )
    size = ("--length", "24", "--sequences", "8", "--documents", str(tmp_path / "text.txt"))
    said = " ".join(run("diagnose", f"a={BASE}", f"b={BASE}", "--output", str(folder), *size).split())
    for part in (
        "learned table, 128 of them",
        "the last row was never trained",
        "moved",
        "words with words",
    ):
        assert part in said, said
    assert "…" not in said  # nothing is cut on a terminal of 80 columns
    kinds = {path.name for path in folder.iterdir()}
    assert kinds >= {"result.json", "table.txt", "a.png", "a.svg", "b.png", "comparison.png", "comparison.svg"}
    result = json.loads((folder / "result.json").read_text())
    first, second = result["diagnoses"]
    assert first | {"name": "b"} == second
    assert first["table"]["trained"] == 127
    assert set(result["versions"]) >= {"torch", "transformers"}
    with pytest.raises(posenc.errors.OutputExistsError):
        run("diagnose", BASE, "--output", str(folder))


def test_evaluate_and_finetune_reach_their_own_parsers() -> None:
    assert "--protocol" in run("evaluate", "--help")
    assert "--learning_rate" in run("finetune", "--help")


@pytest.mark.parametrize("width", [80, 200])
def test_list_can_be_read_at_any_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    said = run("list", "encodings")
    assert "…" not in said
    (alibi,) = [line.split() for line in said.splitlines() if line.startswith("alibi ")]
    assert {"bias", "relative", "distance"} <= set(alibi)
    assert ("self_bias" in alibi) == (width == 200)


def test_list_shows_both_registries() -> None:
    assert all(f"\n{name} " in run("list", "encodings") for name in posenc.encodings())
    assert all(f"\n{name} " in run("list", "families") for name in posenc.families())
    with pytest.raises(posenc.PosencError, match="did you mean 'families'"):
        run("list", "familys")
