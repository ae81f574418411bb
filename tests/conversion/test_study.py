"""The report of the study: the best learning rate counts on both sides, and chance is not called a difference."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.conversion.recipe import Recipe
from hf_posenc.conversion.study import RUNGS, TARGETS, Cell, cells
from hf_posenc.conversion.study_page import page_of, table
from hf_posenc.conversion.study_report import head_recovery, rank_correlation, summarize, write_report


def run(target: str, rung: str, end: float, *, rate: float = 1e-3, seed: int = 0, percent: float = 2) -> dict[str, Any]:
    """Return the part of a result that the report reads: a model of perplexity 20, replaced 40, and at last `end`."""
    return {
        **{"target": target, "rung": rung, "learning_rate": rate, "seed": seed, "percent": percent, "seconds": 1.0},
        **{"text": "unseen", "batch_size": 8},
        "stages": [
            {"stage": "replace", "before": math.log(20), "after": math.log(40)},
            {"stage": "text", "before": math.log(40), "after": math.log(end)},
        ],
        "nonoverlapping": {"128": 20.0, "1024": 19.0},
        "sliding": {"128": 18.0, "1024": 18.9},
    }


def found(rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    (row,) = [row for row in rows if fields.items() <= row.items()]
    return row


def test_the_reference_is_the_best_that_the_original_can_do() -> None:
    rows = summarize(
        [
            *(run("original", "naive", end, rate=rate) for end, rate in ((21, 1e-3), (19.5, 1e-4))),
            *(run("nope", "naive", end, rate=rate) for end, rate in ((30, 1e-3), (25, 1e-4), (28, 1e-5))),
        ]
    )
    best = found(rows, target="nope", best=True)
    assert best["learning_rate"] == 1e-4
    assert best["ratio"] == pytest.approx(25 / 19.5)
    assert best["of_original"] == pytest.approx(25 / 20)
    assert best["recovery"] == pytest.approx(math.log(40 / 25) / math.log(40 / 19.5))
    assert best["sliding_8x"] == pytest.approx(1.05)


def test_seeds_are_averaged_in_nats_and_their_spread_is_the_range() -> None:
    rows = summarize([run("original", "naive", 20), *(run("nope", "naive", 24 + seed, seed=seed) for seed in range(3))])
    row = found(rows, target="nope")
    assert row["seeds"] == 3
    assert math.exp(row["end"]) == pytest.approx((24 * 25 * 26) ** (1 / 3))
    assert row["spread"] == pytest.approx(26 / 24 - 1)


def page(*runs: dict[str, Any]) -> str:
    return page_of({"length": 128, "runs": summarize([run("original", "naive", 20), *runs]), "heads": []})


def test_what_is_smaller_than_the_spread_over_seeds_is_no_difference() -> None:
    seeds = [run("nope", "naive", end, seed=seed) for seed, end in enumerate((24.0, 24.5))]
    assert "`absorb` against `naive`: nope no difference." in page(*seeds, run("nope", "absorb", 23.9))
    assert "`absorb` against `naive`: nope -9.3%." in page(*seeds, run("nope", "absorb", 22.0))
    assert "One seed each" in page(run("nope", "naive", 24.0))


def test_a_budget_of_one_seed_is_held_against_the_spread_of_another() -> None:
    """That of the sets of stages that are compared where there is one, otherwise the largest that was found."""
    seeds = [run("nope", "naive", end, seed=seed) for seed, end in enumerate((24.0, 24.5))]
    other = [run("t5", "start", end, seed=seed) for seed, end in enumerate((22.0, 24.0))]
    five = [run("original", "naive", 20, percent=5), run("nope", "naive", 24.0, percent=5)]
    assert "nope no difference" in page(*seeds, *five, run("nope", "absorb", 23.6, percent=5))
    assert "nope -4.2%" in page(*seeds, *other, *five, run("nope", "absorb", 23.0, percent=5))
    rest = [run("nope", "start", 23.0, percent=5), run("nope", "start+anneal", 22.0, percent=5)]
    assert "`start+anneal` against `start`: nope no difference." in page(*seeds, *other, *five, *rest)
    assert "`start+anneal` against `start`: nope -4.3%." in page(*seeds, *five, *rest)


def test_fewer_tokens_are_said_to_be_better_only_where_they_are() -> None:
    naive = run("nope", "naive", 23, percent=10)
    reference = run("original", "naive", 20, percent=10)
    better = page(reference, naive, run("nope", "start+distill", 22))
    assert "| nope | naive | 23.00 | 2 % | start+distill | 22.00 | yes |" in better
    assert "| nope | naive | 23.00 | 2 % | start+distill | 24.00 | no |" in page(
        reference, naive, run("nope", "start+distill", 24)
    )


def test_rank_correlation_hears_order_alone() -> None:
    assert rank_correlation([1, 2, 3, 9], [0, 5, 6, 7]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 9], [7, 6, 5, 0]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)


def test_heads_that_come_back_are_ranked_by_what_went_away() -> None:
    divergence = {"before": [[1.0, 1.0], [1.0, 1.0]], "after": [[0.4, 0.3], [0.2, 0.1]]}
    calibrated = run("t5", "start", 22) | {
        "calibration": {
            "toeplitz_r2": [[0.1, 0.2], [0.3, 0.4]],
            "divergence": divergence | {"trained": [[0.1, 0.2], [0.3, 0.4]]},
        }
    }
    (row,) = head_recovery([calibrated, run("nope", "naive", 25)])
    assert (row["calibrated"], row["trained"]) == (pytest.approx(1), pytest.approx(-1))


def test_the_report_is_made_from_the_folders_alone(tmp_path: Path) -> None:
    for number, result in enumerate((run("original", "naive", 20), run("nope", "naive", 25))):
        (tmp_path / "runs" / str(number)).mkdir(parents=True)
        (tmp_path / "runs" / str(number) / "result.json").write_text(json.dumps(result), encoding="utf-8")
    (tmp_path / "runs" / "stopped").mkdir()
    assert "| naive | 1.250 (0.001 x 8) |" in write_report(tmp_path).read_text(encoding="utf-8")
    assert (tmp_path / "recovery.png").stat().st_size > 1000
    assert len(json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["runs"]) == 2


def test_runs_are_named_apart_and_the_original_has_no_stages() -> None:
    every = list(cells(list(TARGETS), list(RUNGS), [2, 0.5], [1e-3, 1e-4], [0, 1]))
    assert len({cell.name for cell in every}) == len(every) == 2 * 2 * 2 * ((len(TARGETS) - 1) * len(RUNGS) + 2)
    assert every[0].percent == 0.5
    assert Cell(2, 0, "nope", "start", 1e-3).recipe(1_000_000) == Recipe(
        tokens=20_000, learning_rate=1e-3, absorb=RUNGS["start"]["absorb"]
    )


def test_a_table_is_one() -> None:
    assert table(("a", "b"), [("x", "1")]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"


def test_fewer_tokens_are_compared_on_the_same_text() -> None:
    """Ahead on one text, behind on the other, and behind the lowest of all."""
    unseen = [run("rope", "naive", 30, percent=10), run("rope", "start+distill", 25, percent=2)]
    seen = [run("rope", "naive", 22, percent=10), run("rope", "start", 26, percent=2)]
    said = page(*unseen, *(one | {"text": "seen"} for one in seen))
    assert "`naive`, 10 %: fewer tokens are better for 1 of 1: rope." in said
    assert "`naive, seen text`, 10 %: fewer tokens are better for 0 of 1." in said
    assert "Whatever the text: for 0 of 1." in said


def test_past_the_trained_length_runs_that_were_trained_there_have_their_own_line() -> None:
    """Also where another set of stages is better at that length."""
    said = page(*(run("rope", rung, end) for rung, end in (("start+distill", 22), ("start", 23), ("start+reach", 24))))
    past = said[said.index("## Past the trained length") :]
    assert [line.split(" | ")[1] for line in past.splitlines() if "| rope" in line] == [
        "start+distill, 2 %",
        "start+reach, 2 %",
    ]
