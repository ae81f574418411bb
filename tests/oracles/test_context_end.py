"""Where the context of a real model ends, by the loss at each position."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest

from hf_posenc.evaluation import perplexity_by_position
from tests import checkpoints


@pytest.mark.slow
def test_smollm2_says_where_its_context_ends() -> None:
    """Trained on 8,192 positions."""
    model, tokenizer = checkpoints.smollm2()
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, verbose=False)["input_ids"]
    documents = [ids[first : first + 12_289] for first in range(0, 2 * 12_289, 12_289)]
    curve = perplexity_by_position(model, documents, 12_288)
    print(*zip(curve.edges, curve.nll, strict=False), curve.effective_length)
    assert curve.trained_length == 8192
    assert curve.effective_length is not None
    assert 0.9 * 8192 <= curve.effective_length <= 1.1 * 8192
