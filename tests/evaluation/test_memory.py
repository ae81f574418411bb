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
import hf_posenc as posenc
from transformers import GPT2Config, GPT2LMHeadModel
from hf_posenc.evaluation import perplexity_by_length

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 / (2**10 if sys.platform == "darwin" else 1)

patched, layers = sys.argv[1] == "alibi", int(sys.argv[2])
model = GPT2LMHeadModel(GPT2Config(n_positions=1024 if patched else 16384, n_layer=layers))
if patched:
    posenc.patch(model, posenc.Alibi())
document = torch.randint(0, 50257, (16385,))
before = peak()
curve = perplexity_by_length(model, [document], [16384])
assert curve.n_tokens[16384] == 16384
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "layers"),
    [("stock", 12), ("alibi", 1)],  # what a bias takes is given back after every layer
)
def test_sixteen_thousand_tokens_of_gpt2_small_fit_in_two_gib(encoding: str, layers: int) -> None:
    pytest.importorskip("resource")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, encoding, str(layers)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    above_weights = float(done.stdout)
    assert 0.0 < above_weights < 2.0  # the logits alone would take 3.1 GiB
