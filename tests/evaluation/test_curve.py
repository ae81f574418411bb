"""What a curve derives from its sums, and that JSON keeps it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlavaConfig

from hf_posenc.errors import DataError
from hf_posenc.evaluation import LengthCurve, perplexity_by_length
from hf_posenc.evaluation.intervals import bootstrap, standard_error
from hf_posenc.evaluation.subject import model_hash, tokenizer_hash, trained_length
from hf_posenc.plots import RATIO
from hf_posenc.report import length_grid
from tests.evaluation.models import curve_of, gpt2, llama, random_documents
from tests.evaluation.retrievers import characters


def test_the_trained_length_of_a_model_that_also_sees_is_that_of_its_text_side() -> None:
    model = torch.nn.Linear(1, 1)
    model.config = LlavaConfig(text_config={"model_type": "llama", "max_position_embeddings": 77})
    assert trained_length(model) == 77


def test_tokens_weigh_the_same_whatever_their_window() -> None:
    """Windows of (mean nats, targets) = (2, 1024), (3, 256), (4, 16): not exp(3) = 20.1, the mean of means."""
    curve = curve_of(nll_sum={1024: 2 * 1024 + 3 * 256 + 4 * 16.0}, n_tokens={1024: 1296}, n_bytes=5800)
    assert curve.ppl[1024] == pytest.approx(9.2278141, abs=5e-7)
    assert curve.bits_per_byte is not None
    assert curve.bits_per_byte[1024] == pytest.approx(0.7163727, abs=5e-7)


def test_the_standard_error_is_that_of_the_ratio() -> None:
    sums, counts = np.array([10.0, 12.0, 3.0]), np.array([5.0, 4.0, 3.0])
    mean = 25 / 12
    residuals = torch.tensor([10 - 5 * mean, 12 - 4 * mean, 3 - 3 * mean], dtype=torch.float64)
    expected = math.sqrt(3) * residuals.std().item() / 12  # the residuals sum to zero, so std() is about their mean
    assert standard_error(sums, counts) == pytest.approx(expected, rel=1e-12)
    assert standard_error(sums[:1], counts[:1]) is None
    assert bootstrap(sums[:1], counts[:1]) is None


def test_the_bootstrap_is_as_wide_as_the_standard_error_says() -> None:
    generator = np.random.default_rng(5)
    counts = generator.integers(20, 200, size=400).astype(float)
    sums = counts * 3.0 + generator.normal(size=400) * np.sqrt(counts)
    ends = bootstrap(sums, counts)
    error = standard_error(sums, counts)
    assert ends is not None
    assert error is not None
    mean = sums.sum() / counts.sum()
    assert ends[0] == pytest.approx(mean - 1.96 * error, abs=0.3 * error)
    assert ends[1] == pytest.approx(mean + 1.96 * error, abs=0.3 * error)


def test_json_gives_the_same_curve_back() -> None:
    curve = perplexity_by_length(gpt2(), random_documents(100, 70), [16, 64, 128], protocol="sliding", stride=4)
    data = json.loads(json.dumps(curve.to_dict(), sort_keys=True))
    assert LengthCurve.from_dict(data) == curve
    assert data["ppl"]["16"] == curve.ppl[16]
    for name, value in (("nll_sum", None), ("nll_sum", float("nan")), ("n_tokens", 0)):
        with pytest.raises(DataError, match="at 16: damaged"):
            LengthCurve.from_dict(data | {name: data[name] | {"16": value}})
    del data["stderr"]
    with pytest.raises(DataError, match="stderr missing"):
        LengthCurve.from_dict(data)


def test_a_file_from_before_tokenizers_were_recorded_is_read() -> None:
    data = curve_of(nll_sum={8: 20.0}, n_tokens={8: 10}).to_dict()
    old = {key: value for key, value in data.items() if key not in ("tokenizer", "tokenizer_hash")}
    assert LengthCurve.from_dict(old) == LengthCurve.from_dict(data)


def test_a_tokenizer_is_known_by_what_it_does(tmp_path: Path) -> None:
    tokenizer = characters()
    tokenizer.save_pretrained(tmp_path / "mine")
    saved = AutoTokenizer.from_pretrained(tmp_path / "mine")
    tokenizer("cut short", truncation=True, max_length=3)  # what a call leaves behind is not what a tokenizer does
    curve = perplexity_by_length(llama(), ["a text"], [8], tokenizer=saved)
    assert (curve.tokenizer, curve.tokenizer_hash) == ("mine", tokenizer_hash(tokenizer))  # and no folder
    assert tokenizer_hash(characters("ab")) != curve.tokenizer_hash
    tokenizer.add_tokens(["more"])
    assert tokenizer_hash(tokenizer) != curve.tokenizer_hash
    ids = perplexity_by_length(llama(), random_documents(9), [8])
    assert (ids.tokenizer, ids.tokenizer_hash) == (None, None)


def test_the_ratio_is_to_the_longest_length_in_range() -> None:
    curve = curve_of(nll_sum={8: 20.0, 64: 10.0, 128: 30.0}, n_tokens={8: 10, 64: 10, 128: 10})
    assert curve.reference_length == 64
    assert curve.ratio == {8: pytest.approx(math.e), 64: 1.0, 128: pytest.approx(math.e**2)}
    beyond = curve_of(nll_sum={128: 30.0, 256: 40.0}, n_tokens={128: 10, 256: 10})
    assert beyond.ratio == {128: 1.0, 256: pytest.approx(math.e)}


def test_the_gain_is_against_the_shortest_length_and_the_effective_length_stops_at_the_first_rise() -> None:
    sums = {32: 35.0, 64: 30.0, 128: 30.2, 256: 29.0, 512: 31.0, 1024: 28.0}
    curve = curve_of(nll_sum=sums, n_tokens=dict.fromkeys(sums, 10))
    assert curve.reference_length == 64
    assert curve.effective_length == 256  # 512 is 3 % worse than 64; that 1024 is good again does not help
    assert curve.gain[32] == 0.0
    assert curve.gain[256] == pytest.approx(0.6)
    assert curve_of(nll_sum={}, n_tokens={}).effective_length is None


@pytest.mark.parametrize("trained", [None, 16])
def test_without_a_length_in_range_nothing_is_said_to_last_or_to_be_lost(trained: int | None) -> None:
    """Against the shortest window, whose tokens have hardly any context, every longer one looks good."""
    curve = curve_of(nll_sum={32: 50.0, 64: 30.0, 128: 40.0}, n_tokens=dict.fromkeys((32, 64, 128), 10))
    curve = dataclasses.replace(curve, trained_length=trained, protocol="fixed_target")
    assert curve.effective_length is None
    assert RATIO.values(curve) == {}
    grid = length_grid([curve])
    assert grid.rows[0][-1] == "not known"


def test_the_weights_of_a_text_side_with_another_rotation_are_another_model() -> None:
    model = torch.nn.Linear(1, 1)
    hashes = set()
    for theta in (1e4, 1e5):
        rotation = {"rope_type": "default", "rope_theta": theta}
        model.config = LlavaConfig(text_config={"model_type": "llama", "rope_parameters": rotation})
        hashes.add(model_hash(model))
    assert len(hashes) == 2


def test_bits_per_byte_need_every_target_once() -> None:
    values = {"nll_sum": {8: 20.0}, "n_tokens": {8: 10}, "n_bytes": 40}
    assert curve_of(**values, protocol="lm_eval_rolling").bits_per_byte is not None
    assert curve_of(**values, protocol="longlora").bits_per_byte is None
