"""Perplexity against slow oracles, and the ways in which other evaluators have been wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from hf_posenc.errors import LengthError
from hf_posenc.evaluation import perplexity_by_length
from hf_posenc.evaluation.piecewise import feed_forward_layers, in_pieces
from hf_posenc.evaluation.scoring import Scorer, evaluation_mode, token_nll
from tests.evaluation.models import (
    MODELS,
    SMALL,
    VOCABULARY,
    gpt2,
    llama,
    naive_nll,
    opt,
    random_documents,
    sharpened,
)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_nonoverlapping_equals_the_naive_loop(build: Callable[[], nn.Module]) -> None:
    model, documents = build(), random_documents(50, 17, 3)
    expected = [
        loss for ids in documents for loss in naive_nll(model, ids, [(i // 16 * 16, i) for i in range(len(ids) - 1)])
    ]
    curve = perplexity_by_length(model, documents, [16])
    assert curve.n_tokens[16] == len(expected) == 67
    assert curve.nll_sum[16] == pytest.approx(math.fsum(expected), rel=1e-6)
    assert curve.ppl[16] == pytest.approx(math.exp(math.fsum(expected) / 67), rel=1e-6)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_stride_one_gives_every_target_the_full_window(build: Callable[[], nn.Module]) -> None:
    model, documents = build(), random_documents(40)
    expected = naive_nll(model, documents[0], [(max(0, i - 7), i) for i in range(39)])
    curve = perplexity_by_length(model, documents, [8], protocol="sliding", stride=1, batch_size=5)
    assert curve.nll_sum[8] == pytest.approx(math.fsum(expected), rel=1e-6)


def test_an_infinite_window_is_one_forward() -> None:
    model, documents = llama(), random_documents(60)
    ids = torch.tensor(documents)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    curve = perplexity_by_length(model, documents, [10**6])
    assert curve.nll[10**6] == pytest.approx(loss, rel=1e-6)
    assert curve.window[10**6] == 59  # what was really used is on record


@settings(max_examples=12)
@given(st.data())
def test_a_uniform_model_scores_its_vocabulary(data: st.DataObject) -> None:
    model = gpt2()
    model.lm_head.weight.data.zero_()  # type: ignore[union-attr, operator]
    sizes = data.draw(st.lists(st.integers(2, 90), min_size=1, max_size=4))
    length = data.draw(st.integers(1, 64))
    stride = data.draw(st.integers(1, length))
    protocol = data.draw(st.sampled_from([{}, {"protocol": "sliding", "stride": stride}]))
    curve = perplexity_by_length(model, random_documents(*sizes), [length], batch_size=3, **protocol)
    assert curve.ppl[length] == pytest.approx(VOCABULARY, rel=1e-9)
    assert curve.n_tokens[length] == sum(sizes) - len(sizes)


def test_batch_size_order_and_padding_side_do_not_matter() -> None:
    model, documents = gpt2(), random_documents(64, 5, 40, 90, 2, 64)
    kwargs = {"lengths": [8, 32], "protocol": "sliding", "stride": 3}
    curves = [perplexity_by_length(model, documents, batch_size=size, **kwargs) for size in (1, 2, 7)]
    curves.append(perplexity_by_length(model, documents[::-1], batch_size=3, **kwargs))
    for curve in curves[1:]:
        assert curve.n_tokens == curves[0].n_tokens
        assert curve.text_hash == curves[0].text_hash
        for length in (8, 32):
            assert curve.nll_sum[length] == pytest.approx(curves[0].nll_sum[length], rel=1e-6)
            assert curve.stderr[length] == pytest.approx(curves[0].stderr[length], rel=1e-4)


def test_the_count_is_the_same_for_every_length_and_stride() -> None:
    documents = random_documents(33, 64, 7)
    for protocol in ({}, {"protocol": "sliding", "stride": 5}):
        curve = perplexity_by_length(gpt2(), documents, [5, 16, 64], **protocol)  # type: ignore[arg-type]
        assert set(curve.n_tokens.values()) == {32 + 63 + 6}


@pytest.mark.parametrize("build", [gpt2, opt], ids=["gpt2", "opt"])
def test_a_length_past_the_table_is_a_row_that_says_so(build: Callable[[], nn.Module]) -> None:
    curve = perplexity_by_length(build(), random_documents(200), [128, 32, 64])
    assert curve.lengths == (32, 64, 128)
    assert set(curve.ppl) == {32, 64}
    assert curve.refused[128].startswith("no position 65: its table has 64 rows")


class _StopsAt40(nn.Module):
    """A model that raises `LengthError` by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids: torch.Tensor, **kwargs: object) -> object:
        if input_ids.shape[1] > 40:
            raise LengthError("no position 41")
        return self.inner(input_ids=input_ids, **kwargs)


def test_a_length_error_from_the_model_is_a_row_too() -> None:
    curve = perplexity_by_length(_StopsAt40(), random_documents(90), [32, 64])
    assert set(curve.ppl) == {32}
    assert dict(curve.refused) == {64: "no position 41"}


def test_logits_that_are_not_finite_are_a_row_too() -> None:
    model = llama()
    model.lm_head.weight.data[5] = float("nan")  # type: ignore[union-attr, operator, index]
    curve = perplexity_by_length(model, random_documents(30), [8])
    assert not curve.ppl
    assert "not finite" in curve.refused[8]


@pytest.mark.parametrize(
    "build",
    [
        lambda: Gemma2ForCausalLM(
            Gemma2Config(**SMALL, head_dim=16, num_key_value_heads=4, final_logit_softcapping=2.0)
        ),
        lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    ],
    ids=["soft-capped", "scaled"],
)
def test_what_a_model_does_after_its_head_is_kept(build: Callable[[], nn.Module]) -> None:
    model, documents = sharpened(build()), random_documents(30)
    expected = math.fsum(naive_nll(model, documents[0], [(0, i) for i in range(29)]))
    with evaluation_mode(model):
        assert Scorer(model, torch.tensor(documents[0]))._head is not None  # not by way of the slow road
    assert perplexity_by_length(model, documents, [64]).nll_sum[64] == pytest.approx(expected, rel=1e-6)


class _HeadInvisible(nn.Module):
    """A model whose declared head is not the module that makes its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()
        self.decoy = nn.Linear(64, VOCABULARY)

    def get_output_embeddings(self) -> nn.Module:
        return self.decoy

    def forward(self, **kwargs: object) -> object:
        return self.inner(**kwargs)


def test_a_head_that_cannot_be_run_in_pieces_is_run_whole() -> None:
    model, documents = _HeadInvisible(), random_documents(30)
    expected = perplexity_by_length(model.inner, documents, [16]).nll_sum[16]
    assert perplexity_by_length(model, documents, [16]).nll_sum[16] == pytest.approx(expected, rel=1e-6)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[type-arg]
        out = func(*args, **(kwargs or {}))  # type: ignore[operator]
        if isinstance(out, torch.Tensor):
            self.numbers = max(self.numbers, out.numel())
        return out


def test_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_posenc.evaluation.scoring._PIECE_NUMBERS", 256 * VOCABULARY)
    seen: list[int] = []
    monkeypatch.setattr(
        "hf_posenc.evaluation.scoring.token_nll",
        lambda logits, targets: seen.append(len(logits)) or token_nll(logits, targets),  # type: ignore[func-returns-value]
    )
    model, length = llama(), 2048
    documents = random_documents(length + 1)
    ids = torch.tensor(documents)
    with torch.no_grad():
        whole = model(input_ids=ids[:, :-1]).logits[0].double()
    expected = nn.functional.cross_entropy(whole, ids[0, 1:]).item()
    with _Largest() as largest:
        curve = perplexity_by_length(model, documents, [length])
    assert curve.nll[length] == pytest.approx(expected, rel=1e-6)
    assert 0 < largest.numbers <= length * 128  # the MLP's inner states
    assert largest.numbers >= length * 64  # the meter does see the hidden states
    assert max(seen) == 256  # rows of logits; 2,048 in all


def test_feed_forward_layers_run_in_pieces_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, documents = llama(), random_documents(60)
    layers = feed_forward_layers(model)
    assert len(layers) == 2
    expected = perplexity_by_length(model, documents, [59]).nll_sum[59]
    sizes: list[int] = []
    layers[0].gate_proj.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))  # type: ignore[union-attr]
    with torch.no_grad(), in_pieces(layers, 16):
        model(input_ids=torch.tensor(documents))
    assert sizes == [16, 16, 16, 12]
    monkeypatch.setattr(Scorer._logits, "__kwdefaults__", {"rows": 16})
    assert perplexity_by_length(model, documents, [59]).nll_sum[59] == pytest.approx(expected, rel=1e-6)
    assert not any("forward" in vars(module) for module in model.modules())
    mlp: Any = gpt2().transformer.h[0].mlp
    with in_pieces([mlp], 3):  # pieces of several rows: GPT-2 takes views of them
        assert mlp(torch.zeros(2, 4, mlp.c_fc.nx)).shape[:2] == (2, 4)


def test_a_layer_that_is_not_the_same_in_pieces_is_run_whole() -> None:
    model: Any = llama()
    with evaluation_mode(model):
        assert Scorer(model, torch.tensor(random_documents(9)[0]))._layers
        act = model.model.layers[0].mlp.act_fn
        act.register_forward_hook(lambda module, args, out: out * args[0].shape[1])  # looks at all tokens
        assert Scorer(model, torch.tensor(random_documents(9)[0]))._layers == []


def test_modes_are_restored_and_dropout_is_off() -> None:
    model = gpt2().train()
    model.transformer.h[1].eval()  # type: ignore[union-attr, index, operator]
    before = [module.training for module in model.modules()]
    first, second = (perplexity_by_length(model, random_documents(30), [16]).nll_sum[16] for _ in range(2))
    assert first == second  # with dropout on they would differ
    assert [module.training for module in model.modules()] == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_bos_prepended_once_makes_the_first_token_a_target() -> None:
    model, documents = llama(), random_documents(20, 9)
    plain = perplexity_by_length(model, documents, [8])
    prepended = perplexity_by_length(model, documents, [8], bos_policy="prepend")
    by_hand = perplexity_by_length(model, [[1, *ids] for ids in documents], [8])
    assert prepended.n_tokens[8] == plain.n_tokens[8] + 2 == 29
    assert prepended.nll_sum[8] == by_hand.nll_sum[8] != plain.nll_sum[8]
    again = perplexity_by_length(model, [[1, *ids] for ids in documents], [8], bos_policy="prepend")
    assert again.nll_sum[8] == by_hand.nll_sum[8]


class _Bytes:
    """A tokenizer of one token a byte."""

    bos_token_id = 1
    padding_side = "left"

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [byte % 90 + 2 for byte in text.encode()]}


def test_texts_give_bits_per_byte() -> None:
    texts = ["grüße an alle", "noch einer"]
    curve = perplexity_by_length(llama(), texts, [8], tokenizer=_Bytes(), bos_policy="prepend")  # type: ignore[arg-type]
    assert curve.n_bytes == curve.n_tokens[8] == 25
    assert curve.bits_per_byte is not None
    assert curve.bits_per_byte[8] == pytest.approx(math.log2(curve.ppl[8]), rel=1e-12)
    assert perplexity_by_length(llama(), random_documents(9), [8]).bits_per_byte is None


def test_ids_tensors_and_tuples_are_the_same_documents() -> None:
    documents = random_documents(20, 9)
    as_lists = perplexity_by_length(gpt2(), documents, [8])
    torch.manual_seed(0)
    model = gpt2()
    expected = perplexity_by_length(model, documents, [8])
    assert as_lists.text_hash == expected.text_hash
    for form in (torch.tensor, tuple):
        curve = perplexity_by_length(model, [form(ids) for ids in documents], [8])  # type: ignore[operator]
        assert (curve.nll_sum, curve.text_hash) == (expected.nll_sum, expected.text_hash)


def test_bfloat16_models_are_scored_in_float32() -> None:
    model, documents = llama().bfloat16(), random_documents(40)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([documents[0][:-1]])).logits[0].float()
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(documents[0][1:])).item()
    curve = perplexity_by_length(model, documents, [64])
    assert curve.dtype == "bfloat16"
    assert curve.nll[64] == pytest.approx(expected, rel=1e-6)


def test_token_nll_survives_large_logits() -> None:
    logits = torch.tensor([[3e4, -3e4, 3e4]])
    assert token_nll(logits, torch.tensor([0])).item() == pytest.approx(math.log(2), rel=1e-12)
    assert token_nll(logits, torch.tensor([1])).item() == pytest.approx(6e4 + math.log(2), rel=1e-12)
