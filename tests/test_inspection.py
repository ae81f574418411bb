"""What `inspect` says, on models whose answer is known."""

from __future__ import annotations

import pytest
from torch import nn

import hf_posenc as posenc
from hf_posenc.errors import UnsupportedFamilyError
from hf_posenc.evaluation.packing import TOLERATED, packing_leak
from hf_posenc.inspection import inspection
from tests.models import SUBJECTS
from tests.test_cli import run


@pytest.mark.parametrize(
    ("name", "safe"),
    [("gpt2", True), ("llama", True), ("gpt_neox", True), ("opt", False), ("bert-decoder", False), ("roberta", False)],
)
def test_packing_is_safe_exactly_where_the_mask_is_built_from_positions(name: str, safe: bool) -> None:
    assert (packing_leak(SUBJECTS[name].fresh()) <= TOLERATED) is safe


def test_a_model_without_positions_to_give_cannot_pack() -> None:
    from transformers import BloomConfig, BloomModel

    with pytest.raises(UnsupportedFamilyError, match="position_ids"):
        packing_leak(BloomModel(BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)))


def test_inspection_names_what_a_plan_accepts_and_where_a_table_ends() -> None:
    model = SUBJECTS["bert"].fresh()
    table = model.bert.embeddings.position_embeddings.weight.data
    nn.init.normal_(table, std=model.config.initializer_range)
    table[:40] *= 4
    said = inspection(model)
    assert said["trained rows"] == "up to position 40"
    assert said["last position"] == "64"
    taken = said["can take"].split(", ")
    assert {"rope", "alibi"} <= set(taken)
    assert not {"nope", "cable", "layered"} & set(taken)  # causal only, or nothing without others
    assert "rope: jina_embeddings_v3" in said["then exports as"]
    assert "nope" not in said["then exports as"]  # which an encoder would export, and cannot take
    assert "good on text" not in said
    posenc.patch(model, posenc.RoPE())
    assert "unpatch" in inspection(model)["can take"]
    assert "trained rows" not in inspection(model)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("gpt2", "llama") else pytest.mark.slow) for name in SUBJECTS]
)
def test_every_kind_of_model_can_be_inspected(name: str) -> None:
    said = inspection(SUBJECTS[name].fresh())
    assert list(said)[:4] == ["class", "model type", "encoding", "attention"]
    assert said["attention"].startswith("2 times")


def test_the_command_tries_positions_on_text() -> None:
    from hf_posenc.quickstart import BASE

    said = " ".join(run("inspect", BASE).split())
    assert "trained rows up to position 127" in said
    assert "good on text up to position 128" in said
