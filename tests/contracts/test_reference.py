"""One attention layer of every family against an independent float64 computation from its own projections."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import naive
from tests.models import SPECS, SUBJECTS, VARIANTS, patched, tokens

LENGTH = 40
ATTENTION = {
    "gpt2": "attn",
    "opt": "self_attn",
    "llama": "self_attn",
    "gpt_neox": "attention",
    "bert": "attention.self",
}
LAST = {"gpt2": "c_proj", "opt": "out_proj", "llama": "o_proj", "gpt_neox": "dense"}
CASES = [
    *("gpt2", "gpt2-upcast", "gpt2-inverse-layer", "gpt2-unscaled", "opt", "gpt_neox", "llama", "llama-wide-head"),
    *("bert", "roberta", "bert-decoder"),
]


def kind_of(subject: str) -> str:
    return subject.replace("roberta", "bert").split("-")[0]


def second_layer(model: nn.Module, kind: str) -> nn.Module:
    return next(m for name, m in model.named_modules() if name.endswith(f".1.{ATTENTION[kind]}"))


def captured(model: nn.Module, kind: str, ids: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What the second layer's projections gave, by name, and what its attention made of it, (n, heads * d)."""
    layer, seen = second_layer(model, kind), {}
    handles = []
    for name, module in layer.named_children():
        if isinstance(module, nn.Dropout):
            continue

        def note(module: Any, inputs: Any, output: Tensor, name: str = name) -> None:
            seen[name], seen[f"{name}.in"] = output, inputs[0]

        handles.append(module.register_forward_hook(note))
    handles.append(layer.register_forward_hook(lambda m, i, output: seen.__setitem__("out", output[0])))
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return seen, seen["out"][0] if kind == "bert" else seen[f"{LAST[kind]}.in"][0]


def heads_of(seen: dict[str, Tensor], kind: str, width: int) -> list[list[list[list[float]]]]:
    """Queries, keys and values by head and token, before any position."""
    if kind == "gpt2":
        three = seen["c_attn"][0].chunk(3, dim=-1)
    elif kind == "gpt_neox":
        three = tuple(
            part.flatten(1) for part in seen["query_key_value"][0].view(LENGTH, 4, 3 * width).chunk(3, dim=-1)
        )
    elif kind == "bert":
        three = tuple(seen[name][0] for name in ("query", "key", "value"))
    else:
        three = tuple(seen[name][0] for name in ("q_proj", "k_proj", "v_proj"))
    return [part.view(LENGTH, -1, width).transpose(0, 1).double().tolist() for part in three]


def turned(heads: list[Any], turn: Any) -> list[Any]:
    return [[turn(vector, position) for position, vector in enumerate(head)] for head in heads]


@pytest.mark.parametrize("spec", ["alibi", "nope", "rope", "rope-partial", "rope-yarn", "rope-dynamic"])
@pytest.mark.parametrize("subject", CASES)
def test_attention_equals_the_naive_one(subject: str, spec: str) -> None:
    kind = kind_of(subject)
    model = patched(subject, spec, "eager")
    width = getattr(model.config, "head_dim", None) or model.config.hidden_size // 4
    seen, found = captured(model, kind, tokens(1, LENGTH))
    query, key, value = heads_of(seen, kind, width)
    causal = {**SUBJECTS, **VARIANTS}[subject].causal
    scale = {"gpt2-inverse-layer": 0.5 * width**-0.5, "gpt2-unscaled": 1.0}.get(subject, width**-0.5)
    attend = functools.partial(naive.attention, value=value, scale=scale, causal=causal)
    config = SPECS[spec]
    if spec == "alibi":
        expected = attend(query, key, bias=naive.alibi_bias(4, range(LENGTH), range(LENGTH)))
    elif spec == "nope":
        expected = attend(query, key, bias=None)
    else:
        partial = config.partial_rotary_factor or (0.5 if kind == "gpt_neox" else 1.0)  # type: ignore[attr-defined]
        dim = int(width * partial)

        def positioned(length: int) -> list[Any]:
            frequencies, factor = naive.rope_frequencies(500.0, dim, config.scaling, length)  # type: ignore[attr-defined]
            turn = functools.partial(naive.rotated, frequencies=frequencies, factor=factor)
            return attend(turned(query, turn), turned(key, turn), bias=None)

        expected = positioned(0)
        if spec == "rope-dynamic":
            for last in range(32, LENGTH):
                longer = positioned(last + 1)
                for head in range(4):
                    expected[head][last] = longer[head][last]
    exact = torch.tensor(expected, dtype=torch.float64).transpose(0, 1).flatten(1)
    assert torch.allclose(found.double(), exact, atol=2e-5 * float(exact.abs().max()), rtol=0)
