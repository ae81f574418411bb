"""The base checkpoint: what is shipped is what the script makes, and it loads as anybody would load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc.conversion import pretrain as module
from hf_posenc.conversion.pretrain import PretrainConfig, pretrain
from hf_posenc.conversion.training import packed_perplexity
from hf_posenc.data import HELD_OUT, Document, PackedDataset, describe, load_documents, pack, tokenize
from hf_posenc.errors import ConfigError, OutputExistsError
from hf_posenc.evaluation.diagnosis import diagnose
from hf_posenc.report.diagnosis import sentences

SHIPPED = Path(hf_posenc.__file__).parent / "assets" / "tiny-gpt2"


@pytest.fixture(scope="module")
def log() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((SHIPPED / "training_log.json").read_text(encoding="utf-8"))
    return loaded


def test_what_is_shipped_is_small_and_says_how_it_was_made(log: dict[str, Any]) -> None:
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 4 * 2**20
    assert log["command"] == "python scripts/pretrain.py --output_dir hf_posenc/assets/tiny-gpt2"
    assert {name: log["config"][name] for name in PretrainConfig.__dataclass_fields__} == vars(PretrainConfig())
    assert log["tokens_seen"] == log["config"]["steps"] * log["config"]["batch_size"] * log["config"]["length"]
    assert log["held_out_perplexity_as_stored"] == pytest.approx(log["held_out_perplexity"], rel=1e-4)


def test_the_shipped_model_loads_in_float32_with_its_table_of_128(log: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.transformer.wte.weight
    assert hf_posenc.max_length(model) == model.config.n_positions == log["config"]["length"] == 128
    assert model.config.use_cache
    assert model.num_parameters() == log["parameters"]


def test_the_shipped_tokenizer_loses_no_byte() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id
    text = "def f(x):\n\treturn 'ä∀\u2028🙂'  # \x00 end\r\n"
    (ids,) = tokenize([Document("a", text)], tokenizer)
    assert tokenizer.decode(ids) == text


@pytest.fixture
def held_out() -> tuple[list[Document], PackedDataset]:
    documents = load_documents("embedded", split=HELD_OUT)
    return documents, pack(tokenize(documents, AutoTokenizer.from_pretrained(SHIPPED)), 128, eos_token_id=0)


def test_the_shipped_model_scores_about_what_its_log_says(log: dict[str, Any], held_out: Any) -> None:
    """A fifth of the rows, of whatever text this Python has."""
    dataset = held_out[1].dataset
    some = dataset.select(range(0, len(dataset), 5))
    perplexity = packed_perplexity(AutoModelForCausalLM.from_pretrained(SHIPPED), some)
    assert perplexity == pytest.approx(log["held_out_perplexity"], rel=0.3)


@pytest.mark.slow
def test_the_shipped_model_scores_exactly_what_its_log_says(log: dict[str, Any], held_out: Any) -> None:
    documents, rows = held_out
    if describe(documents)["sha256"] != log["corpus"]["held_out"]["sha256"]:
        pytest.skip(f"this Python has another library than {log['versions']['python']}, with which the log was written")
    perplexity = packed_perplexity(AutoModelForCausalLM.from_pretrained(SHIPPED), rows.dataset)
    assert perplexity == pytest.approx(log["held_out_perplexity_as_stored"], rel=1e-5)


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def documents(source: str, *, split: str) -> list[Document]:
        return [Document(f"{split}{i}.py", f"def f{i}(x):\n    return x + {i}\n" * 40) for i in range(20)]

    monkeypatch.setattr(module, "load_documents", documents)


@pytest.mark.usefixtures("small_corpus")
def test_the_script_makes_the_same_model_again(tmp_path: Path) -> None:
    config = PretrainConfig(steps=3, vocab_size=300, length=16, hidden_size=16, num_layers=1, num_heads=2)
    one, two = (pretrain(config, tmp_path / name, command="again") for name in ("one", "two"))
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
    assert one["held_out_perplexity"] == two["held_out_perplexity"] < 300
    assert one["command"] == "again"
    shipped = {path.name for path in SHIPPED.iterdir()}
    assert {path.name for path in (tmp_path / "one").iterdir()} == shipped
    with pytest.raises(OutputExistsError, match="already holds"):
        pretrain(config, tmp_path / "one")


@pytest.mark.usefixtures("small_corpus")
def test_a_model_is_trained_from_the_start_with_another_encoding(tmp_path: Path) -> None:
    config = PretrainConfig(steps=3, vocab_size=300, length=16, hidden_size=16, num_layers=1, num_heads=2)
    log = pretrain(config, tmp_path / "fixed", encoding=hf_posenc.encoding("sinusoidal", scale=0.02))
    assert log["encoding"]["name"] == "sinusoidal"
    model = hf_posenc.from_pretrained(tmp_path / "fixed")
    found = diagnose(model, [list(range(64))], length=16, sequences=2)
    assert (found.kind, found.max_length) == ("fixed table", None)
    assert "past the training" in " ".join(sentences(found))


@pytest.mark.parametrize(("options", "message"), [({"steps": 0}, "positive"), ({"num_heads": 3}, "do not divide")])
def test_a_shape_that_cannot_be_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PretrainConfig(**options)  # type: ignore[arg-type]
