"""Small random models, texts and recipes on which conversions take a moment."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import hf_posenc as posenc
from hf_posenc.conversion.recipe import Absorb, Calibrate, Distill, Recipe

WORDS, LENGTH = 60, 16
KERPLE = posenc.encoding("kerple", per_layer=True)
SMALL: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 32, "max_position_embeddings": LENGTH}
SIZES = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}


def gpt2(**fields: Any) -> GPT2LMHeadModel:
    """Return a small random GPT-2 in which positions matter."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**(sizes | SIZES | fields))).eval()
    torch.nn.init.normal_(model.transformer.wpe.weight, mean=0.3, std=0.5)
    return model


def texts(rows: int = 40) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(1, WORDS, (LENGTH - 1,), generator=draw).tolist() for _ in range(rows)]


def masking() -> PreTrainedTokenizerFast:
    """Return a tokenizer with an end and a mask token, which a masked model needs even for texts given as ids."""
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", mask_token="w5")


def ids(rows: int = 3) -> torch.Tensor:
    return torch.tensor(texts(rows))


def difference(one: Any, other: Any) -> float:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def quick(**fields: Any) -> Recipe:
    """Return a recipe of few steps, without calibration."""
    defaults = {"tokens": 6 * 4 * LENGTH, "batch_size": 4, "learning_rate": 1e-2}
    return Recipe(**(defaults | {"absorb": Absorb(), "distill": Distill()} | fields))  # type: ignore[arg-type]


CALIBRATED = {"calibrate": Calibrate(rows=4)}
