"""What the benchmark lets models do: bodies of a few layers with random weights, and the work that they are given."""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Cache, DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel, StaticCache

from hf_posenc.config import encoding
from hf_posenc.errors import ConfigError, did_you_mean
from hf_posenc.patching import is_patched, patch, unpatch

LAYERS, HEADS, WIDTH, VOCABULARY = 2, 12, 768, 512
SPARE = 64
"""Tokens that a model and a static cache have room for, beyond those of a row."""
WORK = ("forward", "train", "decode", "static", "padded", "attention", "patch")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_WIDE = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
_T5 = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 4 * WIDTH, "num_heads": HEADS, "num_layers": LAYERS}
STOCK: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Model", "GPT2Config", {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, **_NO_DROPOUT}),
    "bert": ("BertModel", "BertConfig", {**_WIDE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "bloom": ("BloomModel", "BloomConfig", {"hidden_size": WIDTH, "n_head": HEADS, "n_layer": LAYERS}),
    "mpt": ("MptModel", "MptConfig", {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS}),
    "falcon": ("FalconModel", "FalconConfig", {**_WIDE, "alibi": True, "multi_query": False, "bias": True}),
    "gpt_neox": ("GPTNeoXModel", "GPTNeoXConfig", {**_WIDE, "intermediate_size": 4 * WIDTH}),
    "t5": ("T5EncoderModel", "T5Config", {**_T5, "dropout_rate": 0.0}),
}
"""Name of a stock model -> its class, that of its config, and the fields of the shape of GPT-2 small, cut in depth."""
LENGTHS = ("n_positions", "max_position_embeddings", "max_seq_len")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model is to do.

    Attributes:
        work: `forward`, `train` (forward and backward), `decode` (one token over a cache of that length), `static` (the
            same over a cache that does not grow: it has 64 slots more), `padded` (forward of four rows, left-padded by
            nothing, an eighth, two eighths and three eighths), `attention` (forward of the attention of one layer), or
            `patch` (the encoding into all of GPT-2 small, verified, and out again).
        length: tokens.
        dtype: of weights and states, `float32` or `bfloat16`.
    """

    work: str
    length: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Check the names; raises ConfigError."""
        for what, value, known in (("work", self.work, WORK), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                raise ConfigError(f"unknown {what} {value!r}; {did_you_mean(value, known)}")


def subject(name: str, length: int, dtype: str = "float32") -> PreTrainedModel:
    """Return a model by name, for texts of that many tokens, in eval mode; raises ConfigError where there is none."""
    stock, _, inside = name.partition("+")
    if stock not in STOCK:
        raise ConfigError(f"no stock model {stock!r}; {did_you_mean(stock, STOCK)}")
    model_name, config_name, fields = STOCK[stock]
    config_class = getattr(transformers, config_name)
    known = [field for field in LENGTHS if hasattr(config_class(), field)]
    config = config_class(**fields, vocab_size=VOCABULARY, **dict.fromkeys(known[:1], length + SPARE))
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, model_name)(config).to(DTYPES[dtype])
    model.eval()
    return patch(model, encoding(inside), verify=False) if inside else model


def job(name: str, task: Task) -> Callable[[], object]:
    """Return the work of a model, to be done as often as one likes."""
    work, length = task.work, task.length
    if work == "patch":
        return _patching(name)
    model: Any = subject(name, length, task.dtype)
    ids = _ids(length, rows=4 if work == "padded" else 1)
    if work == "train":
        return lambda: model(ids).last_hidden_state.square().mean().backward()
    if work in ("decode", "static"):
        cache = _filled(model, length, static=work == "static")
        return lambda: _asked(model, ids[:, :1], past_key_values=cache, use_cache=True)
    if work == "padded":
        mask = (torch.arange(length) >= torch.arange(4)[:, None] * length // 8).long()
        return lambda: _asked(model, ids, attention_mask=mask)
    if work == "attention":
        states = torch.randn(1, length, WIDTH, dtype=model.dtype)
        return lambda: _asked(model.h[0].attn, states)
    return lambda: _asked(model, ids)


def _ids(length: int, *, rows: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def _patching(name: str) -> Callable[[], object]:
    stock, _, inside = name.partition("+")
    if stock != "gpt2":
        raise ConfigError(f"what is patched is all of GPT-2 small, so the subject is gpt2+..., was: {name!r}")
    model, config = GPT2LMHeadModel(GPT2Config(**_NO_DROPOUT)).eval(), encoding(inside)

    def work() -> None:
        if is_patched(model):
            unpatch(model)
        patch(model, config)

    return work


def _filled(model: PreTrainedModel, length: int, *, static: bool) -> Cache:
    """Return a cache with random keys and values of so many tokens."""
    cache = StaticCache(config=model.config, max_cache_len=length + SPARE) if static else DynamicCache()
    for layer in range(LAYERS):
        cache.update(*torch.randn(2, 1, HEADS, length, WIDTH // HEADS), layer)
    return cache


@torch.no_grad()
def _asked(model: Any, ids: Tensor, **inputs: Any) -> object:
    return model(ids, **inputs)


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of doing some work once."""
    start = time.process_time()
    work()
    return time.process_time() - start


def error(name: str, task: Task) -> float:
    """Return how far last hidden states are off those of the same weights in float64, root mean square, relative."""
    model, ids = subject(name, task.length, task.dtype), _ids(task.length)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(ids).last_hidden_state
        found = model(ids).last_hidden_state.double()
    return float((found - exact).norm() / exact.norm())


def peak(name: str, task: Task) -> float:
    """Return by how much a process grows while it does the work once, MiB; NaN where the system does not say.

    Its memory allocator is told to give large blocks back at once: what it keeps otherwise differs from run to run.
    """
    before = dict(os.environ)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # of glibc
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_peak, name, task).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _peak(name: str, task: Task) -> float:
    torch.set_num_threads(1)
    short = Task(work="forward" if task.work == "patch" else task.work, length=32, dtype=task.dtype)
    job(name, short)()  # what is loaded on the first call is not the work's
    work = job(name, task)
    before = _high_water()
    work()
    return _high_water() - before


def _high_water() -> float:
    """Return the largest memory that this process ever had, MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # the other number counts what the parent had when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return float(line.split()[1]) / 2**10
    try:
        import resource
    except ImportError:
        return float("nan")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 / (2**10 if sys.platform == "darwin" else 1)
