"""Laws of documents, splits and packing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_posenc import data
from hf_posenc.data import Document, describe, embedded_corpus, is_held_out, load_documents, pack, tokenize
from hf_posenc.errors import DataError

END = 256


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end-of-text token: its ids can be checked by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate([*alphabet, "<end>"])}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", model_max_length=8)


def rows(documents: list[list[int]], length: int, **options: Any) -> list[list[int]]:
    return pack(documents, length, eos_token_id=END, **options).dataset["input_ids"][:]


@pytest.fixture(scope="module")
def corpus() -> list[Document]:
    return embedded_corpus()


def test_the_split_never_parts_a_module(corpus: list[Document]) -> None:
    train, held_out = load_documents("embedded"), load_documents("embedded", split="held_out")
    assert not {d.module for d in train} & {d.module for d in held_out}
    assert sorted(d.name for d in (*train, *held_out)) == [d.name for d in corpus]


def test_about_a_tenth_is_held_out_and_it_has_long_documents() -> None:
    train, held_out = load_documents("embedded"), load_documents("embedded", split="held_out", min_characters=10_000)
    share = sum(len(d.text) for d in held_out) / sum(len(d.text) for d in train)
    assert 0.05 < share < 0.2
    assert len(held_out) >= 20


def test_the_split_does_not_depend_on_the_process() -> None:
    assert [name for name in ("json", "argparse", "collections", "asyncio", "ast") if is_held_out(name)] == [
        "json",
        "collections",
    ]


def test_the_corpus_is_ordered_and_has_neither_tests_nor_the_build_machine(corpus: list[Document]) -> None:
    names = [d.name for d in corpus]
    assert names == sorted(set(names))
    assert not [n for n in names if "/test" in n or n.startswith(("test", "idlelib", "encodings", "_sysconfigdata"))]


def test_the_description_follows_names_contents_and_order() -> None:
    one, other = Document("a", "bc"), Document("ab", "c")
    texts = [[one], [other], [one, other], [other, one], [Document("a", "bd")]]
    assert len({describe(t)["sha256"] for t in texts}) == len(texts)
    assert describe([one]) == describe([Document("a", "bc")])


def test_tokenize_keeps_everything_past_the_models_length(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    documents = [Document("a", "twelve bytes"), Document("b", "é\n")]
    ids = tokenize(documents, byte_tokenizer)
    assert [len(i) for i in ids] == [12, 3]
    assert [byte_tokenizer.decode(i) for i in ids] == [d.text for d in documents]
    assert tokenize([], byte_tokenizer) == []


@pytest.mark.parametrize("count", [1, 2, 1001])
@pytest.mark.parametrize("length", [2, 7, 128])
def test_no_token_is_lost_silently(count: int, length: int) -> None:
    documents = [[i % 250] * (300 if count < 3 else i % 5) for i in range(1, count + 1)]  # some of the 1001 are empty
    packed = pack(documents, length, eos_token_id=END)
    stream = [token for document in documents for token in (*document, END)]
    report = packed.report
    assert report.tokens_in == sum(map(len, documents))
    assert report.tokens_in + report.separators == len(stream) == report.tokens_out + report.dropped
    assert 0 <= report.dropped < length
    assert report.sequences == len(packed.dataset)
    got = [token for row in packed.dataset["input_ids"] for token in row]
    assert got == stream[: report.tokens_out]
    assert {len(row) for row in packed.dataset["input_ids"]} == {length}


def test_packing_does_not_depend_on_how_documents_were_batched(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    documents = [Document(str(i), f"text {i} " * (i % 4 + 1)) for i in range(50)]
    whole = tokenize(documents, byte_tokenizer)
    pieces = [ids for i in range(0, 50, 7) for ids in tokenize(documents[i : i + 7], byte_tokenizer)]
    assert rows(whole, 16) == rows(pieces, 16)


def test_a_seed_shuffles_whole_documents_the_same_way_every_time() -> None:
    documents = [[i] * 3 for i in range(40)]
    assert rows(documents, 4, seed=1) == rows(documents, 4, seed=1)
    assert rows(documents, 4, seed=1) != rows(documents, 4, seed=2)
    assert sorted(rows(documents, 4, seed=1)) == [[i, i, i, END] for i in range(40)] == rows(documents, 4)


def test_a_document_that_says_where_it_begins_or_ends_is_not_closed_again() -> None:
    begin = 257
    documents = [[begin, 1, 2], [3, 4, END], [5, 6], [begin, 7, 8], []]
    packed = pack(documents, 2, eos_token_id=END, bos_token_id=begin)
    stream = [begin, 1, 2, 3, 4, END, 5, 6, END, begin, 7, 8, END]
    assert [token for row in packed.dataset["input_ids"] for token in row] == stream[:-1]
    assert (packed.report.tokens_in, packed.report.separators, packed.report.dropped) == (11, 2, 1)
    assert rows([[begin, 1, 2]], 2) == [[begin, 1], [2, END]]  # where nobody says that this token begins a text


def test_too_little_text_is_refused_with_the_numbers() -> None:
    with pytest.raises(DataError, match=r"2 documents give 8 tokens .* one row of 9"):
        pack([[1, 2, 3], [4, 5, 6]], 9, eos_token_id=END)
    assert pack([[1, 2, 3], [4, 5, 6]], 8, eos_token_id=END).report.dropped == 0
    with pytest.raises(DataError, match="at least 2"):
        pack([[1, 2, 3]], 1, eos_token_id=END)


def test_local_files_folders_and_globs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first\n", encoding="utf-8")
    lines = [{"text": "se\u2028cond"}, {"text": "third", "other": 1}]
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), "utf-8")
    (tmp_path / "ignored.csv").write_text("x", encoding="utf-8")
    texts = ["first\n", "se\u2028cond", "third"]
    assert [d.text for d in load_documents(str(tmp_path))] == texts
    assert [d.text for d in load_documents(str(tmp_path / "*.txt"))] == texts[:1]
    assert [d.text for d in load_documents(str(tmp_path / "b.jsonl"))] == texts[1:]
    assert [d.text for d in load_documents(str(tmp_path), min_characters=6)] == texts[:2]


BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.txt", b" \n", "holds no text"),
    "not UTF-8": ("a.txt", b"\xff\xfe", "not UTF-8"),
    "no text field": ("a.jsonl", b'{"text": "x"}\n{"content": "y"}', r"line 2, has no string field 'text' .*content"),
    "text is a number": ("a.jsonl", b'{"text": 3}', "no string field"),
    "a list": ("a.jsonl", b"[1]", "found: list"),
    "not JSON": ("a.jsonl", b"{", "line 1, is not JSON"),
    "another suffix": ("a.csv", b"x", "can be read"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    name, content, message = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_documents(str(tmp_path / name))


@pytest.mark.parametrize(
    ("source", "message"),
    [("missing.txt", "no file or folder"), ("./missing", "no file or folder"), ("missing/*.txt", "holds no")],
)
def test_a_missing_local_source_is_not_looked_up_on_the_hub(source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_documents(source)


def test_an_unknown_split_and_a_limit_that_nothing_meets(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'held_out'"):
        load_documents("embedded", split="heldout")
    (tmp_path / "a.txt").write_text("short", encoding="utf-8")
    with pytest.raises(DataError, match=r"none of at least 10 characters \(the longest has 5\)"):
        load_documents(str(tmp_path / "a.txt"), min_characters=10)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, list[str]]], list[tuple[Any, ...]]]:
    """Stand in for the Hub: serve the given columns as every dataset, and record what was asked for."""

    def serve(columns: dict[str, list[str]]) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def load(name: str, configuration: str | None, *, split: str) -> datasets.Dataset:
            asked.append((name, configuration, split))
            return datasets.Dataset.from_dict(columns)

        monkeypatch.setattr(datasets, "load_dataset", load)
        return asked

    return serve


def test_a_hub_dataset_by_name_configuration_and_split(hub: Any) -> None:
    asked = hub({"text": ["one", "", "two"]})
    assert [d.text for d in load_documents("owner/name:raw")] == ["one", "two"]
    load_documents("owner/name", split="held_out")
    assert asked == [("owner/name", "raw", "train"), ("owner/name", None, "test")]
    hub({"content": ["one"]})
    with pytest.raises(DataError, match=r"no column 'text' \(it has content\)"):
        load_documents("owner/name")


def test_a_hub_that_fails_is_a_data_error() -> None:
    with pytest.raises(DataError, match="no local path"):  # conftest sets the Hub offline
        load_documents("owner/no-such-dataset")


def test_an_interpreter_without_a_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="has none"):
        embedded_corpus()
