"""Where the context of a real model ends, by the loss of the same tokens under growing context."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest

from hf_posenc.evaluation import perplexity_by_length
from tests import checkpoints

TRAINED = 8192
"""Positions that SmolLM2 was trained on."""


@pytest.mark.slow
def test_smollm2_says_where_its_context_ends() -> None:
    """By the last 200 tokens of each quarter of a document of 113,108 tokens; about a quarter of an hour on one core.

    The loss rises slowly at first: by 0.1 % at 9,011 tokens, by 1.0 % at 9,830, and by a tenth soon after.
    """
    model, tokenizer = checkpoints.smollm2()
    ids = tokenizer("\n\n".join(topics[name] for name in sorted(topics)), verbose=False)["input_ids"]
    quarter = len(ids) // 4
    quarters = [ids[first : first + quarter] for first in range(0, 4 * quarter, quarter)]
    lengths = [int(part * TRAINED) for part in (1, 1.2, 1.3)]
    curve = perplexity_by_length(model, quarters, lengths, protocol="fixed_target")
    print(curve.nll, curve.stderr, curve.effective_length)
    assert len(ids) > 100_000
    assert curve.trained_length == TRAINED
    assert curve.effective_length in lengths[:2]
