"""Encoder-decoders from the command line: pairs from a file, one curve by source length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from hf_posenc.errors import DataError
from hf_posenc.evaluation import seq2seq_perplexity_by_length
from hf_posenc.pairs import load_pairs
from hf_posenc.report.command import main
from tests.evaluation.models import VOCABULARY, llama
from tests.evaluation.retrievers import characters

PAIRS = [("One house. Two houses.", "Houses."), ("A b c d e f g h.", "Letters.")]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder-decoder, a decoder, and pairs of texts."""
    folder = tmp_path_factory.mktemp("pairs")
    torch.manual_seed(0)
    small = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    T5ForConditionalGeneration(T5Config(**small, decoder_start_token_id=0)).save_pretrained(folder / "t5")
    llama().save_pretrained(folder / "llama")  # type: ignore[operator]
    for name in ("t5", "llama"):
        characters().save_pretrained(folder / name)
    lines = [json.dumps({"source": source, "target": target}) for source, target in PAIRS]
    (folder / "pairs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def command(material: Path, output: Path, *more: str, model: str = "t5") -> list[str]:
    """The command line that measures the pairs into `output`."""
    where = ["--model", f"m={material / model}", "--documents", str(material / "pairs.jsonl"), "--output", str(output)]
    return [*where, "--lengths", "8", "64", "--protocol", "by_source", *more]


def test_a_curve_by_source_length_is_written_as_python_measures_it(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(material, tmp_path / "out")) == 0
    assert "first tokens of the source" in " ".join(capsys.readouterr().out.split())
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    (curve,) = result["curves"]
    model = T5ForConditionalGeneration.from_pretrained(material / "t5")
    expected = seq2seq_perplexity_by_length(model, PAIRS, [8, 64], tokenizer=characters())
    assert {int(length): nll for length, nll in curve["nll_sum"].items()} == pytest.approx(expected.nll_sum)
    assert (curve["protocol"], curve["n_documents"]) == ("by_source", 2)
    assert result["corpus"]["documents"] == 2


def test_what_cannot_be_measured_is_one_line(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, model, message in (
        (["--stride", "4"], "t5", "stride and bos_policy mean nothing"),
        (["--documents", str(tmp_path / "none.jsonl")], "t5", "no .jsonl file of pairs"),
        ([], "llama", "holds no encoder-decoder"),
    ):
        assert main(command(material, tmp_path / "out", *more, model=model)) == 2
        said = capsys.readouterr().err
        assert message in said


def test_pairs_are_read_whole_or_refused(material: Path, tmp_path: Path) -> None:
    assert load_pairs(str(material / "pairs.jsonl")) == PAIRS
    for line, message in (
        ('{"source": "a"}', "needs columns source and target; it has source"),
        ('{"source": "a", "target": " "}', "pair 1, lacks"),
        ("not json", "no .jsonl file of pairs"),
    ):
        file = tmp_path / "pairs.jsonl"
        file.write_text(line + "\n", encoding="utf-8")
        with pytest.raises(DataError, match=message):
            load_pairs(str(file))
