"""Cross-attention has no positions and keeps its class, its cache and its say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

import hf_posenc as posenc
from tests.models import SPECS, SUBJECTS, assert_same, cells, in_steps, largest, logits, tokens

DECODERS = ["gpt2", "bert-decoder", "roberta-decoder"]


def seeing(subject: str, spec: str, backend: str = "sdpa") -> Any:
    model = SUBJECTS[subject].fresh(add_cross_attention=True, is_decoder=True, attn_implementation=backend)
    return posenc.patch(model, SPECS[spec])


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(("subject", "spec"), cells(DECODERS, ["alibi", "rope", "rope-dynamic", "learned-tile"]))
def test_the_order_of_what_is_attended_to_plays_no_part(subject: str, spec: str, backend: str) -> None:
    model = seeing(subject, spec, backend)
    crossing = [
        type(m).__name__ for n, m in model.named_modules() if n.endswith(("crossattention", "crossattention.self"))
    ]
    assert set(crossing) <= {"GPT2Attention", "BertAttention", "BertCrossAttention", "RobertaAttention"} | {
        "RobertaCrossAttention"
    }
    ids, encoded = tokens(2, 40), torch.randn(2, 9, 32)
    said = logits(model, ids, encoder_hidden_states=encoded)
    assert_same(logits(model, ids, encoder_hidden_states=encoded[:, torch.randperm(9)]), said)
    assert largest(logits(model, ids, encoder_hidden_states=encoded.roll(1, 0)) - said) > 1e-3
    mask = torch.ones(2, 12)
    mask[:, 9:] = 0
    longer = torch.cat([encoded, torch.randn(2, 3, 32)], dim=1)
    padded = {"encoder_hidden_states": longer, "encoder_attention_mask": mask}
    stock = SUBJECTS[subject].fresh(add_cross_attention=True, is_decoder=True)
    if largest(logits(stock, ids, **padded) - logits(stock, ids, encoder_hidden_states=encoded)) < 1e-5:
        # transformers 5.5 has GPT-2 look at padding on the other side; that is not for us to mend
        assert_same(logits(model, ids, **padded), said)
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    steps = [30, 1, 1, 5, 3]
    pieces, start = [], 0
    for size in steps:
        piece = ids[:, start : start + size]
        pieces.append(logits(model, piece, encoder_hidden_states=encoded, past_key_values=cache, use_cache=True))
        start += size
    assert_same(torch.cat(pieces, 1), said)


def test_in_steps_is_what_it_says() -> None:
    """The helper that the other contracts lean on cuts its inputs where it should."""
    model = SUBJECTS["gpt2"].fresh()
    ids = tokens(1, 10)
    assert_same(in_steps(model, ids, [4, 6], DynamicCache(config=model.config)), logits(model, ids))
