"""The main job, end to end, in small: two steps a model, two documents, lengths up to four times the trained one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

import hf_posenc as posenc
from hf_posenc import quickstart

LENGTHS = (128, 256, 512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "LENGTHS", LENGTHS)
        return quickstart.quickstart(tmp_path_factory.mktemp("run") / "out", steps=2, documents=2)


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, object]:
    return json.loads((folder / "result.json").read_text())  # type: ignore[no-any-return]


def test_the_folder_holds_table_plot_card_result_and_models(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.yaml",
        "models",
        "perplexity.png",
        "result.json",
        "table.txt",
    }
    assert {path.name for path in (folder / "models").iterdir()} == {"original", "nope", "rope", "alibi"}
    assert (folder / "perplexity.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_only_the_original_stops_at_the_trained_length_and_says_why(
    result: dict[str, list[dict[str, dict[str, str]]]],
) -> None:
    refused = {curve["name"]: curve["refused"] for curve in result["curves"]}
    assert set(refused.pop("original")) == {"256", "512"}
    assert not any(refused.values())
    table = result["curves"][0]["refused"]["256"]
    assert "no position 129" in table


def test_every_model_is_measured_on_the_same_targets(result: dict[str, list[dict[str, dict[str, int]]]]) -> None:
    counts = {tuple(curve["n_tokens"].values()) for curve in result["curves"]}
    assert {count for counted in counts for count in counted} == {result["curves"][0]["n_tokens"]["128"]}


def test_the_trained_length_of_an_extended_table_is_the_one_it_was_trained_for(
    result: dict[str, list[dict[str, int]]],
) -> None:
    assert {curve["trained_length"] for curve in result["curves"]} == {128}


def test_recovery_compares_models_trained_on_the_same_tokens(result: dict[str, list[dict[str, float]]]) -> None:
    after = {curve["name"]: posenc.LengthCurve.from_dict(curve).ppl[128] for curve in result["curves"]}
    for row in result["recovery"]:
        assert row["after"] == pytest.approx(after[row["name"]])
        assert row["ratio"] == pytest.approx(after[row["name"]] / after["original"])
        assert row["before"] != row["after"]


def test_the_card_is_valid_and_made_of_the_result(folder: Path) -> None:
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "apache-2.0"
    yaml.safe_load(card.data.to_yaml())
    values = {entry.metric_value for entry in card.data.eval_results}
    curves = [
        posenc.LengthCurve.from_dict(curve) for curve in json.loads((folder / "result.json").read_text())["curves"]
    ]
    assert {round(curve.ppl[128], 4) for curve in curves} <= values


def test_the_saved_models_are_what_was_measured(folder: Path) -> None:
    model = posenc.from_pretrained(folder / "models" / "alibi")
    assert type(model).__name__ == "PosencGPT2LMHeadModel"
    assert model.config.posenc["name"] == "alibi"


def test_a_folder_with_a_result_is_left_alone(folder: Path) -> None:
    with pytest.raises(posenc.errors.OutputExistsError):
        quickstart.quickstart(folder)
