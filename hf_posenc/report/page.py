"""A page for the browser that shows what curves say and explains how to read it: one file, no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hf_posenc.evaluation.protocols import FIXED_TARGET, in_words
from hf_posenc.plots.canvas import COLOURS
from hf_posenc.report import chart
from hf_posenc.report.comparability import Panel, by_protocol, tokenizers_differ
from hf_posenc.report.table import describe_protocol, length_grid, span_of_strides

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
# The palette of the plots, lighter where the ground is dark.
_ON_DARK = ("#4BA3E3", "#F28E4B", "#33C79A", "#E6A6C8", "#8CD0F2", "#F2BE45", "#B8B8B8")


def page(panels: Sequence[Panel], *, title: str) -> str:
    """Return the page as HTML, with its style and script inside.

    Lines can be switched off and values read by pointing or with the arrow keys; without JavaScript the first plot and
    all tables stand there. Light or dark follows the reader's settings.
    """
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE.name).render(
        title=title,
        panels=[_described(panel) for panel in panels],
        light=COLOURS,
        dark=_ON_DARK,
        size=chart,
        growing=any(curve.protocol == FIXED_TARGET for panel in panels for curve in panel.curves),
    )


def _described(panel: Panel) -> dict[str, object]:
    """Return what the template says about a panel."""
    groups = by_protocol(panel.curves)
    how = {name: in_words(name, span_of_strides(group)) for name, group in groups.items()}
    return {
        "reason": panel.reason,
        "curves": panel.curves,
        "charts": chart.charts(panel.curves),
        "grid": length_grid(panel.curves),
        "models": list(dict.fromkeys(curve.name for curve in panel.curves)),
        "protocols": list(how.items())[::-1],  # in the order of their dashes, as in the chart
        "sentences": [f"{name}: {describe_protocol(group)}." for name, group in groups.items()],
        "tokenizers_differ": tokenizers_differ(panel.curves),
        "versions": sorted({tuple(sorted(curve.versions.items())) for curve in panel.curves}),
    }
