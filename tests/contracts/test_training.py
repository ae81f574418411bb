"""Gradients, losses and number formats of patched models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import hf_posenc as posenc
from tests.models import (
    ATTENDING,
    CAUSAL,
    CORE,
    SPECS,
    SUBJECTS,
    TRAINED,
    assert_same,
    cells,
    logits,
    padding_of,
    patched,
    reach,
    tokens,
)

PARAMETER_FREE = [name for name in SPECS if not name.startswith("learned")]


def loss_of(model: Any, ids: Tensor) -> Tensor:
    said = model(input_ids=ids).logits[:, :-1]
    return functional.cross_entropy(said.flatten(0, 1), ids[:, 1:].flatten())


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model.train()
    loss_of(model, ids).backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    silent = [name for name, grad in found.items() if grad is None]
    assert not silent, f"no gradient reaches {silent}"
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize(("subject", "spec"), cells(list(SUBJECTS), [*ATTENDING, "learned", "sinusoidal", "rope-yarn"]))
def test_checkpointed_gradients_equal_plain_ones(subject: str, spec: str) -> None:
    model, ids = patched(subject, spec, own=True), tokens(2, 40)
    plain = gradients(model, ids)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        checkpointed = gradients(model, ids)
        for name, grad in plain.items():
            assert_same(checkpointed[name], grad)


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "gpt_neox"], ATTENDING))
def test_gradients_equal_finite_differences(subject: str, spec: str) -> None:
    model, ids = patched(subject, spec, own=True).double(), tokens(1, 36)
    found = gradients(model, ids)
    name, weight = next((n, w) for n, w in model.named_parameters() if "att" in n and w.ndim == 2)
    step = 1e-5
    for index in [(0, 0), (3, 5), (7, 20)]:
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[index] += sign * step
                losses.append(loss_of(model, ids))
                weight[index] -= sign * step
        slope = (losses[0] - losses[1]) / (2 * step)
        assert torch.isclose(found[name][index], slope, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("subject", "spec"), cells(CAUSAL, CORE))
def test_the_loss_is_the_next_token_cross_entropy(subject: str, spec: str) -> None:
    model, ids = patched(subject, spec), tokens(2, 30)
    with torch.no_grad():
        output = model(input_ids=ids, labels=ids)
    expected = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_same(output.loss, expected, 1e-6)
    if posenc.plan(SUBJECTS[subject].fresh(), SPECS[spec]).route == "interposer":
        assert model.loss_type == "ForCausalLM"


@pytest.mark.parametrize("spec", PARAMETER_FREE)
def test_derived_numbers_survive_every_cast(spec: str) -> None:
    geometry = posenc.Geometry(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        causal=True,
    )
    fresh, cast = (posenc.build(SPECS[spec], geometry) for _ in range(2))
    cast = copy.deepcopy(cast).to(torch.bfloat16).half().to(torch.float32)
    ids = torch.arange(1000, 1010)[None]
    states, positions = torch.randn(1, 4, 10, 8), posenc.Positions(query=ids, key=ids)
    for one, other in (
        (fresh.embed(ids), cast.embed(ids)),
        (fresh.rotate(states, ids), cast.rotate(states, ids)),
        (fresh.bias(states, states, positions), cast.bias(states, states, positions)),
    ):
        assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize(("subject", "spec"), cells(list(SUBJECTS), CORE))
def test_nothing_derived_is_stored(subject: str, spec: str) -> None:
    """A checkpoint holds weights only: no table, no buffer, nothing whose size is a length."""
    stock, model = SUBJECTS[subject].fresh(), patched(subject, spec)
    new = set(model.state_dict()) - set(stock.state_dict())
    prefix = next(name for name, _ in stock.named_modules() if stock.get_submodule(name) is body_of(stock))
    assert new == ({f"{prefix}.posenc.weight"} if spec.startswith("learned") else set())
    added = {name for name, _ in model.named_buffers()} - {name for name, _ in stock.named_buffers()}
    assert not {name for name in added if not name.endswith("inv_freq")}
    assert not [name for name, _ in model.named_buffers() if "posenc" in name]


def body_of(model: Any) -> Any:
    from hf_posenc.family import find_family

    return find_family(model.config.model_type).body_of(model)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("eager", torch.bfloat16), ("sdpa", torch.bfloat16), ("eager", torch.float16)]
)
@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "gpt_neox", "llama", "bert", "roberta"], CORE))
def test_half_precision_stays_near(subject: str, spec: str, backend: str, dtype: torch.dtype) -> None:
    """Weights rounded to the format say nearly the same in it as in float32; padding harms nothing."""
    model = patched(subject, spec, backend, own=True).to(dtype)
    exact = copy.deepcopy(model).float()
    row = tokens(1, reach(spec, 3 * TRAINED) - 5)
    pads = torch.full((1, 5), padding_of(model))
    ids, mask = torch.cat([pads, row], 1), torch.cat([torch.zeros_like(pads), torch.ones_like(row)], 1)
    reference = logits(exact, row)
    said = logits(model, ids, attention_mask=mask)
    assert said.dtype == dtype
    assert said.isfinite().all()
    # a random model amplifies rounding; an average tells drift of the encoding from noise
    error = (said[:, 5:].float() - reference).norm() / reference.norm()
    assert error < (0.08 if dtype == torch.bfloat16 else 0.02)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = logits(exact, ids, attention_mask=mask)
    assert mixed.isfinite().all()
    assert (mixed[:, 5:].float() - reference).norm() / reference.norm() < 0.08
