"""Computed tables of every layout are the sinusoids that their layout, scale and first position say."""

from __future__ import annotations

import pytest

import hf_posenc as posenc
from tests.families.models import stock as single
from tests.families.stacked import answers, source
from tests.families.stacked import stock as stacked
from tests.models import assert_same, largest, logits, tokens

SHARPENED = 30.0
"""What the tests' tiny models multiply a table by, where it counts as a weight."""


@pytest.mark.parametrize(
    ("model_type", "spec"),
    [
        ("m2m_100", posenc.Sinusoidal(layout="tensor2tensor", start=1)),
        ("marian", posenc.Sinusoidal(layout="concatenated", scale=SHARPENED)),
        pytest.param("nllb-moe", posenc.Sinusoidal(layout="tensor2tensor", start=1), marks=pytest.mark.slow),
        pytest.param("pegasus", posenc.Sinusoidal(layout="concatenated", scale=SHARPENED), marks=pytest.mark.slow),
    ],
)
def test_an_encoder_decoder_says_what_it_said(model_type: str, spec: posenc.EncodingConfig) -> None:
    model, heard, ids = stacked(model_type), tokens(2, 30, seed=1), tokens(2, 40)
    before = answers(model, source(model, heard), ids)
    posenc.patch(model, spec)
    assert_same(answers(model, source(model, heard), ids), before, 1e-4)
    posenc.unpatch(model)
    posenc.patch(model, posenc.Sinusoidal())
    assert largest(answers(model, source(model, heard), ids) - before) > 1e-2, "the law must be able to fail"


def test_a_decoder_says_what_it_said() -> None:
    model, ids = single("xglm"), tokens(2, 40)
    before = logits(model, ids)
    posenc.patch(model, posenc.Sinusoidal(layout="tensor2tensor", start=2))
    assert_same(logits(model, ids), before, 1e-4)
