"""Every model type under every way of acting: which cells are refused, and why, as `REFUSED.md` beside this says.

Run this file as a module to write the table anew: `python -m tests.contracts.test_refused`.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import hf_posenc as posenc
from hf_posenc.encodings.t5_bias import T5
from hf_posenc.errors import PosencError
from tests.families.models import MODEL_TYPES, causal, stock
from tests.families.stacked import MODEL_TYPES as STACKED
from tests.families.stacked import stock as stacked

TABLE = Path(__file__).with_name("REFUSED.md")
WAYS: dict[str, posenc.EncodingConfig] = {
    "its own rotation": posenc.RoPE(),
    "RoPE": posenc.RoPE(theta=500.0, scaling={"rope_type": "default"}),
    "ALiBi": posenc.Alibi(),
    "T5": T5(),
    "NoPE": posenc.NoPE(),
    "sinusoidal": posenc.Sinusoidal(),
}


ALL = [*MODEL_TYPES, *STACKED]


def refusal(model_type: str, way: str) -> str | None:
    """The first sentence of why a plan is refused, without what only this tiny model has; None where it is not."""
    try:
        posenc.plan(stacked(model_type) if model_type in STACKED else stock(model_type), WAYS[way])
    except PosencError as error:
        return re.split(r"[;.] |, (?:was|got)| \(\{|[.;]$", str(error))[0].replace("|", "/")
    return None


def written() -> str:
    """The table, and the counts above it."""
    cells = {(kind, way): refusal(kind, way) for kind in ALL for way in WAYS}
    refused = {cell: reason for cell, reason in cells.items() if reason is not None}
    counts = Counter(way for _, way in refused)
    by_reason: dict[tuple[str, str], list[str]] = {}
    for (kind, way), reason in refused.items():
        by_reason.setdefault((way, reason), []).append(kind)
    kinds = Counter("causal" if causal(kind) else "bidirectional" for kind in MODEL_TYPES)
    lines = [
        "# Cells that are refused",
        "",
        f"{len(MODEL_TYPES)} model types ({kinds['causal']} causal, {kinds['bidirectional']} bidirectional) of one "
        f"stack, {len(STACKED)} of two and {len(WAYS)} encodings make {len(cells)} cells; {len(refused)} are refused: "
        + ", ".join(f"{way} {counts[way]}" for way in WAYS)
        + ".",
        "",
        "| encoding | model types | reason |",
        "| --- | --- | --- |",
        *(f"| {way} | {', '.join(types)} | {reason} |" for (way, reason), types in by_reason.items()),
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.slow
def test_the_table_of_refused_cells_is_what_the_engine_says() -> None:
    assert written() == TABLE.read_text(encoding="utf-8"), "write it anew: python -m tests.contracts.test_refused"


def test_the_counts_are_those_of_the_rows() -> None:
    text = TABLE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE)[2:]
    counts: Counter[str] = Counter()
    for way, types in rows:
        counts[way] += len(types.split(", "))
    assert f"make {len(ALL) * len(WAYS)} cells; {counts.total()} are refused" in text
    assert all(f"{way} {counts[way]}" in text for way in WAYS)


if __name__ == "__main__":
    TABLE.write_text(written(), encoding="utf-8")
