"""Documents, their split, and packing: everything between a text source and rows of token ids.

The embedded corpus is the text of the interpreter's own standard library, so that a first run needs no download.
Its text follows the interpreter: every result that rests on it carries `describe(documents)`.
"""

from __future__ import annotations

import glob
import hashlib
import json
import platform
import random
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from tokenize import open as open_source
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_posenc.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

EMBEDDED = "embedded"
TRAIN = "train"
HELD_OUT = "held_out"
TEXT_SUFFIXES = (".txt", ".jsonl")

# Tests and tables read unlike other code; site-packages is not the standard library.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
)
# One module in ten is held out. Of the ten parts the hash makes, this one has no package that outweighs the rest,
# and modules that exist in every supported Python; it was chosen before any model saw the corpus.
_PARTS, _HELD_OUT_PART = 10, 7


@dataclass(frozen=True)
class Document:
    """One text: `name` tells where it came from (unique within a source), `text` is its whole content."""

    name: str
    text: str

    @property
    def module(self) -> str:
        """The top-level module of an embedded document: `asyncio` for `asyncio/events.py`, `ast` for `ast.py`."""
        return self.name.split("/", 1)[0].removesuffix(".py")


@dataclass(frozen=True)
class PackingReport:
    """What packing did, in tokens: `tokens_in + separators == tokens_out + dropped` always holds."""

    documents: int
    tokens_in: int
    separators: int
    tokens_out: int
    dropped: int
    sequences: int
    length: int

    def as_dict(self) -> dict[str, int]:
        """Return the counts as plain JSON-ready data."""
        return asdict(self)


@dataclass(frozen=True)
class PackedDataset:
    """`dataset` has one column `input_ids` of `report.length` token ids a row, or at most, where each is one text."""

    dataset: Dataset
    report: PackingReport


def embedded_corpus() -> list[Document]:
    """Return the standard library of the running interpreter, one document per `.py` file, sorted by path.

    Left out: tests, `idlelib`, `encodings`, `pydoc_data`, installed packages, and `_sysconfigdata*`, which describes
    the machine that built the interpreter.

    Raises:
        DataError: the interpreter has no readable library (a frozen or stripped installation).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = sorted(path.as_posix() for path in relative if _is_library_text(path))
    documents = [document for document in (_read_source(root, name) for name in kept) if document.text.strip()]
    if not documents:
        raise DataError(f"The embedded corpus needs the standard library's .py files, and {root} has none.")
    return documents


def is_held_out(module: str) -> bool:
    """Whether a top-level module of the embedded corpus belongs to the held-out part (about one in ten).

    Whole modules are held out, never single files: the files of one package share names and idioms.
    """
    digest = hashlib.sha256(module.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _PARTS == _HELD_OUT_PART


def load_documents(source: str, *, split: str = TRAIN, min_characters: int = 1) -> list[Document]:
    """Read documents from the embedded corpus, from local files or from the Hub.

    Args:
        source: `"embedded"`; a local `.txt` or `.jsonl` file (one object with a `text` field a line), a folder of
            such files or a glob; or a Hub dataset, `owner/name` or `owner/name:configuration`, with a `text` column.
        split: `"train"` or `"held_out"` for the embedded corpus. A Hub dataset takes its own split names, where
            `"held_out"` means `"test"`. Local files have no splits and are read whole: name other files instead.
        min_characters: documents with fewer characters are left out (long ones are wanted for long evaluation).

    Raises:
        DataError: nothing is found, a file cannot be read as what it is, or no document is long enough.
    """
    if source == EMBEDDED:
        documents = _embedded_split(split)
    elif paths := _local_paths(source):
        documents = [document for path in paths for document in _read_file(path)]
    else:
        documents = _hub_documents(source, "test" if split == HELD_OUT else split)
    found = [document for document in documents if document.text.strip()]
    if not found:
        raise DataError(f"{source!r} (split {split!r}) holds no text. Give a source with at least one document.")
    kept = [document for document in found if len(document.text) >= min_characters]
    if not kept:
        longest = max(len(document.text) for document in found)
        raise DataError(
            f"{source!r} (split {split!r}) has {len(found)} documents, none of at least {min_characters} characters "
            f"(the longest has {longest}). Give longer documents or lower the limit."
        )
    return kept


def describe(documents: Sequence[Document]) -> dict[str, Any]:
    """Return what a result must say about its texts: counts, a hash over names and contents, the Python version."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.text):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(f"{len(encoded)}:".encode())  # length first, so that no two lists share one byte stream
            digest.update(encoded)
    return {
        "documents": len(documents),
        "characters": sum(len(document.text) for document in documents),
        "sha256": digest.hexdigest(),
        "python": platform.python_version(),
    }


def tokenize(documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return each document's token ids, without special tokens and without truncation, in order."""
    texts = [document.text for document in documents]
    if not texts:
        return []
    # verbose=False: the tokenizer would warn about texts longer than the model, which is what packing is for.
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, truncation=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def pack(
    documents: Sequence[Sequence[int]],
    length: int,
    *,
    eos_token_id: int,
    bos_token_id: int | None = None,
    seed: int | None = None,
) -> PackedDataset:
    """Join token lists, each closed by `eos_token_id`, and cut the stream into rows of exactly `length` tokens.

    One that ends with it, or begins with `bos_token_id`, is told apart already and is left as it is: models whose texts
    only ever began with a token have never seen another between them, and what follows it makes no sense to them.

    Only the tail that fills no row is dropped, and the report counts it. Positions run on through a row: documents
    in one row are not isolated from each other. `seed` shuffles the documents first; `None` keeps their order.

    Raises:
        DataError: `length` is below 2 (no target to predict), or the documents do not fill a single row.
    """
    if length < 2:
        raise DataError(f"Rows of {length} tokens were asked for; a row needs at least 2, one of them to predict.")
    order = list(range(len(documents)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    open_ended = [len(each) == 0 or (each[-1] != eos_token_id and each[0] != bos_token_id) for each in documents]
    joined = (documents[index] if not open_ended[index] else (*documents[index], eos_token_id) for index in order)
    stream = np.fromiter(chain.from_iterable(joined), dtype=np.int64)
    rows = len(stream) // length
    if rows == 0:
        raise DataError(
            f"{len(documents)} documents give {len(stream)} tokens with separators, fewer than one row of {length}. "
            "Give more text or shorter rows."
        )
    tokens_in = sum(len(document) for document in documents)
    report = PackingReport(
        documents=len(documents),
        tokens_in=tokens_in,
        separators=sum(open_ended),
        tokens_out=rows * length,
        dropped=len(stream) - rows * length,
        sequences=rows,
        length=length,
    )
    from datasets import Dataset  # a second of import time that only packing needs

    blocks = stream[: rows * length].reshape(rows, length)  # (rows, length)
    return PackedDataset(dataset=Dataset.from_dict({"input_ids": blocks}), report=report)


def _is_library_text(path: Path) -> bool:
    return not _SKIPPED_FOLDERS.intersection(path.parts) and not path.name.startswith("_sysconfigdata")


def _read_source(root: Path, name: str) -> Document:
    with open_source(root / name) as file:  # honours the file's own coding line
        return Document(name, file.read())


def _embedded_split(split: str) -> list[Document]:
    if split not in (TRAIN, HELD_OUT):
        raise DataError(f"The embedded corpus has no split {split!r}: {did_you_mean(split, (TRAIN, HELD_OUT))}")
    wanted = split == HELD_OUT
    return [document for document in embedded_corpus() if is_held_out(document.module) == wanted]


def _local_paths(source: str) -> list[Path]:
    """Return the files that `source` names, or none where it can only be a Hub name."""
    path = Path(source)
    if not source.strip():  # which would be the folder that the command happens to run in
        raise DataError("The source of documents is empty: name a file, a folder or a dataset.")
    if path.is_dir():
        paths = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
    elif path.is_file():
        paths = [path]
    elif glob.has_magic(source):
        paths = sorted(Path(name) for name in glob.glob(source, recursive=True) if Path(name).is_file())
    elif path.suffix in TEXT_SUFFIXES or path.is_absolute() or source.startswith((".", "~")):
        raise DataError(f"There is no file or folder {source!r}.")
    else:
        return []
    if not paths:
        raise DataError(f"{source!r} holds no {' or '.join(TEXT_SUFFIXES)} file.")
    for file in paths:
        if file.suffix not in TEXT_SUFFIXES:
            raise DataError(f"{file} was named as a text source; {' and '.join(TEXT_SUFFIXES)} files can be read.")
    return paths


def _read_file(path: Path) -> list[Document]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a mark in front that is no part of the text
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    if path.suffix == ".txt":
        return [Document(path.as_posix(), text)]
    # str.splitlines would also cut at characters that may stand unescaped inside a JSON string.
    lines = ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())
    return [Document(f"{path.as_posix()}:{number}", _text_of(line, path, number)) for number, line in lines]


def _text_of(line: str, path: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number}, is not JSON: {error.msg}.") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        kinds = {field: type(value).__name__ for field, value in record.items()} if isinstance(record, dict) else {}
        shown = ", ".join(f"{field} ({kind})" for field, kind in sorted(kinds.items())) or type(record).__name__
        raise DataError(f"{path}, line {number}, has no string field 'text' (found: {shown}).")
    return str(record["text"])


def _hub_documents(source: str, split: str) -> list[Document]:
    from datasets import load_dataset

    name, _, configuration = source.partition(":")
    try:
        rows = load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the Hub client raises whatever the network, the Hub or the builder raise
        raise DataError(
            f"{source!r} is no local path, and it does not load as a Hub dataset with split {split!r}: {error}"
        ) from error
    if "text" not in rows.column_names:
        raise DataError(f"The dataset {source!r} has no column 'text' (it has {', '.join(rows.column_names)}).")
    return [Document(f"{name}:{split}:{number}", text or "") for number, text in enumerate(rows["text"])]
