"""What a curve derives from its sums, and that JSON keeps it."""

from __future__ import annotations

import json
import math

import pytest
import torch

from hf_posenc.errors import DataError
from hf_posenc.evaluation import LengthCurve, perplexity_by_length
from hf_posenc.evaluation.perplexity import DocumentScore, _standard_error
from tests.evaluation.models import curve_of, gpt2, random_documents


def test_tokens_weigh_the_same_whatever_their_window() -> None:
    """Windows of (mean nats, targets) = (2, 1024), (3, 256), (4, 16): not exp(3) = 20.1, the mean of means."""
    curve = curve_of(nll_sum={1024: 2 * 1024 + 3 * 256 + 4 * 16.0}, n_tokens={1024: 1296}, n_bytes=5800)
    assert curve.ppl[1024] == pytest.approx(9.2278141, abs=5e-7)
    assert curve.bits_per_byte is not None
    assert curve.bits_per_byte[1024] == pytest.approx(0.7163727, abs=5e-7)


def test_the_standard_error_is_that_of_the_ratio() -> None:
    scores = [DocumentScore(0, 10.0, 5), DocumentScore(1, 12.0, 4), DocumentScore(2, 3.0, 3)]
    mean = 25 / 12
    residuals = torch.tensor([10 - 5 * mean, 12 - 4 * mean, 3 - 3 * mean], dtype=torch.float64)
    expected = math.sqrt(3) * residuals.std().item() / 12  # the residuals sum to zero, so std() is about their mean
    assert _standard_error(scores) == pytest.approx(expected, rel=1e-12)
    assert _standard_error(scores[:1]) is None


def test_json_gives_the_same_curve_back() -> None:
    curve = perplexity_by_length(gpt2(), random_documents(100, 70), [16, 64, 128], protocol="sliding", stride=4)
    data = json.loads(json.dumps(curve.to_dict(), sort_keys=True))
    assert LengthCurve.from_dict(data) == curve
    assert data["ppl"]["16"] == curve.ppl[16]
    del data["stderr"]
    with pytest.raises(DataError, match="stderr missing"):
        LengthCurve.from_dict(data)


def test_the_ratio_is_to_the_longest_length_in_range() -> None:
    curve = curve_of(nll_sum={8: 20.0, 64: 10.0, 128: 30.0}, n_tokens={8: 10, 64: 10, 128: 10})
    assert curve.reference_length == 64
    assert curve.ratio == {8: pytest.approx(math.e), 64: 1.0, 128: pytest.approx(math.e**2)}
    beyond = curve_of(nll_sum={128: 30.0, 256: 40.0}, n_tokens={128: 10, 256: 10})
    assert beyond.ratio == {128: 1.0, 256: pytest.approx(math.e)}
