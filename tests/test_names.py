"""Whatever models are called, and however many there are: tables say it, plots tell them apart, files hold them."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from rich.console import Console, Group

from hf_posenc.evaluation import LengthCurve
from hf_posenc.plots import PERPLEXITY, plot_lengths
from hf_posenc.plots.canvas import look
from hf_posenc.plots.ticks import counted, cut_short, readable
from hf_posenc.report import length_table, panels
from hf_posenc.report.chart import charts
from hf_posenc.report.diagnosis import _file_names
from hf_posenc.report.page import page
from tests.test_report import curve

ODD = ["llama[v2]", "[/x]", "[bold]", r"a$\foo$b", "C:\\models\\x", "日本語", "<b>&"]


def text_of(table: Group) -> str:
    """The table as a terminal shows it."""
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def some(names: list[str]) -> list[LengthCurve]:
    """A curve for each name, no two alike."""
    return [curve(name, {128: 30.0 + place, 256: 40.0, 512: 31.0 + 2 * place}) for place, name in enumerate(names)]


def drawn(curves: list[LengthCurve], folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[str]:
    """The names that a plot writes beside its lines."""
    written: list[str] = []
    annotate = Axes.annotate

    def note(axes: Axes, text: str, *args: Any, **kwargs: Any) -> Any:
        written.append(text)
        return annotate(axes, text, *args, **kwargs)

    monkeypatch.setattr(Axes, "annotate", note)
    plot_lengths(curves, folder / "plot", **more)
    return [text for text in written if not text.startswith("trained")]


@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_name_is_shown_as_it_is_and_is_never_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Square brackets are markup to rich, dollar signs mathematics to matplotlib, angles tags to a browser."""
    curves = some(ODD)
    table = text_of(length_table(curves, title="in $ and [/] $"))
    assert "in $ and [/] $" in table
    for name in ODD:
        assert name in table
    assert set(drawn(curves, tmp_path, monkeypatch, title=r"in $ and $\bad{")) == set(ODD)
    assert "<b>&<" not in page(panels(curves), title="t")


def test_a_model_without_the_protocol_of_the_others_has_its_name_beside_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, alone = some(["both", "alone"])
    slid = dataclasses.replace(both, protocol="sliding", stride={length: length // 2 for length in both.ppl})
    assert sorted(drawn([both, slid, alone], tmp_path, monkeypatch)) == ["alone", "both"]
    lines = charts([both, slid, alone])[0].lines
    assert [line.end and line.end[2] for line in lines] == [None, "both", "alone"]


def test_no_two_of_many_models_look_the_same() -> None:
    assert len({tuple(look(index).items()) for index in range(40)}) == 40


def test_long_names_and_many_lengths_do_not_cover_each_other() -> None:
    names = [f"{'a-long-name-' * 9}{end}" for end in range(3)]
    short = [cut_short(name, 24) for name in names]
    assert [len(name) for name in short] == [24] * 3
    assert len(set(short)) == 3
    assert cut_short("as it is", 8) == "as it is"
    assert readable([64 * step for step in range(1, 40)])[:3] == [64, 128, 192]
    assert len(readable(range(1, 4000))) < 18
    assert readable([7]) == [7]
    assert [counted(1, "document"), counted(2000, "document")] == ["1 document", "2,000 documents"]
    assert len(charts([curve("m", dict.fromkeys(range(64, 2000, 8), 3.0), lengths=range(64, 2000, 8))])[0].x_ticks) < 18


def test_perplexities_without_end_leave_an_axis_for_the_others() -> None:
    found = charts([curve("m", {128: 1e308, 256: 30.0}), curve("n", {128: 20.0, 256: 30.0})])
    assert found[0].quantity is PERPLEXITY
    assert len(found[0].lines[0].dots) == 1


def test_plots_of_a_diagnosis_never_overwrite_each_other() -> None:
    names = _file_names(["a/b", "a_b", "A b", "comparison", "..", "日本", "x" * 300, "x" * 301])
    assert names[:6] == ["a_b", "a_b-2", "A_b-3", "comparison-2", "model", "日本"]
    assert len({name.lower() for name in names}) == 8
    assert max(map(len, names)) < 90


def test_counts_are_said_in_the_words_of_a_reader() -> None:
    one = curve("m", {128: 3.0}, n_tokens={128: 1}, stride={128: 1}, protocol="sliding")
    assert "windows sliding by 1 token; 1 token scored in 1 document, no BOS" in text_of(length_table([one]))
    none = curve("m", {}, refused=dict.fromkeys((128, 256, 512), "no"))
    assert "nothing could be measured" in text_of(length_table([none]))
    bos = dataclasses.replace(one, bos_policy="every_window", protocol="yarn")
    assert "a BOS token in front of each window" in " ".join(text_of(length_table([bos])).split())
