"""Patching touches one instance, at a moment when nothing else holds on to it, and can be undone bit for bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from transformers import PreTrainedModel

import hf_posenc as posenc
from hf_posenc.errors import PatchStateError, UnsupportedFamilyError
from tests.models import (
    ATTENDING,
    CORE,
    SPECS,
    SUBJECTS,
    TRAINED,
    VARIANTS,
    assert_same,
    cells,
    logits,
    patched,
    tokens,
)

ALL = {**SUBJECTS, **VARIANTS}


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Everything of a model that a patch could touch."""
    return {
        "keys": list(model.state_dict()),
        "values": [value.clone() for value in model.state_dict().values()],
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "config": model.config.to_dict(),
        "loss_type": model.__dict__.get("loss_type"),
        "mode": [module.training for module in model.modules()],
    }


def classes_of(model: nn.Module) -> dict[type, dict[str, Any]]:
    """The attributes of every class, own or inherited, that a model's modules and config have."""
    kinds = {cls for module in model.modules() for cls in type(module).__mro__} | set(type(model.config).__mro__)
    # Python itself notes the slots of a class when an instance is first copied
    return {cls: {k: v for k, v in vars(cls).items() if k != "__slotnames__"} for cls in kinds if cls is not object}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    values = found.pop("values"), expected.pop("values")
    assert found == expected
    assert all(torch.equal(one, other) for one, other in zip(*values, strict=True))


@pytest.mark.parametrize(("subject", "spec"), cells(list(ALL), ["alibi", "learned-tile", "rope"]))
def test_unpatch_restores_bit_for_bit(subject: str, spec: str) -> None:
    model = ALL[subject].fresh()
    config, said, before = model.config, logits_or_scores(model), fingerprint(model)
    classes = classes_of(model)
    posenc.patch(model, SPECS[spec], verify=False)
    assert posenc.is_patched(model)
    posenc.unpatch(model)
    assert not posenc.is_patched(model)
    assert_equal(fingerprint(model), before)
    assert model.config is config
    assert torch.equal(logits_or_scores(model), said)
    assert classes_of(model) == classes


def logits_or_scores(model: PreTrainedModel) -> torch.Tensor:
    return logits(model, tokens(2, 20) if "Classification" not in type(model).__name__ else tokens(1, 20))


@pytest.mark.parametrize("spec", ["alibi", "rope", "learned", "nope"])
@pytest.mark.parametrize("subject", ["gpt2", "gpt_neox", "roberta"])
def test_an_unpatched_model_is_where_and_what_it_was_moved_to(subject: str, spec: str) -> None:
    model, expected = SUBJECTS[subject].fresh(), SUBJECTS[subject].fresh().double()
    posenc.patch(model, SPECS[spec], verify=False).double()
    model.train()
    posenc.unpatch(model)
    assert all(module.training for module in model.modules())
    assert all(value.dtype == torch.float64 for value in model.parameters())
    assert_same(logits(model.eval(), tokens(2, 20)), logits(expected, tokens(2, 20)), 1e-6)


@pytest.mark.parametrize("subject", [name for name in ALL if "llama" not in name and "neox" not in name])
def test_a_learned_table_says_what_the_model_said(subject: str) -> None:
    model = ALL[subject].fresh()
    said = logits_or_scores(model)
    for spec in ("learned", "learned-tile"):
        assert torch.equal(logits_or_scores(posenc.patch(model, SPECS[spec])), said)
        posenc.unpatch(model)


@pytest.mark.parametrize("subject", ["llama", "llama-wide-head", "llama-base", "gpt_neox", "gpt_neox-sequential"])
def test_its_own_rotation_says_what_the_model_said(subject: str) -> None:
    model = ALL[subject].fresh()
    said = logits_or_scores(model)
    assert torch.equal(logits_or_scores(posenc.patch(model, posenc.RoPE())), said)


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "opt", "llama", "bert"], ATTENDING))
def test_another_model_never_notices(subject: str, spec: str) -> None:
    """Not even one that shares its config object."""
    one, other = SUBJECTS[subject].fresh(), SUBJECTS[subject].fresh()
    shared = one.config
    for module in other.modules():
        if "config" in module.__dict__:
            module.config = shared
    said, before = logits(other, tokens(2, 20)), fingerprint(other)
    posenc.patch(one, SPECS[spec])
    logits(one, tokens(2, 20))
    one.set_attn_implementation("eager")
    assert torch.equal(logits(other, tokens(2, 20)), said)
    assert_equal(fingerprint(other), before)
    posenc.patch(other, posenc.Alibi())
    posenc.unpatch(one)
    assert posenc.is_patched(other)
    assert_same(logits(other, tokens(2, 20)), logits(patched(subject, "alibi"), tokens(2, 20)))


@pytest.mark.parametrize("copied", ["deepcopy", "save"])
@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "opt", "llama", "bert"], CORE))
def test_copies_are_whole_and_separate(subject: str, spec: str, copied: str) -> None:
    model = patched(subject, spec)
    ids = tokens(2, 20)
    said = logits(model, ids)
    if copied == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        twin = torch.load(stream, weights_only=False)
    assert torch.equal(logits(twin, ids), said)
    assert type(twin) is type(model)
    shared = {value.data_ptr() for value in model.parameters()} & {value.data_ptr() for value in twin.parameters()}
    assert not shared
    for weight in twin.parameters():
        weight.data.zero_()
    assert torch.equal(logits(model, ids), said)
    posenc.unpatch(twin)
    assert posenc.is_patched(model)
    assert torch.equal(logits(model, ids), said)


@pytest.mark.parametrize("subject", ["gpt2", "bert"])
@pytest.mark.parametrize("spec", list(SPECS))
def test_a_patch_draws_no_random_numbers_and_leaves_modes_alone(subject: str, spec: str) -> None:
    model = SUBJECTS[subject].fresh().train()
    next(module for module in model.modules() if isinstance(module, nn.Dropout)).eval()
    modes = {module: module.training for module in model.modules()}
    state = torch.random.get_rng_state()
    posenc.patch(model, SPECS[spec])
    if not spec.startswith("learned"):  # a table starts from random rows, which the old ones then replace
        assert torch.equal(torch.random.get_rng_state(), state)
    assert all(module.training is modes.get(module, True) for module in model.modules())
    evaluated = posenc.patch(SUBJECTS[subject].fresh(), SPECS[spec])
    assert not any(module.training for module in evaluated.modules())


def optimized(model: PreTrainedModel) -> Any:
    return torch.optim.AdamW(model.parameters())


def optimized_in_groups(model: PreTrainedModel) -> Any:
    weights = list(model.parameters())
    return torch.optim.SGD([{"params": weights[:1], "lr": 0.1}, {"params": weights[1:]}], lr=0.2)


def optimized_in_part(model: PreTrainedModel) -> Any:
    return torch.optim.SGD(list(model.parameters())[-1:], lr=0.1)


def hooked(model: PreTrainedModel) -> Any:
    return add_hook_to_module(model, ModelHook())


def prepared(model: PreTrainedModel) -> Any:
    return Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("hold", [optimized, optimized_in_groups, optimized_in_part, hooked, prepared])
def test_a_patch_comes_before_whoever_holds_the_model(hold: Any) -> None:
    model = SUBJECTS["gpt2"].fresh()
    held = hold(model)
    with pytest.raises(PatchStateError, match=r"patch (it )?first|patch first"):
        posenc.patch(model, posenc.Alibi())
    assert not posenc.is_patched(model)
    assert held is not None


def test_whoever_else_holds_a_parameter_is_no_optimizer() -> None:
    model = SUBJECTS["gpt2"].fresh()
    model(input_ids=tokens(1, 9), labels=tokens(1, 9)).loss.backward()
    held = [{"params": list(model.parameters())}, list(model.parameters())]
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # is gone after this line
    assert posenc.is_patched(posenc.patch(model, posenc.Alibi()))
    assert len(held) == 2


def test_a_patch_comes_before_adapters() -> None:
    model = SUBJECTS["gpt2"].fresh()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    for target in (wrapped, wrapped.base_model, model):
        with pytest.raises(PatchStateError, match="patch the base model first"):
            posenc.patch(target, posenc.Alibi())


def test_a_second_patch_and_a_second_unpatch_are_refused() -> None:
    model = posenc.patch(SUBJECTS["gpt2"].fresh(), posenc.Alibi())
    said = logits(model, tokens(1, 9))
    with pytest.raises(PatchStateError, match="patched already"):
        posenc.patch(model, posenc.RoPE())
    with pytest.raises(PatchStateError, match="patched already"):
        posenc.plan(model, posenc.RoPE())
    assert torch.equal(logits(model, tokens(1, 9)), said)
    posenc.unpatch(model)
    with pytest.raises(PatchStateError, match="not patched"):
        posenc.unpatch(model)
    assert_same(logits(posenc.patch(model, posenc.Alibi()), tokens(1, 9)), said)


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(UnsupportedFamilyError, match="PreTrainedModel"):
        posenc.patch(nn.Linear(2, 2), posenc.Alibi())  # type: ignore[type-var]
    compiled = nn.DataParallel(SUBJECTS["gpt2"].fresh())
    with pytest.raises(UnsupportedFamilyError, match="DataParallel"):
        posenc.patch(compiled, posenc.Alibi())  # type: ignore[type-var]


@pytest.mark.parametrize("subject", list(SUBJECTS))
def test_the_body_can_be_patched_through_the_model_only(subject: str) -> None:
    """A body patched by itself stays patched inside its model, and says the same there."""
    model, body = SUBJECTS[subject].fresh(), SUBJECTS[subject].fresh()
    posenc.patch(model, posenc.Alibi())
    posenc.patch(body.base_model, posenc.Alibi())
    assert_same(logits(body, tokens(2, 20)), logits(model, tokens(2, 20)))


@pytest.mark.parametrize("subject", list(ALL))
def test_a_patched_model_keeps_its_type(subject: str) -> None:
    model = patched(subject, "alibi")
    assert isinstance(model, getattr(transformers, ALL[subject].model))
    assert type(model).__name__ == "Posenc" + ALL[subject].model
    assert "Alibi" in repr(model)
    assert TRAINED in (model.config.max_position_embeddings, model.config.max_position_embeddings - 2)
