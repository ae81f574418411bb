"""The evaluator sees patched and wrapped models as it sees any other."""

from __future__ import annotations

import math
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

import hf_posenc as posenc
from hf_posenc.evaluation import perplexity_by_length
from tests.evaluation.models import gpt2, naive_nll, random_documents


@pytest.mark.parametrize("encoding", [posenc.Alibi(), posenc.NoPE(), posenc.RoPE(), posenc.Sinusoidal()], ids=str)
def test_a_patched_model_goes_past_its_table(encoding: Any) -> None:
    model: Any = gpt2()
    posenc.patch(model, encoding)
    documents = random_documents(101)
    expected = math.fsum(naive_nll(model, documents[0], [(0, i) for i in range(100)]))
    curve = perplexity_by_length(model, documents, [64, 128])
    assert curve.nll_sum[128] == pytest.approx(expected, rel=1e-6)
    assert not curve.refused
    assert curve.trained_length == 64
    batched = perplexity_by_length(model, random_documents(300, 150), [32], batch_size=4)
    alone = perplexity_by_length(model, random_documents(300, 150), [32])
    assert batched.nll_sum[32] == pytest.approx(alone.nll_sum[32], rel=1e-6)


def test_an_adapter_is_part_of_the_model_and_does_not_hide_its_table() -> None:
    plain, documents = gpt2(), random_documents(60, 80)
    without = perplexity_by_length(plain, documents[:1], [64]).nll_sum[64]
    adapter = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model: Any = get_peft_model(plain, adapter)  # type: ignore[arg-type]
    expected = math.fsum(naive_nll(model, documents[0], [(0, i) for i in range(59)]))
    curve = perplexity_by_length(model, documents[:1], [64])
    assert curve.nll_sum[64] == pytest.approx(expected, rel=1e-6)
    assert curve.nll_sum[64] != pytest.approx(without, rel=1e-4)
    assert "no position 65" in perplexity_by_length(model, documents, [128]).refused[128]
