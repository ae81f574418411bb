"""Compiled models attend in the fast form of a bias by distance: what they say and learn is what they do uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, library
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel

import hf_posenc as posenc
from hf_posenc import operators, stretches
from tests.checkpoints import stories260k
from tests.models import SUBJECTS, assert_same, logits, tokens
from tests.test_forms import ACCURACY, call, dense

LENGTH = 40
TRAINED = {"alibi": posenc.Alibi(), "t5": posenc.encoding("t5"), "kerple": posenc.encoding("kerple")}


def seen(kind: str, queries: int, keys: int) -> Tensor:
    """Which keys are seen, (2, 1, q, k) bool."""
    shown = torch.ones(2, 1, 1, keys, dtype=torch.bool)
    if kind == "holes":
        shown[0, ..., 3:5] = False
    elif kind != "all":
        shown[0, ..., : keys // 3], shown[1, ..., -2:] = False, False
    ahead = torch.ones(queries, keys).triu(keys - queries + 1).bool()
    return (shown & ~ahead) if kind != "both ways" else shown.expand(-1, -1, queries, -1)


@pytest.mark.parametrize("kind", ["all", "padded", "both ways", "holes", "additive"])
@pytest.mark.parametrize("dtype", ACCURACY)
def test_output_and_gradients_are_those_of_the_dense_bias(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "WINDOWED", 300)
    for name, queries, keys in (("kerple", 7, 7), ("alibi-trainable", 300, 300), ("t5", 9, 40)):
        scores, *states = call(name, queries, keys, causal=kind != "both ways", dtype=dtype)
        mask = seen(kind, queries, keys)
        if kind != "all":
            low = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
            scores.mask, scores.triangle = (low if kind == "additive" else mask), False
        found = operators.attend_by_operator(scores, states[0], *(x.repeat_interleave(2, dim=1) for x in states[1:]))
        expected, encoding = dense(scores, *states)
        assert found.dtype == dtype
        told = mask.any(-1).mT[..., None]  # (2, q, 1, 1): what queries say that see no key is nobody's business
        assert_same((found * told).double(), expected * told, ACCURACY[dtype])
        draw = told * torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        ours = torch.autograd.grad((found * draw.to(dtype)).sum(), [*states, *scores.encoding.parameters()])
        truth = torch.autograd.grad((expected * draw).sum(), [*states, *encoding.parameters()])
        for one, other in zip(ours, truth, strict=True):
            assert_same(one.double(), other.double(), 10 * ACCURACY[dtype])


def test_what_a_compiler_is_told_of_the_operators_is_true() -> None:
    """Shapes, strides, dtypes, gradients, and that nothing is written to."""
    scores, *states = call("kerple", 9, 12, causal=True)
    query, key, value = states[0], *(x.repeat_interleave(2, dim=1) for x in states[1:])
    given = [scores.positions.query, scores.positions.key, torch.arange(3, 12), seen("padded", 9, 12)]
    table = torch.randn(4, 23).requires_grad_()
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    library.opcheck(operators._seen, (given, False), test_utils=quick)
    told = [operators._seen(given, False), *given]
    library.opcheck(operators._attend, (query, key, value, table, told, False, 0.7), test_utils=quick)


def prepared(subject: str, name: str, **fields: Any) -> PreTrainedModel:
    """A patched model whose bias says something."""
    model = posenc.patch(SUBJECTS[subject].fresh(**fields), TRAINED[name], verify=False)
    for weight in model.base_model.posenc.parameters():
        weight.data.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
    return model.train()


def learned(model: Any, call: Callable[..., Any], **inputs: Any) -> list[Tensor]:
    """What a call says of two rows, and all gradients of it."""
    said = call(tokens(2, LENGTH), **inputs).logits
    said = said[inputs["attention_mask"] > 0] if inputs.get("attention_mask", said).ndim == 2 else said
    return [said.detach(), *torch.autograd.grad(said.square().mean(), list(model.parameters()))]


def left_padded() -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :9] = 0
    return mask


def test_no_graph_holds_a_number_for_every_head_query_and_key() -> None:
    """And compiled, a padded model in one graph says and learns what it does otherwise."""
    sizes: list[int] = []

    def measured(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            held = node.meta.get("val")
            sizes.extend(x.numel() for x in (held if isinstance(held, tuple | list) else [held]) if x is not None)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    model, mask = prepared("gpt2", "kerple", n_layer=1), left_padded()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=measured), fullgraph=True)
    ours = learned(model, compiled, attention_mask=mask, use_cache=False)
    for one, other in zip(ours, learned(model, model, attention_mask=mask), strict=True):
        assert_same(one, other)
    assert max(sizes) < 2 * 4 * LENGTH * LENGTH


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "name"), [("gpt2", "alibi"), ("gpt2", "kerple"), ("llama", "t5"), ("bert", "kerple")]
)
def test_a_compiled_model_says_and_learns_the_same(subject: str, name: str) -> None:
    """Plain, padded, with holes, under a window, and with positions that leave some out; checkpointed, too."""
    torch._dynamo.reset()
    model = prepared(subject, name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    holes, places = torch.ones(2, LENGTH, dtype=torch.long), torch.arange(LENGTH)
    holes[:, 7] = 0
    window = (places[:, None] - places).abs().lt(9).tril()[None, None].expand(2, 1, -1, -1)
    inputs: list[dict[str, Any]] = [{}, {"attention_mask": left_padded()}, {"attention_mask": holes}]
    inputs += [{"attention_mask": window}, {"position_ids": 3 * places[None]}]
    for given in inputs:
        for one, other in zip(learned(model, compiled, **given), learned(model, model, **given), strict=True):
            assert_same(one, other)
    model.config.use_cache = False  # as it has to be where layers are checkpointed
    model.gradient_checkpointing_enable()
    for one, other in zip(learned(model, compiled), learned(model, model), strict=True):
        assert_same(one, other)


@pytest.mark.slow
def test_two_graphs_stand_for_all_lengths() -> None:
    torch._dynamo.reset()
    model, counter = prepared("gpt2", "t5"), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (20, 21, 24, 31, 48, 64, 65, 100, 130):
        assert_same(logits(compiled, tokens(2, length), use_cache=False), logits(model, tokens(2, length)))
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_model_compiled_by_inductor(name: str) -> None:
    torch._dynamo.reset()
    model, tokenizer = stories260k()
    posenc.patch(model, TRAINED[name], verify=False)
    compiled = torch.compile(model, fullgraph=True)
    text = tokenizer("Once upon a time there was a girl who had a red ball. " * 9).input_ids
    ids, mask = torch.tensor([text, [0] * 30 + text[:-30]]), torch.ones(2, len(text), dtype=torch.long)
    mask[1, :30] = 0
    given = {"attention_mask": mask, "use_cache": False}
    parameters = list(model.parameters())
    ours, theirs = (call(ids, **given).logits[mask > 0] for call in (compiled, model))
    assert_same(ours, theirs)
    pulled = [torch.autograd.grad(said.logsumexp(-1).mean(), parameters) for said in (ours, theirs)]
    for one, other in zip(*pulled, strict=True):
        assert_same(one, other)
