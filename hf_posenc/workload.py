"""What the benchmark lets models do: bodies of a few layers with random weights, and the work that they are given."""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Cache, DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel, StaticCache

from hf_posenc.config import encoding
from hf_posenc.encodings.alibi import slopes as slopes_of
from hf_posenc.errors import ConfigError, did_you_mean
from hf_posenc.patching import is_patched, patch, unpatch

LAYERS, HEADS, WIDTH, VOCABULARY = 2, 12, 768, 512
SPARE = 64
"""Tokens that a model and a static cache have room for, beyond those of a row."""
WORK = ("forward", "train", "decode", "static", "padded", "attention", "patch")
DEVICES = ("cpu", "cuda")
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
    "llama": ("LlamaModel", "LlamaConfig", {**_WIDE, "intermediate_size": 4 * WIDTH}),
    "t5": ("T5EncoderModel", "T5Config", {**_T5, "dropout_rate": 0.0}),
    "small": ("GPT2Model", "GPT2Config", {"n_embd": 256, "n_head": 4, "n_layer": LAYERS, **_NO_DROPOUT}),
}
"""Name of a stock model -> its class, that of its config, and the fields of the shape of GPT-2 small, cut in depth."""
DENSE = "dense"
"""Behind a colon after a stock model: it is given ALiBi as a mask of all pairs and heads, which costs it no time."""
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
        device: `cpu` or `cuda`.
    """

    work: str
    length: int
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the names; raises ConfigError."""
        named = (("work", self.work, WORK), ("dtype", self.dtype, DTYPES), ("device", self.device, DEVICES))
        for what, value, known in named:
            if value not in known:
                raise ConfigError(f"unknown {what} {value!r}; {did_you_mean(value, known)}")


def subject(name: str, task: Task) -> PreTrainedModel:
    """Return a model by name, in eval mode; raises ConfigError where there is none.

    Args:
        name: of a stock model, with its attention backend behind an `@` where that is not sdpa, and an encoding behind
            a `+`: `llama@flex_attention+alibi`.
        task: what it is for.
    """
    stock, _, inside = name.partition(":")[0].partition("+")
    stock, _, backend = stock.partition("@")
    if stock not in STOCK:
        raise ConfigError(f"no stock model {stock!r}; {did_you_mean(stock, STOCK)}")
    model_name, config_name, fields = STOCK[stock]
    config_class = getattr(transformers, config_name)
    known = [field for field in LENGTHS if hasattr(config_class(), field)]
    config = config_class(**fields, vocab_size=VOCABULARY, **dict.fromkeys(known[:1], task.length + SPARE))
    torch.manual_seed(0)
    model: Any = getattr(transformers, model_name)(config).eval().to(task.device, DTYPES[task.dtype])
    if backend:
        model.set_attn_implementation(backend)
    whole: PreTrainedModel = patch(model, encoding(inside), verify=False) if inside else model
    return whole


def job(name: str, task: Task) -> Callable[[], object]:
    """Return the work of a model, to be done as often as one likes."""
    work, length = task.work, task.length
    if work == "patch":
        return _patching(name, task)
    model: Any = subject(name, task)
    ids = _ids(task, rows=4 if work == "padded" else 1)
    if name.endswith(f":{DENSE}"):
        given = _dense_alibi(model, task)
        return lambda: _asked(model, ids, attention_mask=given)
    if work == "train":
        return lambda: model(ids).last_hidden_state.square().mean().backward()
    if work in ("decode", "static"):
        cache = _filled(model, task)
        return lambda: _asked(model, ids[:, :1], past_key_values=cache, use_cache=True)
    if work == "padded":
        mask = (torch.arange(length) >= torch.arange(4)[:, None] * length // 8).long().to(task.device)
        return lambda: _asked(model, ids, attention_mask=mask)
    if work == "attention":
        states = torch.randn(1, length, WIDTH, dtype=model.dtype, device=task.device)
        return lambda: _asked(model.h[0].attn, states)
    return lambda: _asked(model, ids)


def _ids(task: Task, *, rows: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, task.length), generator=torch.Generator().manual_seed(0)).to(task.device)


def _dense_alibi(model: PreTrainedModel, task: Task) -> Tensor:
    """Return the bias of ALiBi for all pairs, none ahead, as stock models take a mask: (1, h, n, n)."""
    heads, places = model.config.num_attention_heads, torch.arange(task.length, device=task.device)
    distance = places[:, None] - places
    slopes = torch.tensor(slopes_of(heads), device=task.device)
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)
    return bias[None].to(DTYPES[task.dtype])


def _patching(name: str, task: Task) -> Callable[[], object]:
    stock, _, inside = name.partition("+")
    if stock != "gpt2":
        raise ConfigError(f"what is patched is all of GPT-2 small, so the subject is gpt2+..., was: {name!r}")
    model: Any = GPT2LMHeadModel(GPT2Config(**_NO_DROPOUT)).eval().to(task.device)
    config = encoding(inside)

    def work() -> None:
        if is_patched(model):
            unpatch(model)
        patch(model, config)

    return work


def _filled(model: PreTrainedModel, task: Task) -> Cache:
    """Return a cache with random keys and values of the tokens of a task."""
    static = task.work == "static"
    cache = StaticCache(config=model.config, max_cache_len=task.length + SPARE) if static else DynamicCache()
    for layer in range(LAYERS):
        states = torch.randn(2, 1, HEADS, task.length, WIDTH // HEADS, dtype=DTYPES[task.dtype], device=task.device)
        cache.update(*states, layer)
    return cache


@torch.no_grad()
def _asked(model: Any, ids: Tensor, **inputs: Any) -> object:
    return model(ids, **inputs)


def seconds(work: Callable[[], object], device: str = "cpu") -> float:
    """Return the time of doing some work once: that of the CPU, or on the clock until a GPU is done."""
    if device != "cpu":
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start
    start = time.process_time()
    work()
    return time.process_time() - start


def error(name: str, task: Task) -> float:
    """Return how far last hidden states are off those of the same weights in float64, root mean square, relative."""
    model, ids = subject(name, task), _ids(task)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(ids).last_hidden_state
        found = model(ids).last_hidden_state.double()
    return float((found - exact).norm() / exact.norm())


def peak(name: str, task: Task) -> float:
    """Return by how much memory grows while the work is done once, MiB; NaN where the system does not say.

    On a GPU that of its allocator counts, else that of a process of its own.

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
    short = replace(task, work="forward" if task.work == "patch" else task.work, length=32)
    job(name, short)()  # what is loaded on the first call is not the work's
    work = job(name, task)
    if task.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = _high_water(task.device)
    work()
    return _high_water(task.device) - before


def _high_water(device: str) -> float:
    """Return the largest memory that this process, or its share of a GPU, ever had, MiB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists():  # the other number counts what the parent had when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return float(line.split()[1]) / 2**10
    try:
        import resource
    except ImportError:
        return float("nan")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 / (2**10 if sys.platform == "darwin" else 1)
