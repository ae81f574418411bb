"""Curves as flat rows, one for each model, protocol and length: what spreadsheets and `datasets` read."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_posenc.evaluation import LengthCurve

CSV_NAME = "curves.csv"
LINES_NAME = "curves.jsonl"
_BY_LENGTH = (
    *("ppl", "nll", "nll_sum", "n_tokens", "stderr", "bits_per_byte", "ratio", "gain", "origin_ppl", "accuracy"),
    *("window", "stride", "refused"),
)
_OF_ALL = (
    *("trained_length", "bos_policy", "n_documents", "n_left_out", "n_bytes", "text_hash", "model_hash"),
    *("tokenizer", "tokenizer_hash", "dtype"),
)
_VERSIONS = ("hf_posenc", "torch", "transformers")


def curve_rows(curves: Iterable[LengthCurve]) -> list[dict[str, Any]]:
    """Return one row a curve and length, all with the same columns, named as the fields of `LengthCurve`.

    A number that is not there is None, and so is an infinite one, which neither JSON nor all readers of CSV know;
    `ppl_low` and `ppl_high` bound the 95 % interval; `refused` says why a length has no value.
    """
    return [_row(curve, length) for curve in curves for length in curve.lengths]


def _row(curve: LengthCurve, length: int) -> dict[str, Any]:
    low, high = curve.ppl_interval.get(length) or (None, None)
    row: dict[str, Any] = {"name": curve.name, "protocol": curve.protocol, "length": length}
    row |= {"ppl": curve.ppl.get(length), "ppl_low": low, "ppl_high": high}
    row |= {field: (getattr(curve, field) or {}).get(length) for field in _BY_LENGTH}
    row |= {field: getattr(curve, field) for field in _OF_ALL}
    row |= {f"version_{name}": curve.versions.get(name) for name in _VERSIONS}
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def write_rows(curves: Sequence[LengthCurve], folder: Path) -> None:
    """Write the rows of `curve_rows` into an existing folder, as CSV and as JSON, one object a line."""
    rows = curve_rows(curves)
    with (folder / CSV_NAME).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    (folder / LINES_NAME).write_text("".join(lines), encoding="utf-8")
