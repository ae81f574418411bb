"""The benchmark runs, and its goals can be read; what it measures depends on the machine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hf_posenc import benchmark
from hf_posenc.errors import ConfigError

GOALS = Path(__file__).parents[1] / "scripts" / "benchmark.json"


def test_every_goal_names_models_that_there_are() -> None:
    rows = benchmark.rows_of(GOALS)
    assert any(row.short for row in rows)
    for name in {name for row in rows for name in (row.subject, row.against)}:
        assert benchmark.subject(name, 16) is not None


@pytest.mark.parametrize("work", benchmark.WORK)
def test_every_kind_of_work_is_measured(work: str) -> None:
    row = benchmark.Row(subject="gpt2+alibi", against="gpt2", work=work, length=24, goal=1.0)
    (outcome,) = benchmark.measure([row], rounds=2, memory=False)
    assert 0 < outcome.ratio < math.inf
    assert json.loads(benchmark.as_json([outcome], rounds=2))["outcomes"][0]["row"]["work"] == work
    assert benchmark.as_table([outcome]).row_count == 1


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    goals = tmp_path / "goals.json"
    goals.write_text(json.dumps([{"subject": "gpt2", "against": "gpt2", "work": "fly", "length": 8, "goal": 1}]))
    with pytest.raises(ConfigError, match="unknown work 'fly'"):
        benchmark.rows_of(goals)
    with pytest.raises(ConfigError, match="did you mean 'bloom'"):
        benchmark.subject("blom", 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "sandwich"])
def test_eight_thousand_tokens_take_no_more_memory_than_without_a_bias(name: str) -> None:
    with_bias, without = (benchmark.peak(model, "forward", 8192) for model in (f"gpt2+{name}", "gpt2"))
    if math.isnan(without):
        pytest.skip("this system does not tell the memory of a process")
    assert without > 8192 * 768 * 4 / 2**20, "as much as one hidden state, or nothing was measured"
    assert with_bias - without <= 64
