"""A diagnosis knows where the positions of a model come from, whatever the family calls it, and says what it cannot."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hf_posenc as posenc
from hf_posenc.errors import ConfigError, UnsupportedFamilyError
from hf_posenc.evaluation.diagnosis import Diagnosis, diagnose
from hf_posenc.evaluation.position_table import rotation_report, table_report
from hf_posenc.report.diagnosis import sentences
from tests.evaluation.models import gpt2, llama, random_documents
from tests.families.models import fresh

DOCUMENTS = [[token % 60 for token in document] for document in random_documents(200, 90)]


def diagnosed(model: Any) -> Diagnosis:
    """The diagnosis of a model on few and short sequences."""
    return diagnose(model, DOCUMENTS, length=24, sequences=4)


@pytest.mark.parametrize("model_type", ["gptj", "codegen", "roformer", "gemma3_text", "modernbert", "llama"])
def test_every_stock_rotation_is_found(model_type: str) -> None:
    """In a module of its own, one for each type of layers, or in a table of sines that no config speaks of."""
    model = fresh(model_type, "eager")
    found = rotation_report(model, 64)
    assert found is not None
    theta = {"gemma3_text": 1e6, "modernbert": 160000.0}.get(model_type, 1e4)
    stated = model.config.rope_parameters if hasattr(model.config, "rope_parameters") else {}
    theta = stated.get("full_attention", stated).get("rope_theta", theta)
    pairs = len(found.wavelengths)
    expected = 2 * torch.pi * theta ** (torch.arange(pairs, dtype=torch.float64) / pairs)
    assert torch.allclose(found.wavelengths, expected, rtol=1e-5)


def test_a_table_that_grows_is_a_table() -> None:
    report = table_report(fresh("xglm", "eager"))
    assert report is not None
    assert report.fixed


@pytest.mark.parametrize(
    ("name", "turns"), [("sandwich", False), ("transformer_xl", False), ("rope", True), ("sinusoidal", True)]
)
def test_a_bias_made_of_frequencies_is_no_rotation(name: str, turns: bool) -> None:
    model = posenc.patch(llama(), posenc.encoding(name), verify=False)  # type: ignore[arg-type]
    assert (rotation_report(model, 64) is not None) is turns


@pytest.mark.parametrize("model_type", ["gpt_neo", "mpnet", "mobilebert"])
def test_attention_that_cannot_be_asked_by_itself_is_a_reason_and_no_failure(model_type: str) -> None:
    found = diagnosed(fresh(model_type, "eager"))
    assert found.terms is None
    assert "does not say by itself" in found.reasons["terms"]
    assert "\n" not in found.reasons["terms"]


def test_text_is_moved_as_far_as_a_table_goes() -> None:
    """XGLM's grows with the text, and not with the positions that are asked for."""
    found = diagnosed(fresh("xglm", "eager"))
    assert found.shift is not None
    assert 0 in found.shift.nll


def test_what_cannot_be_diagnosed_is_refused_before_any_work() -> None:
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[5, 5] = float("nan")  # type: ignore[union-attr, index, operator]
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight holds numbers that are not finite"):
        diagnosed(model)
    adapted = get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"]))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFamilyError, match="merge adapters first"):
        diagnosed(adapted)


def test_a_model_that_is_sure_and_wrong_makes_sentences_and_json() -> None:
    model = gpt2()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 1e6)  # type: ignore[union-attr, operator]
    found = diagnosed(model)
    assert any("inf times" in sentence for sentence in sentences(found))
    json.dumps(found.to_dict(), allow_nan=False)
