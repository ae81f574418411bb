"""Memory for real, in a process of its own (the default tier checks tensor sizes instead: test_perplexity.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import resource, sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
from hf_posenc.evaluation import perplexity_by_length

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 / (2**10 if sys.platform == "darwin" else 1)

model = GPT2LMHeadModel(GPT2Config(n_positions=16384))
document = torch.randint(0, 50257, (16385,))
before = peak()
curve = perplexity_by_length(model, [document], [16384])
assert curve.n_tokens[16384] == 16384
print(peak() - before)
"""


@pytest.mark.slow
def test_sixteen_thousand_tokens_of_gpt2_small_fit_in_two_gib() -> None:
    pytest.importorskip("resource")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr
    above_weights = float(done.stdout)
    assert 0.0 < above_weights < 2.0  # the logits alone would take 3.1 GiB
