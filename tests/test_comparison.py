"""Results and models side by side: read or measured, named apart, on one axis only where they were measured alike."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from datasets import load_dataset

from hf_posenc import plots
from hf_posenc.errors import ConfigError, DataError
from hf_posenc.evaluation import LengthCurve
from hf_posenc.quickstart import BASE
from hf_posenc.report import length_grid, panels, read_curves, write_report
from hf_posenc.report.chart import BOTTOM, HEIGHT, TOP, charts
from hf_posenc.report.compare_command import main
from hf_posenc.report.comparison import compare
from hf_posenc.report.page import page
from hf_posenc.report.rows import curve_rows, write_rows
from tests.test_report import FILES, REASON, curve


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of results on the same texts; each has a model called "new", of different weights."""
    a = [curve("original", {128: 29.6}, refused={256: REASON, 512: REASON}), curve("new", {128: 30, 256: 40, 512: 60})]
    b = [curve("new", {128: 31, 256: 31, 512: 30}, model_hash="1"), curve("best", {128: 28, 256: 27, 512: 26})]
    folder = tmp_path_factory.mktemp("results")
    return write_report(a, folder / "first"), write_report(b, folder / "second")


def sliding(item: LengthCurve) -> LengthCurve:
    """The same model, measured with sliding windows."""
    return dataclasses.replace(item, protocol="sliding", stride={length: length // 2 for length in item.ppl})


def test_results_are_read_and_models_of_one_name_told_apart(results: tuple[Path, Path]) -> None:
    found = compare([results[0], results[1] / "result.json"])
    assert [item.name for item in found.curves] == ["first: original", "first: new", "second: new", "second: best"]
    assert len(found.panels) == 1
    assert found.corpus == {}
    named = compare([f"old={results[0]}", results[1]])
    assert [item.name for item in named.curves] == ["old: original", "old: new", "new", "best"]


def test_what_is_given_twice_stands_there_once(results: tuple[Path, Path]) -> None:
    assert len(compare([results[0], results[0], *read_curves(results[0])]).curves) == 2


@pytest.mark.parametrize(("field", "value"), [("text_hash", "1"), ("bos_policy", "prepend"), ("stride", {128: 4})])
def test_other_measurements_stand_apart_with_their_reason(
    results: tuple[Path, Path], field: str, value: object
) -> None:
    other = dataclasses.replace(curve("other", {128: 20.0}), **{field: value})  # type: ignore[arg-type]
    found = compare([*read_curves(results[0]), other])
    first, second = found.panels
    assert [item.name for item in first.curves] == ["original", "new"]
    assert second.curves == (other,)
    assert first.reason is None
    assert f"{field} (" in str(second.reason)
    assert str(second.reason) in str(found)
    assert f"{field} (" in page(found.panels, title="apart")


def test_the_last_tokens_of_another_tokenizer_are_other_words() -> None:
    one, other = (
        dataclasses.replace(curve(name, {128: 30.0}), protocol="fixed_target", tokenizer_hash=name)
        for name in ("one", "other")
    )
    assert [panel.curves for panel in panels([one, other])] == [(one,), (other,)]
    assert len(panels([one, dataclasses.replace(other, tokenizer_hash=None)])) == 1  # ids were given: nothing is known
    whole = [dataclasses.replace(item, protocol="nonoverlapping") for item in (one, other)]
    assert len(panels(whole)) == 1  # all of the text counts, by its bytes


def test_two_models_of_one_name_never_share_a_line() -> None:
    one, other = curve("new", {128: 30}), dataclasses.replace(curve("new", {128: 31}), model_hash="1")
    with pytest.raises(DataError, match="Several curves are called new"):
        panels([one, other])
    with pytest.raises(DataError, match="Several models are called new"):
        panels([one, sliding(other)])
    assert len(panels([one, sliding(one)])) == 1


@pytest.mark.parametrize(
    ("sources", "error", "said"),
    [
        ([], ConfigError, "at least one"),
        ("first", ConfigError, "list of results"),
        (["nothing/result.json"], DataError, "no length curves"),
        (["empty"], DataError, "without length curves"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    sources: list[str], error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "result.json").write_text('{"diagnoses": []}')
    with pytest.raises(error, match=said):
        compare(sources)


def test_rows_hold_every_number_and_are_read_by_datasets(results: tuple[Path, Path], tmp_path: Path) -> None:
    curves = [*read_curves(results[0]), sliding(read_curves(results[0])[1])]
    write_rows(curves, tmp_path)
    rows = curve_rows(curves)
    assert len(rows) == sum(len(item.lengths) for item in curves)
    assert [row["refused"] for row in rows if row["name"] == "original"] == [None, REASON, REASON]
    cache = str(tmp_path / "cache")
    for kind, name in (("csv", "curves.csv"), ("json", "curves.jsonl")):
        loaded = load_dataset(kind, data_files=str(tmp_path / name), split="train", cache_dir=cache)
        assert loaded.column_names == list(rows[0])
        assert loaded["ppl"] == pytest.approx([row["ppl"] for row in rows], nan_ok=True)
        assert loaded["length"] == [row["length"] for row in rows]
    with (tmp_path / "curves.csv").open(encoding="utf-8", newline="") as file:
        assert [line["protocol"] for line in csv.DictReader(file)] == [row["protocol"] for row in rows]


def test_an_infinite_perplexity_is_no_number_in_rows_plots_or_pages(tmp_path: Path) -> None:
    sums = {128: 3000.0, 256: 1e7}
    wild = curve("wild", {128: 20.0, 256: 30.0}, nll_sum=sums, interval={128: (2.9, 1e4), 256: (9e3, 1e4)})
    write_rows([wild], tmp_path)
    lines = (tmp_path / "curves.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["ppl"] is None for line in lines] == [False, True, True]
    assert len(charts([wild])[0].lines[0].dots) == 1


def test_a_chart_places_numbers_as_the_axes_say() -> None:
    rising = curve("rising", {128: 10.0, 256: 20.0, 512: 40.0})
    stopped = curve("stopped", {128: 10.0}, refused={256: REASON, 512: REASON})
    perplexity, *_others = found = charts([rising, stopped])
    assert [chart.quantity.name for chart in found] == ["perplexity", "ratio", "gain from context"]
    (x0, y0), (x1, y1), (x2, y2) = perplexity.lines[0].dots
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # doubled lengths and doubled values, on log axes
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y2 < y1 < y0
    assert perplexity.lines[1].dots == [(x0, y0)] == [perplexity.lines[1].cross]
    assert perplexity.lines[0].cross is None
    heights = [float(place.split()[1].rstrip("Z")) for place in re.split("[ML]", perplexity.lines[0].band)[1:]]
    assert len(heights) == 6
    assert all(TOP <= height <= HEIGHT - BOTTOM for height in heights)  # the band too stays within the axes
    assert [text for _, text in perplexity.x_ticks] == ["128", "256", "512"]
    last: dict[str, object] = perplexity.columns[-1]
    assert last["rows"] == [
        {"model": 0, "name": "rising", "cells": ["40.00"]},
        {"model": 1, "name": "stopped", "cells": ["none"]},
    ]
    assert last["reasons"] == [f"stopped: {REASON}"]


def test_models_of_different_tokenizers_share_no_axis_of_perplexity(tmp_path: Path) -> None:
    one = curve("one", {128: 20.0}, n_bytes=4000)
    other = curve("other", {128: 20.0}, n_tokens={128: 1500}, n_bytes=4000)
    assert next(chart.quantity.name for chart in charts([one, other])) == "bits per byte"
    folder = write_report([one, other], tmp_path / "out")
    assert (folder / "bits_per_byte.png").exists()
    assert not (folder / "perplexity.png").exists()


class _Reader(HTMLParser):
    """What a page refers to, and the texts of its cells."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what is loaded from elsewhere."""
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.open.append(tag)


def test_a_page_needs_no_network_and_runs_nothing_that_a_name_says() -> None:
    evil = '</script><script>alert("x")</script>'
    shown = panels([curve(evil, {128: 20.0, 256: 30.0})])
    text = page(shown, title="<b>bold</b>")
    reader = _Reader()
    reader.feed(text)
    assert reader.links == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert reader.open.count("script") == 1 + len(charts(shown[0].curves))
    assert "<script>alert" not in text
    assert "<b>bold" not in text


def test_effective_length_and_gain_are_drawn_where_only_context_grows(tmp_path: Path) -> None:
    growing = {"protocol": "fixed_target", "stride": {128: 64, 256: 64, 512: 64}, "n_bytes": None}
    near = curve("near", {128: 30.0, 256: 45.0, 512: 60.0}, **growing)
    far = curve("far", {128: 30.0, 256: 25.0, 512: 20.0}, **growing)
    folder = write_report([near, far], tmp_path / "out")
    extra = {f"{name}.{kind}" for name in ("gain", "effective_length") for kind in ("png", "svg")}
    assert {path.name for path in folder.iterdir()} == FILES | extra
    text = (folder / "effective_length.svg").read_text(encoding="utf-8")
    assert ">128<" in text
    grid = length_grid([near, far])
    assert (grid.headings[-1], [row[-1] for row in grid.rows]) == ("effective¹", ["128", "512 or more"])
    assert "512 or more" in text
    with pytest.raises(DataError, match="effective length"):
        plots.plot_effective_lengths([curve("none", {}, refused={128: REASON})], tmp_path / "none")


def test_the_same_numbers_make_the_same_files(results: tuple[Path, Path], tmp_path: Path) -> None:
    again = write_report(read_curves(results[0]), tmp_path / "again")
    for name in FILES:
        assert (again / name).read_bytes() == (results[0] / name).read_bytes(), name


def test_the_command_measures_what_was_not_measured_yet(
    results: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("A text that is long enough to be measured, again and again. " * 40)
    command = [str(results[0]), f"bundled={BASE}", "--documents", str(tmp_path / "text.txt")]
    command += ["--lengths", "32", "64", "--stride", "16", "--bos_policy", "prepend", "--output", str(tmp_path / "out")]
    assert main(command) == 0
    assert "measured apart from the first: bos_policy (" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES | {"perplexity-2.png", "perplexity-2.svg"}
    found = read_curves(tmp_path / "out")
    assert [item.name for item in found] == ["original", "new", "bundled", "bundled"]
    assert [item.protocol for item in found[2:]] == ["nonoverlapping", "sliding"]
    assert found[2].lengths == (32, 64)
    assert (found[2].stride, found[3].stride) == ({32: 32, 64: 64}, {32: 16, 64: 16})
    assert {item.bos_policy for item in found[2:]} == {"prepend"}
    assert json.loads((tmp_path / "out" / "result.json").read_text())["corpus"]["documents"] == 1
    assert all(math.isfinite(value) for value in found[3].ppl.values())
    assert main(command) == 2
    assert "already holds a result" in capsys.readouterr().err


@pytest.mark.slow
def test_a_browser_shows_the_page_in_light_and_dark(results: tuple[Path, Path]) -> None:
    browser = os.environ.get("HF_POSENC_CHROMIUM") or pytest.skip("HF_POSENC_CHROMIUM names no browser")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for scheme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 31)")):
            shown = chromium.new_context(color_scheme=scheme, offline=True).new_page()
            errors: list[str] = []
            shown.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            shown.goto((results[0] / "index.html").as_uri())
            assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == ground
            shown.locator(".plot").first.focus()
            shown.keyboard.press("ArrowRight")
            shown.keyboard.press("ArrowRight")
            assert "256 tokens" in shown.locator(".tip").first.inner_text()
            assert "40.00" in shown.locator(".tip").first.inner_text()
            shown.get_by_label("new").uncheck()
            assert shown.locator("g.line:not(.shade):visible").count() == 1
            shown.get_by_label("ratio").check()
            assert shown.locator("figure:visible").count() == 1
            assert errors == []
        chromium.close()
