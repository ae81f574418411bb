"""What a diagnosis finds on real checkpoints, against what is known of how they were trained."""

from __future__ import annotations

from typing import Any

import pytest

from hf_posenc.evaluation.diagnosis import Diagnosis, diagnose
from hf_posenc.evaluation.position_table import TableReport, table_report
from tests import checkpoints
from tests.oracles.test_checkpoints import HEAVY_CHAIN, REACTIONS, STORY


def table(model: Any) -> TableReport:
    report = table_report(model)
    assert report is not None
    return report


def test_the_table_of_an_albert_was_never_trained_at_its_end() -> None:
    model, _ = checkpoints.rxnmapper_albert()
    report = table(model)
    assert report.trained == 510  # the last two rows of 512 are as long as they were drawn, 0.02 * sqrt(128)
    assert report.initial == pytest.approx(0.226, abs=1e-3)
    assert report.norms[510:].max() < report.initial * 1.05
    assert 400 < report.strong < 510  # norms of 1.3 to 1.6 up to about 400, then a slow decline


def test_the_table_of_a_roberta_is_read_behind_its_offset() -> None:
    model, _ = checkpoints.sapiens_roberta()
    report = table(model)
    assert len(report.norms) == 144  # of 146 rows: padding and the row before it stand for no position
    assert report.norms.min() > 0.4
    assert report.trained == 144
    assert 120 < report.strong < 144  # heavy chains are about 120 residues long


def diagnosed(model: Any, tokenizer: Any, texts: list[str]) -> Diagnosis:
    return diagnose(model, texts, tokenizer=tokenizer, length=96, sequences=32)


@pytest.mark.slow
def test_an_albert_stops_understanding_text_where_its_rows_decline() -> None:
    found = diagnosed(*checkpoints.rxnmapper_albert(), REACTIONS)
    assert found.shift is not None
    assert 380 <= found.shift.usable <= 470
    assert max(found.shift.cost.values()) > 1.5
    assert found.toeplitz_r2 is not None
    assert 0.3 < found.toeplitz_r2 < 0.9  # half of what positions do is about absolute places


@pytest.mark.slow
def test_a_roberta_of_antibodies_knows_places_and_not_distances() -> None:
    found = diagnosed(*checkpoints.sapiens_roberta(), [HEAVY_CHAIN])
    assert found.shift is not None
    assert found.shift.cost[8] > 1.0  # accuracy falls from 0.76 to 0.18 there
    assert found.toeplitz_r2 is not None
    assert found.toeplitz_r2 < 0.6


@pytest.mark.slow
def test_a_llama_knows_distances_and_not_places() -> None:
    found = diagnosed(*checkpoints.stories260k(), [STORY])
    assert found.shift is not None
    assert max(abs(cost) for cost in found.shift.cost.values()) < 1e-4
    assert found.toeplitz_r2 is not None
    assert found.toeplitz_r2 > 0.99
