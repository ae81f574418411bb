"""Tables, plots and JSON say what the curves say, and refuse to set unlike curves side by side."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image
from matplotlib.figure import Figure
from rich.console import Console, Group

from hf_posenc import plots, report
from hf_posenc.errors import DataError, OutputError, OutputExistsError
from hf_posenc.evaluation import LengthCurve, PositionCurve
from tests.evaluation.models import curve_of

FILES = {"result.json", "table.txt", "perplexity.png", "perplexity.svg", "index.html", "curves.csv", "curves.jsonl"}
REASON = "no position 129: its table has 128 rows for positions"


def curve(name: str, ppl: dict[int, float], **more: object) -> LengthCurve:
    """A curve of 1,000 tokens with these perplexities."""
    values = {
        "name": name,
        "lengths": (128, 256, 512),
        "nll_sum": {length: 1000 * math.log(value) for length, value in ppl.items()},
        "n_tokens": dict.fromkeys(ppl, 1000),
        "stderr": dict.fromkeys(ppl, 0.05),
        "origin_nll": {length: math.log(value) for length, value in ppl.items()},
        "interval": {length: (math.log(value) - 0.1, math.log(value) + 0.1) for length, value in ppl.items()},
        "window": {length: length for length in ppl},
        "trained_length": 128,
    }
    return curve_of(**(values | more))


@pytest.fixture
def curves() -> list[LengthCurve]:
    """One model that goes on and one that stops."""
    stopped = curve("original", {128: 29.654}, refused={256: REASON, 512: REASON})
    return [curve("alibi", {128: 32.4, 256: 1234.2, 512: 31.7}), stopped]


def rendered(table: Group, width: int = 120) -> str:
    """The table as a terminal of so many characters shows it."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_the_table_shows_values_refusals_and_their_reason_once(curves: list[LengthCurve]) -> None:
    text = rendered(report.length_table(curves))
    assert all(part in text for part in ("128", "256", "512", "32.40", "1,234", "31.70", "29.65"))
    assert text.count("none¹") == 2
    assert text.count(REASON) == 1
    assert "windows that do not overlap; 1,000 tokens scored" in text
    assert "bits/byte" not in text  # one tokenizer: perplexities compare


def test_a_narrow_terminal_breaks_names_and_cuts_no_number() -> None:
    lengths = tuple(2**step for step in range(7, 12))
    long = curve("original, table interpolated", dict.fromkeys(lengths, 123.45), lengths=lengths)
    both = [dataclasses.replace(long, protocol=protocol) for protocol in ("nonoverlapping", "sliding")]
    text = rendered(report.length_table(both), width=80)
    assert "…" not in text
    assert text.count("123.45") == 10
    assert "nonoverlapping" in text


def test_models_of_different_tokenizers_are_compared_by_bytes(curves: list[LengthCurve]) -> None:
    other = curve("other", {128: 20.0}, n_tokens={128: 1500}, n_bytes=4000)
    text = rendered(report.length_table([curves[0], other]))
    assert "bits/byte" in text
    assert f"{1000 * math.log2(20.0) / 4000:.3f}" in text


def test_a_window_shorter_than_the_length_is_said() -> None:
    short = curve("short", {128: 20.0, 256: 19.0}, window={128: 128, 256: 200})
    text = rendered(report.length_table([short]))
    assert "19.00¹" in text
    assert "no document is longer than 200 tokens" in text


@pytest.mark.parametrize(("field", "value"), [("bos_policy", "prepend"), ("stride", {128: 4}), ("text_hash", "1")])
def test_curves_measured_differently_do_not_stand_side_by_side(
    curves: list[LengthCurve], field: str, value: object
) -> None:
    changed = dataclasses.replace(curves[1], **{field: value})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=f"differ in {field}"):
        report.length_table([curves[0], changed])


def test_protocols_stand_side_by_side_on_the_same_texts_only(curves: list[LengthCurve]) -> None:
    sliding = [
        dataclasses.replace(item, protocol="sliding", stride={length: length // 2 for length in item.ppl})
        for item in curves
    ]
    text = rendered(report.length_table([*curves, *sliding]))
    assert text.count("│ nonoverlapping ") == text.count("│ sliding ") == 2
    assert "windows sliding by 64 to 256 tokens; 1,000 tokens scored" in text
    assert "they have little context" in text
    with pytest.raises(DataError, match="differ in text_hash"):
        report.length_table([*curves, dataclasses.replace(sliding[0], text_hash="1")])
    report.length_table([*curves, dataclasses.replace(sliding[0], text_hash="1", protocol="longlora")])  # one stream


def test_the_mean_of_an_origin_has_a_row_that_says_what_it_is() -> None:
    values = {"protocol": "yarn", "bos_policy": "every_window", "origin_nll": {128: math.log(33.0)}}
    text = rendered(report.length_table([curve("alibi", {128: 32.4}), curve("alibi", {128: 31.0}, **values)]))
    assert "yarn, own mean¹" in text
    assert all(part in text for part in ("32.40", "31.00", "33.00", "¹ as the origin averages: each window weighs"))


def test_a_plot_of_two_protocols_keeps_the_colour_of_a_model(
    curves: list[LengthCurve], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Figure] = []
    monkeypatch.setattr(plots.lengths, "save", lambda figure, path: kept.append(figure))
    plots.plot_lengths([*curves, *(dataclasses.replace(item, protocol="sliding") for item in curves)], "unused")
    lines = [line for line in kept[0].axes[0].lines if line.get_marker() not in ("x", "None")]
    assert [line.get_linestyle() for line in lines] == ["--", "--", "-", "-"]
    assert [line.get_color() for line in lines[:2]] == [line.get_color() for line in lines[2:]]
    assert any("solid: sliding · dashed: nonoverlapping" in text.get_text() for text in kept[0].axes[0].texts)


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="no folder that can be written to"):
        report.check_output(tmp_path / "file" / "deep" / "out")


def test_curves_need_names_of_their_own_and_there_must_be_some(curves: list[LengthCurve]) -> None:
    with pytest.raises(DataError, match="called alibi"):
        report.length_table([curves[0], curves[0]])
    with pytest.raises(DataError, match="no curves"):
        report.length_table([])


def test_a_report_can_be_read_back_and_is_never_overwritten(curves: list[LengthCurve], tmp_path: Path) -> None:
    folder = report.write_report(curves, tmp_path / "deep" / "out", seed=3, corpus={"documents": 1})
    assert {path.name for path in folder.iterdir()} == FILES
    assert report.read_curves(folder) == curves
    payload = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert (payload["seed"], payload["corpus"]) == (3, {"documents": 1})
    assert {"torch", "transformers", "python"} <= set(payload["versions"])
    assert list(payload) == sorted(payload)
    with pytest.raises(OutputExistsError, match="already holds a result"):
        report.write_report(curves, folder)
    with pytest.raises(DataError, match="no length curves"):
        report.read_curves(tmp_path)


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = report.write_result(tmp_path / "result.json", {"b": 1, "a": "ü"})
    before = path.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="JSON"):
        report.write_result(path, {"a": math.nan})
    assert path.read_text(encoding="utf-8") == before
    assert [item.name for item in tmp_path.iterdir()] == ["result.json"]


def test_an_infinite_perplexity_still_makes_json() -> None:
    data = curve_of(nll_sum={8: 1e6}, n_tokens={8: 10}).to_dict()
    assert data["ppl"] == {"8": None}
    assert LengthCurve.from_dict(json.loads(json.dumps(data))).ppl[8] == math.inf


def test_the_plot_draws_each_line_to_where_it_ends(curves: list[LengthCurve], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Figure] = []
    monkeypatch.setattr(plots.lengths, "save", lambda figure, path: kept.append(figure))
    plots.plot_lengths(curves, "unused")
    axes = kept[0].axes[0]
    lines = [(list(line.get_xdata()), line.get_marker()) for line in axes.lines]
    assert ([128, 256, 512], "o") in lines
    assert ([128], "x") in lines  # the cross where the original stops
    texts = {text.get_text() for text in axes.texts}
    assert {"alibi", "original: stops at 128", "trained length 128"} <= texts
    assert [text.get_text() for text in axes.get_xticklabels()] == ["128", "256", "512"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert len(axes.collections) == 2  # an error band each


def test_plots_are_images_even_of_nothing(curves: list[LengthCurve], tmp_path: Path) -> None:
    nothing = curve("nothing", {}, refused=dict.fromkeys((128, 256, 512), REASON))
    for name, group in (("both", curves), ("none", [nothing])):
        pixels = image.imread(plots.plot_lengths(group, tmp_path / name)[0])
        assert pixels.shape[0] > 500
        assert pixels.std() > 0.01  # not blank


def test_the_position_plot_is_an_image(tmp_path: Path) -> None:
    positions = PositionCurve(
        name="alibi",
        length=8,
        edges=(0, 1, 2, 4, 8),
        nll=(5.0, 4.0, 3.5, 3.2),
        low=(4.9, 3.9, 3.4, 3.1),
        high=(5.1, 4.1, 3.6, 3.3),
        n_documents=3,
        trained_length=4,
        bos_policy="none",
        text_hash="0",
        model_hash="0",
        dtype="float32",
        versions={},
    )
    assert image.imread(plots.plot_positions([positions], tmp_path / "p")[0]).std() > 0.01
    assert "<svg" in (tmp_path / "p.svg").read_text(encoding="utf-8")
    with pytest.raises(DataError, match=r"differ in text_hash \(0, 1\)"):
        plots.plot_positions([positions, dataclasses.replace(positions, name="b", text_hash="1")], tmp_path / "q")
    with pytest.raises(DataError, match="no results"):
        plots.plot_positions([], tmp_path / "q")


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=12))
def test_labels_stand_apart_in_order_and_stay_put_where_there_is_room(wanted: list[float]) -> None:
    wanted = sorted(wanted)
    placed = plots.canvas.apart(wanted, 10.0)
    assert all(right - left >= 10.0 - 1e-6 for left, right in pairwise(placed))
    assert sum(placed) == pytest.approx(sum(wanted), abs=1e-6)  # moved both ways, not all up
    if all(right - left >= 10.0 for left, right in pairwise(wanted)):
        assert placed == pytest.approx(wanted)
