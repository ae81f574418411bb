"""Tiny random models and a slow, readable oracle for the measurement tests."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from hf_posenc.evaluation import LengthCurve

VOCABULARY = 97
_IDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def gpt2(positions: int = 64) -> nn.Module:
    """GPT-2, 2 layers of 64, with a learned table."""
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=positions, **_IDS)
    return sharpened(GPT2LMHeadModel(config))


def llama() -> nn.Module:
    """Llama, 2 layers of 64, rotary."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        **_IDS,
    )
    return sharpened(LlamaForCausalLM(config))


def opt() -> nn.Module:
    """OPT, 2 layers of 64, a table with two offset rows and a projection before the head."""
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        **_IDS,
    )
    return sharpened(OPTForCausalLM(config))


def sharpened(model: nn.Module) -> nn.Module:
    """Scale the weights up, so that losses of an untrained model differ from token to token by whole nats."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.mul_(4.0 if "wpe" not in name and "embed_positions" not in name else 20.0)
    return model.eval()


MODELS = {"gpt2": gpt2, "llama": llama, "opt": opt}


def random_documents(*sizes: int) -> list[list[int]]:
    """Documents of these many random tokens."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(2, VOCABULARY, (size,), generator=generator).tolist() for size in sizes]


def naive_nll(model: nn.Module, ids: list[int], contexts: list[tuple[int, int]]) -> list[float]:
    """For each (begin, i): nats of token i + 1 given tokens begin .. i, by one forward pass each, in float64."""
    losses = []
    with torch.no_grad():
        for begin, last in contexts:
            logits = model(input_ids=torch.tensor([ids[begin : last + 1]])).logits[0, -1].double()
            losses.append(-torch.log_softmax(logits, -1)[ids[last + 1]].item())
    return losses


def curve_of(**values: object) -> LengthCurve:
    """A curve with these sums and plain values elsewhere."""
    lengths = tuple(values["nll_sum"])  # type: ignore[arg-type]
    rest = {
        "name": "m",
        "lengths": lengths,
        "n_correct": {},
        "origin_nll": {},
        "stderr": dict.fromkeys(lengths),
        "interval": dict.fromkeys(lengths),
        "window": {length: length for length in lengths},
        "stride": {length: length for length in lengths},
        "refused": {},
        "trained_length": 64,
        "protocol": "nonoverlapping",
        "bos_policy": "none",
        "n_documents": 1,
        "n_left_out": 0,
        "n_bytes": None,
        "text_hash": "0",
        "model_hash": "0",
        "dtype": "float32",
        "versions": {},
    }
    return LengthCurve(**(rest | values))  # type: ignore[arg-type]
