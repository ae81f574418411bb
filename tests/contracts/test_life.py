"""What happens to a patched model in service: other caches, other processes, other memory, a second model beside it."""

from __future__ import annotations

import inspect
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import QuantizedLayer

import hf_posenc as posenc
from tests.contracts.test_decoding import generated, left_padded, schedule
from tests.contracts.test_training import gradients, loss_of
from tests.contracts.test_wrappers import replica_of
from tests.families.models import stock
from tests.families.test_model_types import spec_for
from tests.models import ATTENDING, TRAINED, VOCABULARY, assert_same, cells, in_steps, logits, patched, tokens

IDS = tokens(2, 2 * TRAINED)


class Rounded(QuantizedLayer):
    """A quantised layer whose grid is as fine as asked, so that what else happens in such a cache can be told apart."""

    step = 0.0

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return (tensor / self.step).round() * self.step if self.step else tensor.clone()

    def _dequantize(self, q_tensor: Tensor) -> Tensor:
        return q_tensor


def rounded(model: PreTrainedModel, step: float = 0.0) -> Cache:
    """A cache that quantises whatever is older than 16 tokens."""
    layers = [Rounded(residual_length=16) for _ in range(model.config.num_hidden_layers)]
    for layer in layers:
        layer.step = step
    return Cache(layers=layers)


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama"], [*ATTENDING, "sinusoidal"]))
def test_a_quantised_cache_holds_the_past(subject: str, spec: str) -> None:
    """What decodes from it exactly where it rounds nothing, and nearly where it rounds a little."""
    model, sizes = patched(subject, spec), schedule(IDS.shape[1])
    said = logits(model, IDS)
    assert_same(in_steps(model, IDS, sizes, rounded(model)), said)
    coarse = in_steps(model, IDS, sizes, rounded(model, step=1e-3))
    assert 0.0 < float((coarse - said).norm() / said.norm()) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama"], ["alibi"]))
def test_generation_from_four_bits_stays_near(subject: str, spec: str) -> None:
    pytest.importorskip("optimum.quanto", reason="quantised caches need the package 'optimum-quanto'")
    model = patched(subject, spec)
    how: dict[str, Any] = {"cache_implementation": "quantized", "cache_config": {"backend": "quanto", "nbits": 4}}
    assert generated(model, IDS[:, :20], **how).shape == (2, 12)


def assistant_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model with noise on its weights, which then guesses right now and then."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=noise))
    return model


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama"], [*ATTENDING, "learned-tile"]))
def test_assisted_decoding_takes_the_tokens_that_the_model_takes(subject: str, spec: str) -> None:
    """What an assistant guessed wrong is cut off the cache again, on both sides of the trained length."""
    model, assistant = patched(subject, spec), assistant_of(patched(subject, spec, own=True))
    ids = tokens(1, TRAINED - 6)
    assert torch.equal(generated(model, ids, assistant_model=assistant), generated(model, ids))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["assisted", "lookup", "static", "beams"])
@pytest.mark.parametrize("model_type", ["bloom", "falcon", "gpt_neo", "xglm"])
def test_declared_attention_decodes_in_every_way(model_type: str, how: str) -> None:
    model = posenc.patch(stock(model_type), spec_for(model_type, "rope-dynamic"), verify=False)
    twin = assistant_of(posenc.patch(stock(model_type), spec_for(model_type, "rope-dynamic"), verify=False))
    asked: dict[str, dict[str, Any]] = {
        "assisted": {"assistant_model": twin},
        "lookup": {"prompt_lookup_num_tokens": 3, "eos_token_id": VOCABULARY},
        "static": {"cache_implementation": "static"},
        "beams": {"num_beams": 3},
    }
    ids, plain = tokens(1, TRAINED - 6), asked["beams"] if how == "beams" else {}
    expected = generated(model, ids, use_cache=False, **plain)
    assert torch.equal(generated(model, ids, **asked[how]), expected)


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama"], ATTENDING))
def test_both_names_of_a_cache_are_heard(subject: str, spec: str) -> None:
    """transformers renamed it; padded rows, so that positions and slots differ."""
    model = patched(subject, spec)
    ids, mask = left_padded(model, IDS[:, :20], 4)
    expected = logits(model, ids, attention_mask=mask)[:, 15:]
    renamed = "cache" in inspect.signature(model.posenc_stock.forward).parameters
    for name in ("past_key_values", "cache") if renamed else ("past_key_values",):
        cache = {name: DynamicCache(config=model.config)}
        logits(model, ids[:, :15], attention_mask=mask[:, :15], **cache)
        assert_same(logits(model, ids[:, 15:], attention_mask=mask, **cache), expected)


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama", "bert"], ["alibi", "rope-dynamic"]))
def test_a_checkpointed_replica_learns_what_the_model_learns(subject: str, spec: str) -> None:
    """DataParallel and gradient checkpointing together; the weights of a replica lead back to those of the model."""
    model, ids = patched(subject, spec, own=True), IDS[:, :40]
    expected = gradients(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.zero_grad(set_to_none=True)
    replica = replica_of(model.train())
    for part, twin in zip(model.modules(), replica.modules(), strict=True):
        for name, weight in part._parameters.items():
            setattr(twin, name, weight)
    loss_of(replica, ids).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert_same(weight.grad, expected[name])


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama", "bert"], ["alibi", "rope-dynamic"]))
def test_two_forwards_before_one_backward(subject: str, spec: str) -> None:
    model = patched(subject, spec, own=True).train()
    first, second = IDS[:, :40], IDS[:, 40:70]
    expected: dict[str, Tensor] = {}
    for ids in (first, second):
        for name, grad in gradients(model, ids).items():
            expected[name] = expected.get(name, torch.zeros(())) + grad
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.zero_grad(set_to_none=True)
    (loss_of(model, first) + loss_of(model, second)).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert_same(weight.grad, expected[name])


@pytest.mark.parametrize(
    ("subject", "spec"),
    [("llama", "alibi"), ("llama", "rope-dynamic"), ("llama", "sinusoidal"), ("gpt2", "learned-tile")],
)
def test_weights_on_disk_are_fetched_layer_by_layer(subject: str, spec: str, tmp_path: Path) -> None:
    model = patched(subject, spec)
    said = logits(model, IDS)
    model.save_pretrained(tmp_path / "model")
    where: dict[str, Any] = {"device_map": "auto", "max_memory": {"cpu": 60_000}, "offload_folder": tmp_path / "rest"}
    loaded = posenc.from_pretrained(tmp_path / "model", **where).eval()
    assert "disk" in loaded.hf_device_map.values()
    assert torch.equal(logits(loaded, IDS), said)


@pytest.mark.slow  # a process that starts with nothing
def test_a_model_goes_to_a_process_of_its_own() -> None:
    for subject, spec in (("gpt2", "alibi"), ("llama", "rope"), ("bert", "learned-tile")):
        model = patched(subject, spec)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert torch.equal(pool.apply(logits, (model, IDS[:, :40])), logits(model, IDS[:, :40]))
