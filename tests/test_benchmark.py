"""The benchmark runs, and its goals can be read; what it measures depends on the machine."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc as posenc
from hf_posenc import benchmark, workload
from hf_posenc.benchmark import Outcome, Row
from hf_posenc.errors import ConfigError
from hf_posenc.workload import Task

ROOT = Path(__file__).parents[1]
GOALS, RESULT = (ROOT / "scripts" / name for name in ("benchmark.json", "benchmark_result.json"))


def test_every_goal_names_models_that_there_are() -> None:
    rows = benchmark.rows_of(GOALS)
    assert any(row.short for row in rows)
    for name in {name for row in rows for name in row.models}:
        stock, _, inside = name.partition(":")[0].partition("+")
        assert stock.partition("@")[0] in workload.STOCK
        assert not inside or inside in posenc.encodings()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "gpt_neox", "bert+alibi", "t5+t5"])
def test_every_stock_model_works(name: str) -> None:
    assert workload.seconds(workload.job(name, Task(work="forward", length=16))) > 0


@pytest.mark.parametrize("work", sorted(set(workload.WORK) - {"patch"}))
def test_every_kind_of_work_is_measured(work: str) -> None:
    row = Row(subject="gpt2+alibi", against="gpt2", work=work, length=24, goal=1.0)
    (outcome,) = benchmark.measure([row], rounds=2)
    assert 0 < outcome.value < math.inf
    assert json.loads(benchmark.as_json([outcome], rounds=2))["outcomes"][0]["row"]["work"] == work
    assert benchmark.as_table([outcome]).row_count == 1


def test_rows_against_one_model_share_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(benchmark, "job", lambda name, _: asked.append(name) or (lambda: None))
    times = iter([9.0, 9.0, 9.0, 2.0, 1.0, 3.0, 4.0, 4.0, 2.0])  # a round to warm up and two more of three models
    monkeypatch.setattr(benchmark, "seconds", lambda *_: next(times))
    rows = [Row(subject=f"gpt2+{name}", against="gpt2", work="train", length=8, goal=1) for name in ("rope", "alibi")]
    first, second = benchmark.measure(rows, rounds=2)
    assert asked == ["gpt2+rope", "gpt2", "gpt2+alibi"]
    assert (first.value, second.value) == (2.0, 2.0), "least of either: 2 of 1, 2 of 1"
    assert (first.median, second.median) == (1.5, 1.75)


def test_half_precision_is_held_to_its_own_error() -> None:
    fields = {"against": "gpt2", "work": "forward", "length": 16, "goal": 1e9, "dtype": "bfloat16"}
    (outcome,) = benchmark.measure([Row(subject="gpt2+alibi", **fields)], rounds=1)
    assert 1e-4 < outcome.errors[1] < 0.1
    assert outcome.met
    worse = Outcome(row=outcome.row, value=1.0, errors=[2 * outcome.errors[1], outcome.errors[1]])
    assert not worse.met


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    goals = tmp_path / "goals.json"
    for field, message in (("work", "unknown work 'fly'"), ("dtype", "unknown dtype"), ("limit", "unknown limit")):
        row = {"subject": "gpt2", "against": "gpt2", "work": "forward", "length": 8, "goal": 1, field: "fly"}
        goals.write_text(json.dumps([row]))
        with pytest.raises(ConfigError, match=message):
            benchmark.rows_of(goals)
    with pytest.raises(ConfigError, match="needs a model"):
        Row(subject="gpt2", work="forward", length=8, goal=1)
    with pytest.raises(ConfigError, match="did you mean 'bloom'"):
        workload.subject("blom", Task(work="forward", length=8))
    with pytest.raises(ConfigError, match="unknown device"):
        Task(work="forward", length=8, device="gpu")


def test_a_mask_of_all_pairs_says_what_alibi_says() -> None:
    task = Task(work="forward", length=24)
    model = workload.subject("gpt2", task)
    torch.nn.init.zeros_(model.wpe.weight)
    found: Any = workload._asked(model, workload._ids(task), attention_mask=workload._dense_alibi(model, task))
    posenc.patch(model, posenc.Alibi())
    expected: Any = workload._asked(model, workload._ids(task))
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state)
    assert workload.seconds(workload.job("gpt2:dense", task)) > 0


def test_a_row_for_a_gpu_alone_is_left_out_elsewhere() -> None:
    row = Row(subject="llama@flex_attention+alibi", against="llama", work="forward", length=16, goal=1, device="cuda")
    assert list(benchmark.measure([row], rounds=1)) == []
    assert workload.seconds(workload.job(row.subject, row.task())) > 0


def test_the_table_of_readme_is_that_of_the_last_complete_run() -> None:
    written = re.search(r"<!-- speed -->\n(.*?)\n<!-- /speed -->", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert written is not None
    assert written[1] == benchmark.as_markdown(RESULT), "run: python scripts/benchmark.py --readme JSON"


def test_what_is_missed_is_named_with_what_binds(tmp_path: Path) -> None:
    row = Row(subject="gpt2+fire", against="gpt2", work="forward", length=8, goal=1.5, note="so many units")
    (tmp_path / "run.json").write_text(
        benchmark.as_json([Outcome(row=row, value=1.75, seconds=2.0), Outcome(row=row, value=1.25)], rounds=7)
    )
    written = benchmark.as_markdown(tmp_path / "run.json")
    assert "1 of 2 goals are met" in written
    assert "- gpt2+fire, forward at 8: **1.750×** for 1.5×; so many units." in written


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "sandwich"])
def test_eight_thousand_tokens_take_no_more_memory_than_without_a_bias(name: str) -> None:
    with_bias, without = (workload.peak(model, Task(work="forward", length=8192)) for model in (f"gpt2+{name}", "gpt2"))
    if math.isnan(without):
        pytest.skip("this system does not tell the memory of a process")
    assert without > 8192 * 768 * 4 / 2**20, "as much as one hidden state, or nothing was measured"
    assert with_bias - without <= 64
