"""The trial of a declared record is as strict as the stock module can be followed, and no stricter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_posenc as posenc
from tests.families.models import stock
from tests.models import assert_same, logits, sharpened, tokens


def neo(table: int, window: int) -> PreTrainedModel:
    """GPT-Neo with one local layer and a table of positions of that length."""
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    ids = {"bos_token_id": 1, "eos_token_id": None}
    kinds = [[["global", "local"], 1]]
    config = AutoConfig.for_model(
        "gpt_neo", **sizes, **ids, attention_types=kinds, window_size=window, max_position_embeddings=table
    )
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(config)
    return sharpened(model).eval()


@pytest.mark.parametrize(("table", "window"), [(12, 8), (64, 80), (64, 64)])
def test_a_window_that_the_table_ends_before_is_kept(table: int, window: int) -> None:
    """The stock module cannot look that far; a patched one does, and still sees the nearest keys only."""
    model, long = neo(table, window), neo(160, window)
    weights = {name: value for name, value in model.state_dict().items() if "wpe" not in name}
    long.load_state_dict(weights, strict=False)
    for one in (model, long):
        posenc.patch(one, posenc.Alibi())
    assert_same(logits(model, tokens(2, 150)), logits(long, tokens(2, 150)))


@pytest.mark.parametrize("model_type", ["bloom", "gpt_neo", "mpt"])
def test_double_precision_is_held_to_what_the_stock_class_rounds(model_type: str) -> None:
    posenc.patch(stock(model_type).double(), posenc.Alibi())


def test_the_same_rows_in_double_precision_say_the_same() -> None:
    model, ids = stock("gpt_neo").double(), tokens(2, 40)
    before = logits(model, ids)
    posenc.patch(model, posenc.Learned())
    assert_same(logits(model, ids), before, 1e-6)
