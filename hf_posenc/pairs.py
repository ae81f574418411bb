"""Source and target texts, for what is measured on encoder-decoders."""

from __future__ import annotations

from pathlib import Path

from hf_posenc.errors import DataError

COLUMNS = ("source", "target")


def load_pairs(source: str, *, split: str = "test") -> list[tuple[str, str]]:
    """Read pairs of texts from a file or from the Hub.

    Args:
        source: a local `.jsonl` file, one object with the fields `source` and `target` a line, or a Hub dataset,
            `owner/name` or `owner/name:configuration`, with these columns.
        split: of a Hub dataset.

    Raises:
        DataError: nothing is found, it cannot be read as what it is, or a pair is incomplete.
    """
    from datasets import load_dataset

    name, _, configuration = source.partition(":")
    try:
        if Path(source).suffix == ".jsonl":
            rows = load_dataset("json", data_files=source, split="train")
        else:
            rows = load_dataset(name, configuration or None, split=split)
    except Exception as error:  # whatever the file system, the network, the Hub or the builder raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{source!r} is no .jsonl file of pairs, nor a Hub dataset with such a split: {reason}"
        ) from error
    if not set(COLUMNS) <= set(rows.column_names):
        raise DataError(f"{source!r} needs columns {' and '.join(COLUMNS)}; it has {', '.join(rows.column_names)}.")
    pairs = list(zip(*(list(rows[column]) for column in COLUMNS), strict=True))
    for number, pair in enumerate(pairs, start=1):
        if not all(isinstance(text, str) and text.strip() for text in pair):
            raise DataError(f"{source!r}, pair {number}, lacks a source or a target text.")
    return pairs
