"""Every method that needs no training, on two real rotary models beyond the length that they were trained on."""

from __future__ import annotations

import math
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_posenc as posenc
from tests import checkpoints

EXTENDING = ["dynamic", "yarn", "self_extend", "rerope", "dual_chunk"]
"""Those that have to say more of the last block than the model by itself."""


def methods(trained: int, factor: float, mode: str) -> dict[str, posenc.EncodingConfig | None]:
    """Name -> encoding for texts `factor` times as long as the trained length, in tokens; None leaves the model alone.

    Static scalings slow down by 2: the small model has four pairs a head, of which a factor of 4 leaves too little.
    `mode` is that of `dynamic`.
    """
    scalings: dict[str, dict[str, Any]] = {
        "linear": {"factor": 2.0},
        "ntk": {"factor": 2.0},
        "dynamic": {"factor": 1.0, "mode": mode},
        "ntk_by_parts": {"factor": 2.0},
        "yarn": {"factor": 2.0},
    }
    half = trained // 2
    group = 2 * math.ceil(factor)
    return {
        "unpatched": None,
        **{name: posenc.RoPE(scaling={"rope_type": name, **fields}) for name, fields in scalings.items()},
        "self_extend": posenc.encoding("self_extend", window=half, group=group),
        "rerope": posenc.encoding("rerope", window=half),
        "rerope, log-n": posenc.encoding("rerope", window=half, temperature={"kind": "log_n"}),
        "leaky rerope": posenc.encoding("rerope", window=half, leak=2.0 * group),
        "dual_chunk": posenc.encoding("dual_chunk"),
        "string": posenc.encoding("string", local=trained // 16),
        "lm_infinite": posenc.encoding("lm_infinite"),
        "sinks": posenc.encoding("sinks"),
        "log-n alone": posenc.RoPE(temperature={"kind": "log_n"}),
    }


@torch.no_grad()
def losses(model: Any, ids: Tensor) -> Tensor:
    """The loss of every token of (1, n) ids after the first, in nats, (n - 1,)."""
    states = model.model(input_ids=ids[:, :-1]).last_hidden_state[0]
    parts = zip(states.split(1024), ids[0, 1:].split(1024), strict=True)
    return torch.cat([torch.nn.functional.cross_entropy(model.lm_head(s), t, reduction="none") for s, t in parts])


def table(
    model: Any, ids: Tensor, trained: int, last: int, *, mode: str = "consistent"
) -> dict[str, tuple[float, float]]:
    """Perplexity inside the trained length, and in the last block of a text, by method; printed row by row."""
    found: dict[str, tuple[float, float]] = {}
    for name, config in methods(trained, (ids.shape[1] - 1) / trained, mode).items():
        if config is not None:
            posenc.patch(model, config)
        loss = losses(model, ids)
        assert loss.isfinite().all(), name
        inside, end = (math.exp(part.mean().item()) for part in (loss[: trained - 1], loss[-last:]))
        found[name] = inside, end
        if config is not None:
            posenc.unpatch(model)
        print(f"{name:>14}: {inside:8.3f} inside {trained}, {end:8.3f} in the last {last}", flush=True)
    return found


def stories(count: int) -> tuple[Any, Tensor]:
    """A small Llama and as many tokens of stories, each written by the model itself from a title of one word."""
    model, tokenizer = checkpoints.stories260k()
    torch.manual_seed(0)
    starts = ["Once upon a time, there was a", "One day, Lily", "Tom and Sue", "The little cat", "A big red ball"]
    written = [tokenizer("", return_tensors="pt").input_ids[:, :1]]
    while sum(part.shape[1] for part in written) <= count:
        ids = tokenizer(starts[len(written) % 5], return_tensors="pt").input_ids
        written.append(model.generate(ids, do_sample=True, temperature=0.8, max_new_tokens=300, pad_token_id=0)[:, 1:])
    return model, torch.cat(written, dim=1)[:, : count + 1]


def check(found: dict[str, tuple[float, float]], *, worse: tuple[str, ...] = ("linear",)) -> None:
    """What the papers say of these methods; those that cost more than 8 % inside the trained length are named."""
    inside, last = found["unpatched"]
    for name in EXTENDING:
        assert found[name][1] < last, name
    for name, (within, _) in found.items():
        assert (within > 1.08 * inside) == (name in worse), name


@pytest.mark.slow
def test_stories_at_four_times_the_length() -> None:
    """Of four pairs a head, NTK by parts slows two: that costs 9.8 %, where YaRN's ramp by pairs costs 7.1 %."""
    model, ids = stories(2048)
    check(table(model, ids, 512, 512), worse=("linear", "ntk_by_parts"))


@pytest.mark.slow
def test_smollm2_at_one_and_a_half_times_the_length() -> None:
    """`dynamic` as transformers has it, one base for the text: one for each of 4,096 queries takes hours."""
    model, tokenizer = checkpoints.smollm2()
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :12_289]
    check(table(model, ids, 8192, 1024, mode="hf_compat"))
