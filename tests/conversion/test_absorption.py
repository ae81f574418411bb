"""What all rows of a table share lives on in the token embedding, and the model says what it said."""

from __future__ import annotations

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.conversion.absorption import absorb, can_absorb, position_rows
from hf_posenc.conversion.training import original_of
from hf_posenc.length import table_rows, table_start
from tests.conversion.small_models import LENGTH, gpt2, ids
from tests.families.models import FAMILIES, MODEL_TYPES, fresh

ELSEWHERE = {"biogpt", "mobilebert", "roc_bert", "xglm"}
"""Types whose table is added to words that were scaled, projected or mixed with something."""
QUICK = ("opt", "roberta", "roc_bert")
WITH_A_TABLE = [name for name in MODEL_TYPES if FAMILIES[name].table]


@pytest.mark.parametrize("tied", [True, False])
def test_an_absorbed_constant_is_a_table_of_equal_rows(tied: bool) -> None:
    model = gpt2(tie_word_embeddings=tied)
    constant = torch.randn(16)
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(constant.expand(LENGTH, -1))
        wanted = model(ids()).logits.log_softmax(-1)
    original = original_of(model, shared=True)
    posenc.patch(model, posenc.NoPE(), verify=False)
    absorb(model, constant)
    with torch.no_grad():
        assert torch.allclose(model(ids()).logits.log_softmax(-1), wanted, atol=1e-5)
        assert torch.equal(original(ids()).logits.log_softmax(-1), wanted)
    assert (model.lm_head.weight is model.transformer.wte.weight) is tied


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in WITH_A_TABLE]
)
def test_every_word_of_every_type_is_as_likely_as_before(model_type: str) -> None:
    """The padding token too, which masked models with a tied head can guess."""
    model = fresh(model_type, "eager")
    family, encoding = FAMILIES[model_type], posenc.encoding("t5")
    plan = posenc.plan(model, encoding)
    assert can_absorb(model, plan) is (model_type not in ELSEWHERE)
    rows = position_rows(model)
    if rows is None:
        return
    constant = 0.3 * torch.randn(rows.shape[1])
    table = table_rows(plan.body_of(model).get_submodule(family.table or ""))
    with torch.no_grad():
        table[table_start(family, model.config) :] = constant
        for name, weight in model.named_parameters():
            if "relative_attention_bias" in name:  # MPNet has a bias beside its table, which goes too
                weight.zero_()
        wanted = model(ids() % 40 + 5).logits.log_softmax(-1)
        posenc.patch(model, encoding, verify=False)
        absorb(model, constant)
        assert torch.allclose(model(ids() % 40 + 5).logits.log_softmax(-1), wanted, atol=1e-4)
