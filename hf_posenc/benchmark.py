"""What positions cost: patched models against unpatched ones and stock families, in time and in memory.

Models are bodies of a few layers with random weights; a ratio says how much of a model of that shape positions take.
Both sides of a row take turns in one process, on one thread, and CPU time is what counts, so that other work on the
machine disturbs little. Peak memory is that of a process of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from hf_posenc.config import encoding
from hf_posenc.errors import ConfigError, did_you_mean
from hf_posenc.patching import patch

LAYERS, HEADS, WIDTH, VOCABULARY = 2, 12, 768, 512
SPARE = 64
"""Tokens that a model and a static cache have room for, beyond those of a row."""
WORK = ("forward", "train", "decode", "static", "padded")
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_WIDE = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
STOCK: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Model", "GPT2Config", {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, **_NO_DROPOUT}),
    "bert": ("BertModel", "BertConfig", {**_WIDE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "bloom": ("BloomModel", "BloomConfig", {"hidden_size": WIDTH, "n_head": HEADS, "n_layer": LAYERS}),
    "mpt": ("MptModel", "MptConfig", {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS}),
    "falcon": ("FalconModel", "FalconConfig", {**_WIDE, "alibi": True, "multi_query": False, "bias": True}),
    "gpt_neox": ("GPTNeoXModel", "GPTNeoXConfig", {**_WIDE, "intermediate_size": 4 * WIDTH}),
}
"""Name of a stock model -> its class, that of its config, and the fields of the shape of GPT-2 small, cut in depth."""
LENGTHS = ("n_positions", "max_position_embeddings", "max_seq_len")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One claim: what a subject takes, as a share of what another one takes for the same work.

    Attributes:
        subject: a stock model, or one with an encoding in it, `gpt2+alibi`.
        against: the other one.
        work: `forward`, `train` (forward and backward), `decode` (one token over a cache of that length),
            `static` (the same over a cache that does not grow: it has 64 slots more), or `padded`
            (forward of four rows, left-padded by an eighth, two eighths and three eighths).
        length: tokens.
        goal: the ratio is to be at most this.
        short: whether the row belongs to the short run.
    """

    subject: str
    against: str
    work: str
    length: int
    goal: float
    short: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was measured for a row.

    Attributes:
        row: the claim.
        ratio: least CPU time of the subject over the least of the other one.
        median: median of the ratios of the rounds.
        seconds: least CPU time of the subject.
        extra: peak memory of the subject less that of the other one, MiB.
    """

    row: Row
    ratio: float
    median: float
    seconds: float
    extra: float


def rows_of(path: Path) -> list[Row]:
    """Read the claims of a JSON file, a list of objects with the fields of `Row`; raises ConfigError on a bad one."""
    rows = [Row(**fields) for fields in json.loads(path.read_text())]
    for row in rows:
        if row.work not in WORK:
            raise ConfigError(f"unknown work {row.work!r}; {did_you_mean(row.work, WORK)}")
    return rows


def measure(rows: Iterable[Row], *, rounds: int, memory: bool = True) -> Iterable[Outcome]:
    """Measure one row after the other, on one thread.

    Args:
        rows: the claims.
        rounds: how often either side works, at least 1; both are warmed up once before.
        memory: whether to measure peak memory too, which takes every row twice more.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for row in rows:
            jobs = [_job(name, row.work, row.length) for name in (row.subject, row.against)]
            times = [[_seconds(job) for job in jobs] for _ in range(rounds + 1)][1:]
            least = [min(column) for column in zip(*times, strict=True)]
            peaks = [peak(name, row.work, row.length) if memory else 0.0 for name in (row.subject, row.against)]
            yield Outcome(
                row=row,
                ratio=least[0] / least[1],
                median=statistics.median(one / other for one, other in times),
                seconds=least[0],
                extra=peaks[0] - peaks[1],
            )
    finally:
        torch.set_num_threads(threads)


def subject(name: str, length: int) -> PreTrainedModel:
    """Return a model by name, for texts of that many tokens, in eval mode; raises ConfigError where there is none."""
    stock, _, inside = name.partition("+")
    if stock not in STOCK:
        raise ConfigError(f"no stock model {stock!r}; {did_you_mean(stock, STOCK)}")
    model_name, config_name, fields = STOCK[stock]
    config_class = getattr(transformers, config_name)
    known = [field for field in LENGTHS if hasattr(config_class(), field)]
    config = config_class(**fields, vocab_size=VOCABULARY, **dict.fromkeys(known[:1], length + SPARE))
    model: PreTrainedModel = getattr(transformers, model_name)(config)
    model.eval()
    return patch(model, encoding(inside), verify=False) if inside else model


def _job(name: str, work: str, length: int) -> Callable[[], object]:
    """Return the work itself, to be called as often as one likes."""
    model = subject(name, length)
    ids = torch.randint(VOCABULARY, (4 if work == "padded" else 1, length), generator=torch.Generator().manual_seed(0))
    if work == "train":
        return lambda: model(ids).last_hidden_state.square().mean().backward()
    if work in ("decode", "static"):
        cache = _filled(model, length, static=work == "static")
        return lambda: _asked(model, ids[:, :1], past_key_values=cache, use_cache=True)
    if work == "padded":
        mask = (torch.arange(length) >= torch.arange(4)[:, None] * length // 8).long()
        return lambda: _asked(model, ids, attention_mask=mask)
    return lambda: _asked(model, ids)


def _filled(model: PreTrainedModel, length: int, *, static: bool) -> Cache:
    """Return a cache with random keys and values of so many tokens."""
    cache = StaticCache(config=model.config, max_cache_len=length + SPARE) if static else DynamicCache()
    for layer in range(LAYERS):
        cache.update(*torch.randn(2, 1, HEADS, length, WIDTH // HEADS), layer)
    return cache


@torch.no_grad()
def _asked(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> object:
    return model(ids, **inputs)


def _seconds(job: Callable[[], object]) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start


def peak(name: str, work: str, length: int) -> float:
    """Return by how much a process grows while it does the work once, MiB; NaN where the system does not say."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak, name, work, length).result()


def _peak(name: str, work: str, length: int) -> float:
    torch.set_num_threads(1)
    _job(name, work, 32)()  # what is loaded on the first call is not the work's
    job = _job(name, work, length)
    before = _high_water()
    job()
    return _high_water() - before


def _high_water() -> float:
    """Return the largest memory that this process ever had, MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # the other number counts what the parent had when it started this process
        return (
            float(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1]) / 2**10
        )
    try:
        import resource
    except ImportError:
        return float("nan")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 / (2**10 if sys.platform == "darwin" else 1)


def as_table(outcomes: Iterable[Outcome]) -> Table:
    """Return the outcomes as a table to print."""
    table = Table("subject", "against", "work", "tokens", "ratio", "median", "goal", "seconds", "extra MiB")
    for outcome in outcomes:
        row = outcome.row
        numbers = (f"{outcome.ratio:.3f}", f"{outcome.median:.3f}", f"{row.goal:.2f}", f"{outcome.seconds:.3f}")
        style = None if outcome.ratio <= row.goal else "bold"
        table.add_row(
            row.subject, row.against, row.work, str(row.length), *numbers, f"{outcome.extra:.0f}", style=style
        )
    return table


def as_json(outcomes: Iterable[Outcome], *, rounds: int) -> str:
    """Return the outcomes with the versions they were measured with."""
    head = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": 1, "rounds": rounds}
    return json.dumps({**head, "layers": LAYERS, "outcomes": [asdict(outcome) for outcome in outcomes]}, indent=1)
