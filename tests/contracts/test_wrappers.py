"""What people wrap a patched model in: sharding, replicas, compilation, pipelines, adapters, quantised projections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedTokenizerFast, pipeline
from transformers.pytorch_utils import Conv1D

import hf_posenc as posenc
from tests.models import CORE, SPECS, SUBJECTS, VOCABULARY, assert_same, cells, logits, patched, tokens

IDS = tokens(2, 20)


def loss_of(model: Any) -> Tensor:
    output: Tensor = model(input_ids=IDS).logits.log_softmax(-1)[..., 3].mean()
    return output


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("subject", "spec"), [("gpt2", "alibi"), ("gpt2", "learned-tile"), ("llama", "rope-dynamic"), ("bert", "rope")]
)
def test_a_sharded_model_says_learns_and_stores_the_same(subject: str, spec: str) -> None:
    model, plain = patched(subject, spec, own=True).train(), patched(subject, spec, own=True).train()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for layer in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss, expected = loss_of(model), loss_of(plain)
    assert_same(loss.detach(), expected.detach())
    loss.backward()
    expected.backward()
    wanted = dict(plain.named_parameters())
    for name, weight in model.named_parameters():
        if wanted[name].grad is not None:
            assert_same(weight.grad.full_tensor(), wanted[name].grad)  # type: ignore[union-attr, arg-type]
    stored = {name: value.full_tensor() for name, value in model.state_dict().items() if hasattr(value, "full_tensor")}
    assert set(stored) >= set(wanted)
    assert all(torch.equal(stored[name], value) for name, value in plain.state_dict().items() if name in stored)


def replica_of(module: Any, device: str = "cpu") -> Any:
    """A replica as DataParallel makes it: shallow copies of all modules, whose weights are plain attributes."""
    copies: dict[nn.Module, Any] = {part: part._replicate_for_data_parallel() for part in module.modules()}
    for part, twin in copies.items():
        for name, child in part._modules.items():
            twin._modules[name] = None if child is None else copies[child]
        for name, weight in part._parameters.items():
            setattr(twin, name, None if weight is None else weight.detach().clone().to(device))
        for name, buffer in part._buffers.items():
            twin._buffers[name] = None if buffer is None else buffer.to(device)
    return copies[module]


@pytest.mark.parametrize(
    ("subject", "spec"), cells(["gpt2", "llama", "bert", "roberta"], [*CORE[:3], "rope-dynamic", "sinusoidal"])
)
def test_a_replica_resolves_positions_by_its_own_weights(subject: str, spec: str) -> None:
    """DataParallel runs shallow copies; the model they were taken from may lie on another device, and is not asked."""
    model = patched(subject, spec, own=True)
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    expected, replica = logits(model, ids, attention_mask=mask), replica_of(model)
    for weight in model.parameters():
        weight.data.fill_(float("nan"))
    assert_same(logits(replica, ids, attention_mask=mask)[mask == 1], expected[mask == 1])


@pytest.mark.parametrize(
    ("subject", "spec"), [("gpt2", "alibi"), ("llama", "learned-tile"), ("bert", "alibi"), ("opt", "rope")]
)
def test_merged_adapters_say_what_they_said_beside_the_weights(subject: str, spec: str) -> None:
    model = patched(subject, spec, own=True)
    names = [n.rpartition(".")[2] for n, m in model.base_model.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
    config = peft.LoraConfig(target_modules=sorted(set(names)), init_lora_weights=False)
    torch.manual_seed(0)
    adapted: Any = peft.get_peft_model(model, config)
    said = logits(adapted, IDS)
    assert not torch.allclose(said, logits(patched(subject, spec), IDS), atol=1e-3)
    merged = adapted.merge_and_unload()
    assert posenc.is_patched(merged)
    assert_same(logits(merged, IDS), said)


class Packed(nn.Linear):
    """A projection whose weight is not what multiplies, as quantised ones are: bytes in a shape of their own."""

    def __init__(self, stock: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = stock.in_features, stock.out_features
        self.bias = stock.bias
        self.scale = stock.weight.detach().abs().amax() / 127
        self.register_buffer("bytes", (stock.weight.detach() / self.scale).round().to(torch.int8).flatten())

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        raise AssertionError("the weight of a quantised projection was read")

    def forward(self, states: Tensor) -> Tensor:
        """Multiply by what the bytes stand for."""
        weight = self.bytes.view(self.out_features, self.in_features).to(states.dtype) * self.scale
        return nn.functional.linear(states, weight, self.bias)


def quantise(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear and "head" not in name and "decoder" not in name:
            setattr(module, name, Packed(child))
        else:
            quantise(child)


@pytest.mark.parametrize(("subject", "spec"), cells(["opt", "gpt_neox", "llama", "bert"], ["alibi", "learned-tile"]))
def test_projections_are_called_and_never_read(subject: str, spec: str) -> None:
    """A patch of a quantised model, verified, says what the quantised patched model says."""
    before, after = SUBJECTS[subject].fresh(), SUBJECTS[subject].fresh()
    quantise(before.base_model)
    torch.manual_seed(5)
    posenc.patch(before, SPECS[spec])
    torch.manual_seed(5)
    posenc.patch(after, SPECS[spec], verify=False)
    quantise(after.base_model)
    assert_same(logits(before, IDS), logits(after, IDS))


@pytest.mark.parametrize(("subject", "spec"), cells(["llama", "bert"], ["alibi", "rope-dynamic"]))
def test_dynamic_quantisation_stays_near(subject: str, spec: str) -> None:
    model = patched(subject, spec, own=True)
    said = logits(model, IDS)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert (logits(quantised, IDS) - said).norm() < 0.2 * said.norm()


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of as many words as the tiny models know."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2, **{f"w{index}": index for index in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", padding_side="left"
    )


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama"], ["alibi", "rope-dynamic", "sinusoidal"]))
def test_the_generation_pipeline_pads_and_goes_on_past_the_trained_length(subject: str, spec: str) -> None:
    generate = pipeline("text-generation", model=patched(subject, spec, own=True), tokenizer=words(), device="cpu")
    texts = [" ".join(f"w{3 + (7 * index) % 50}" for index in range(length)) for length in (60, 51)]
    asked = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    alone = [generate(text, **asked)[0]["generated_text"] for text in texts]
    together = [row[0]["generated_text"] for row in generate(texts, batch_size=2, **asked)]
    assert together == alone
    assert all(alone)


@pytest.mark.parametrize("spec", ["alibi", "rope-dynamic", "sinusoidal"])
def test_the_masked_pipeline_fills_past_the_trained_length(spec: str) -> None:
    model, tokenizer = patched("bert", spec, own=True), words()
    text = " ".join(f"w{3 + (7 * index) % 50}" for index in range(80)) + " [MASK] w9"
    best = pipeline("fill-mask", model=model, tokenizer=tokenizer, device="cpu")(text)[0]
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert best["token"] == int(logits(model, ids)[0, 80].argmax())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "spec"), [("gpt2", "alibi"), ("gpt2", "sinusoidal"), ("llama", "rope-yarn"), ("bert", "alibi")]
)
def test_compilation_makes_two_graphs_at_most_for_nine_lengths(subject: str, spec: str) -> None:
    torch._dynamo.reset()
    model, counter = patched(subject, spec, own=True), CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for length in (20, 21, 24, 31, 48, 64, 65, 100, 130):
        assert_same(logits(compiled, tokens(2, length), use_cache=False), logits(model, tokens(2, length)))
    assert counter.frame_count <= 2
