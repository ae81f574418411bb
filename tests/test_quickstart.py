"""The main job, end to end, in small: two steps a model, two short documents, lengths to four times the trained one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

import hf_posenc as posenc
from hf_posenc import data, quickstart

LENGTHS = (128, 256, 512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = data.embedded_corpus()[::6]  # tokenising all of it, for each model again, takes longer than all the rest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "embedded_corpus", lambda: corpus)
        patch.setattr(quickstart, "LENGTHS", LENGTHS)
        patch.setattr(quickstart, "CHARACTERS", 4000)
        patch.setattr(quickstart, "VARIANTS", [item for item in quickstart.VARIANTS if item.label != "NoPE"])
        return quickstart.quickstart(tmp_path_factory.mktemp("run") / "out", steps=2, documents=2)


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, object]:
    return json.loads((folder / "result.json").read_text())  # type: ignore[no-any-return]


def test_the_folder_holds_table_plot_card_result_and_models(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.yaml",
        "curves.csv",
        "curves.jsonl",
        "exported",
        "index.html",
        "models",
        "perplexity.png",
        "perplexity.svg",
        "result.json",
        "table.txt",
    }
    assert {path.name for path in (folder / "models").iterdir()} == {"original", "rope", "alibi"}
    assert (folder / "perplexity.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_only_the_original_stops_at_the_trained_length_and_says_why(
    result: dict[str, list[dict[str, dict[str, str]]]],
) -> None:
    refused = {curve["name"]: curve["refused"] for curve in result["curves"]}  # in both protocols
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
    curves = [posenc.LengthCurve.from_dict(curve) for curve in result["curves"]]
    after = {curve.name: curve.ppl[128] for curve in curves if curve.protocol == "nonoverlapping"}
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


def test_both_protocols_are_measured_side_by_side(result: dict[str, list[dict[str, str]]]) -> None:
    shown: dict[str, list[str]] = {}
    for curve in result["curves"]:
        shown.setdefault(curve["name"], []).append(curve["protocol"])
    assert len(shown) == 6
    assert set(map(tuple, shown.values())) == {("nonoverlapping", "sliding")}


def test_what_a_stock_architecture_computes_is_exported_with_a_card(folder: Path, result: dict[str, object]) -> None:
    assert {path.name for path in (folder / "exported").iterdir()} == {"rope"}
    runs: dict[str, dict[str, str]] = result["runs"]  # type: ignore[assignment]
    assert runs["RoPE"]["export"] == "as starcoder2"
    assert runs["ALiBi"]["export"].startswith("none: no stock architecture computes")
    for place in (folder / "exported" / "rope", folder / "models" / "alibi"):
        card = ModelCard.load(place / "README.md")
        stored = json.loads((place / "result.json").read_text())
        assert {curve["protocol"] for curve in stored["curves"]} == {"nonoverlapping", "sliding"}
        assert card.data.model_name == f"tiny-gpt2-{place.name}"
        assert "- `sliding`: windows sliding by 64 to 256 tokens;" in card.text
        assert (place / "perplexity.png").exists()


def test_the_saved_models_are_what_was_measured(folder: Path) -> None:
    model = posenc.from_pretrained(folder / "models" / "alibi")
    assert type(model).__name__ == "PosencGPT2LMHeadModel"
    assert model.config.posenc["name"] == "alibi"


def test_a_folder_with_a_result_is_left_alone(folder: Path) -> None:
    with pytest.raises(posenc.errors.OutputExistsError):
        quickstart.quickstart(folder)
