"""Memory for real, in a process of its own (the default tier checks tensor sizes instead: test_perplexity.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATUS = Path("/proc/self/status")
PROGRAM = """
import json, sys, torch
import hf_posenc as posenc
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
from hf_posenc.evaluation import perplexity_by_length

def peak():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 2**10

encoding, layers, length, form = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = GPT2LMHeadModel(GPT2Config(n_positions=length if encoding == "stock" else 1024, n_layer=layers)).eval()
if encoding != "stock":
    posenc.patch(model, posenc.encoding(encoding))
document = torch.randint(0, 50257, (length + 1,), generator=torch.manual_seed(0))
before = peak()
if form == "ours":
    curve = perplexity_by_length(model, [document], [length])
    nll = curve.nll[length]
else:
    with torch.no_grad():
        nll = model(input_ids=document[None, :-1], labels=document[None, :-1]).loss.item()
print(json.dumps({"above": peak() - before, "total": peak(), "nll": nll}))
"""


def measured(encoding: str, layers: int, length: int, form: str = "ours") -> dict[str, float]:
    """Peak memory in MiB of a process that measures a GPT-2 of small's width: in all, and above what the model takes.

    The high-water mark of a process is new after `exec`, unlike `ru_maxrss`, which its parent's may hide.
    """
    if not STATUS.exists():
        pytest.skip("this system does not tell the memory of a process")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, encoding, str(layers), str(length), form],
        capture_output=True,
        text=True,
        env=environment,
        timeout=7200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    print(encoding, layers, length, form, found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "layers"),
    [("stock", 12), ("alibi", 1)],  # what a bias takes is given back after every layer
)
def test_sixteen_thousand_tokens_of_gpt2_small_fit_in_two_gib(encoding: str, layers: int) -> None:
    assert 0 < measured(encoding, layers, 16384)["above"] < 2048  # the logits alone would take 3,141 MiB


@pytest.mark.slow
def test_eight_thousand_tokens_take_a_quarter_of_what_all_logits_take() -> None:
    ours, full = (measured("stock", 12, 8192, form) for form in ("ours", "full"))
    assert 8192 * 768 * 4 / 2**20 < ours["above"] <= 720  # more than one hidden state, or nothing was measured
    assert 4 * ours["above"] <= full["above"]


@pytest.mark.slow
def test_sixty_four_thousand_tokens_of_a_rotary_gpt2_small_fit_in_four_gib() -> None:
    """The process in all, its weights and libraries included; about half an hour on one core."""
    assert measured("rope", 12, 65536)["total"] <= 4096
