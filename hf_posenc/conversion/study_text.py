"""The texts of the study: what the bundled model was trained on, what it never saw, and held-out rows for two purposes.

The model went over its training text almost five times and knows much of it by heart: it is 0.6 nats better there than
on held-out text. What it says about text that it has not seen is another thing to learn from. Such text, also Python,
is there wherever this package runs: the sources of the packages that it depends on.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.conversion.batches import rows_of
from hf_posenc.conversion.convert import HELD_OUT_ROWS
from hf_posenc.data import HELD_OUT, Document, load_documents, tokenize

PACKAGES = (
    *("PIL", "accelerate", "anyio", "click", "datasets", "dill", "fontTools", "fsspec", "huggingface_hub", "jinja2"),
    *("markdown_it", "matplotlib", "mpmath", "multiprocess", "networkx", "numpy", "packaging", "pandas", "peft"),
    *("pyarrow", "pydantic", "pygments", "pyparsing", "rich", "setuptools", "sympy", "torch", "tqdm", "transformers"),
    *("typer", "yaml"),
)
FILES, CHARACTERS = 50, 6_000
"""Files of one package, and first characters of a file, so that no package outweighs the rest."""


def unseen_documents() -> list[Document]:
    """Return source files of installed packages, or the beginnings of long ones, in an order that is always the same.

    What is installed decides about the text, so that a result that rests on it carries `data.describe(documents)`.
    """
    documents = []
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None:
            continue
        root = Path(str(spec.origin)).parent
        files = [path for path in sorted(root.rglob("*.py")) if "tests" not in path.parts]
        random.Random(0).shuffle(files)
        for path in files[:FILES]:
            text = path.read_text(encoding="utf-8")[:CHARACTERS]
            documents.append(Document(f"{package}/{path.relative_to(root).as_posix()}", text))
    return [document for document in documents if document.text.strip()]


def selection_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, length: int) -> Any:
    """Return the held-out rows by which learning rates are chosen, a dataset of `input_ids`.

    They lie half-way between those that `convert` measures on, which are the ones that are reported.
    """
    texts = tokenize(load_documents("embedded", split=HELD_OUT), tokenizer)
    rows = rows_of(texts, None, model, length=length, causal=True, seed=None).dataset
    every = max(1, len(rows) // HELD_OUT_ROWS)
    return rows.select(range(every // 2, len(rows), every)[:HELD_OUT_ROWS])
