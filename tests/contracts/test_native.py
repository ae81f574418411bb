"""A rotary model patched by transformers' own means is the model that transformers builds from the same parameters."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.errors import ConfigError
from tests.models import SUBJECTS, TRAINED, VARIANTS, assert_same, largest, logits, tokens

ALL = {**SUBJECTS, **VARIANTS}
ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "beta_fast": 20.0, "truncate": False, ORIGINAL: 32},
    LLAMA3,
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("theta", [None, 500.0])
@pytest.mark.parametrize("subject", ["llama", "llama-wide-head", "llama-base", "gpt_neox"])
def test_the_same_as_a_fresh_model(subject: str, theta: float | None, scaling: dict[str, Any]) -> None:
    model = ALL[subject].fresh()
    before = logits(model, tokens(2, 100))
    encoding = posenc.RoPE(theta=theta, scaling=scaling)
    assert posenc.plan(model, encoding).route == "native"
    posenc.patch(model, encoding)
    parameters = {"rope_theta": theta or 10000.0, **scaling}
    if scaling["rope_type"] in ("yarn", "llama3"):
        parameters.setdefault(ORIGINAL, TRAINED)
    if subject == "gpt_neox":
        parameters["partial_rotary_factor"] = 0.5
    fresh = ALL[subject].fresh(rope_parameters=parameters)
    assert_same(logits(model, tokens(2, 100)), logits(fresh, tokens(2, 100)))
    assert {key: model.config.rope_parameters[key] for key in parameters} == parameters
    changed = theta is not None or scaling["rope_type"] != "default"
    assert (largest(logits(model, tokens(2, 100)) - before) > 1e-3) is changed
    posenc.unpatch(model)
    assert torch.equal(logits(model, tokens(2, 100)), before)


@pytest.mark.parametrize("subject", ["llama", "gpt_neox"])
def test_static_ntk_is_a_theta_of_its_own(subject: str) -> None:
    model = posenc.patch(ALL[subject].fresh(), posenc.RoPE(scaling={"rope_type": "ntk", "factor": 4.0}))
    dim = 8 if subject == "llama" else 4
    plain = {"rope_type": "default", "rope_theta": 10000.0 * 4.0 ** (dim / (dim - 2))}
    if subject == "gpt_neox":
        plain["partial_rotary_factor"] = 0.5
    assert_same(logits(model, tokens(2, 100)), logits(ALL[subject].fresh(rope_parameters=plain), tokens(2, 100)))


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_nothing_asked_leaves_the_scaling_of_the_model(spelling: str) -> None:
    own = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    model = ALL["llama"].fresh(rope_parameters=own)
    before = logits(model, tokens(2, 100))
    posenc.patch(model, posenc.RoPE(theta=500.0))
    assert torch.equal(logits(model, tokens(2, 100)), before)
    posenc.unpatch(model)
    posenc.patch(model, posenc.RoPE(scaling={spelling: "linear", "factor": 4.0}))
    assert torch.equal(logits(model, tokens(2, 100)), before)


@pytest.mark.parametrize("subject", ["llama", "gpt_neox"])
def test_dynamic_agrees_with_transformers_where_transformers_agrees_with_itself(subject: str) -> None:
    """In one layer and one call, the last token sees the base of the whole length in both."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, ORIGINAL: TRAINED}
    partial = {"partial_rotary_factor": 0.5} if subject == "gpt_neox" else {}
    model = posenc.patch(ALL[subject].fresh(num_hidden_layers=1), posenc.RoPE(theta=500.0, scaling=scaling))
    assert posenc.verify(model).plan.route == "interposer"
    for length in (2 * TRAINED, TRAINED + 1, TRAINED, TRAINED - 1):
        ids = tokens(2, length)
        # a fresh one each time: transformers' module remembers the longest text it has seen
        stock = ALL[subject].fresh(num_hidden_layers=1, rope_parameters={**scaling, **partial, "rope_theta": 500.0})
        theirs, ours = logits(stock, ids), logits(model, ids)
        assert_same(ours[:, -1], theirs[:, -1])
        if length <= TRAINED:
            assert_same(ours, theirs)


def test_a_head_too_narrow_for_ntk_is_refused_before_anything_changes() -> None:
    model = ALL["llama"].fresh(head_dim=2)
    with pytest.raises(ConfigError, match="rotary width above 2"):
        posenc.patch(model, posenc.RoPE(scaling={"rope_type": "ntk", "factor": 2.0}))
    assert not posenc.is_patched(model)


def test_dynamic_is_native_only_as_transformers_computes_it() -> None:
    """By default every query keeps its own base, which transformers has no parameters for."""
    own, compatible = ({"rope_type": "dynamic", "factor": 2.0, "mode": mode} for mode in ("consistent", "hf_compat"))
    model = posenc.patch(SUBJECTS["llama"].fresh(), posenc.RoPE(scaling=own))
    assert type(model).__name__ == "PosencLlamaForCausalLM"
    model = posenc.patch(SUBJECTS["llama"].fresh(), posenc.RoPE(scaling=compatible))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.rope_parameters == {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert model.config.max_position_embeddings == TRAINED
    stock = SUBJECTS["llama"].fresh(rope_parameters=dict(model.config.rope_parameters))
    ids = tokens(1, 3 * TRAINED)
    assert_same(logits(model, ids), logits(stock, ids))
    assert largest(logits(model, ids) - logits(SUBJECTS["llama"].fresh(), ids)) > 1e-3


@pytest.mark.parametrize("subject", ["llama", "llama-base", "gpt_neox"])
def test_packed_rows_are_refused_and_not_read_as_one_text(subject: str, tmp_path: Path) -> None:
    """The class is the stock one in all else: what stock classes do with `document_ids` is to drop them."""
    model, ids = ALL[subject].fresh(), tokens(2, 12)
    stock = type(model)
    posenc.patch(model, posenc.RoPE(theta=500.0))
    said = logits(model, ids)
    for called in (model, model.base_model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ConfigError, match="give it one text a row"):
            called(input_ids=ids, document_ids=torch.zeros_like(ids))
        assert "document_ids" in inspect.signature(called.forward).parameters, "Trainer would drop the column"
        assert_same(logits(called, ids, document_ids=None), logits(called, ids))
    assert isinstance(model, stock)
    assert type(model).__name__ == stock.__name__
    model.save_pretrained(tmp_path)
    assert model.config.architectures == [stock.__name__]
    assert_same(logits(stock.from_pretrained(tmp_path).eval(), ids), said)
    posenc.unpatch(model)
    assert type(model) is stock
