"""One length everywhere: table, config, tokenizer and the limit of `generate` change together, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

import hf_posenc as posenc
from hf_posenc.cli import app
from tests.models import SUBJECTS, TRAINED

TINY = Path(posenc.__file__).parent / "assets" / "tiny-gpt2"
LONGER = posenc.Learned(max_position_embeddings=4 * TRAINED, extension="tile")
LAYERED = posenc.encoding("layered", layers=[LONGER, posenc.NoPE(allow_bidirectional=True)])
OFFSET = {"gpt2": 0, "bert": 0, "roberta": 2, "llama": 0}


@pytest.mark.parametrize("config", [LONGER, LAYERED], ids=["learned", "layered"])
@pytest.mark.parametrize("subject", ["gpt2", "bert", "roberta"])
def test_a_longer_table_is_in_the_config_and_the_limit_of_generate(subject: str, config: Any) -> None:
    if subject != "gpt2":
        config = LONGER if config is LONGER else posenc.encoding("layered", layers=[LONGER, posenc.encoding("t5")])
    model = SUBJECTS[subject].fresh()
    generation = GenerationConfig(max_length=TRAINED)
    model.generation_config = generation
    posenc.patch(model, config, verify=False)
    assert model.config.max_position_embeddings == 4 * TRAINED + OFFSET[subject]
    assert model.config.original_max_position_embeddings == TRAINED
    assert posenc.max_length(model) == model.generation_config.max_length == 4 * TRAINED
    posenc.unpatch(model)
    assert model.generation_config is generation
    assert (generation.max_length, model.config.max_position_embeddings) == (TRAINED, TRAINED + OFFSET[subject])


@pytest.mark.parametrize(("limit", "rows", "expected"), [(20, 256, 20), (64, 32, 32), (40, 32, 32), (None, 256, None)])
def test_a_limit_that_was_not_the_models_stays_where_it_can(limit: Any, rows: int, expected: Any) -> None:
    model = SUBJECTS["gpt2"].fresh()
    model.generation_config = GenerationConfig(max_length=limit)
    posenc.patch(model, posenc.Learned(max_position_embeddings=rows, extension="tile"), verify=False)
    assert model.generation_config.max_length == expected


def test_distances_that_have_rows_are_no_limit() -> None:
    model = posenc.patch(SUBJECTS["bert"].fresh(), posenc.encoding("bert_relative", max_position_embeddings=16))
    assert model.config.max_position_embeddings == TRAINED
    assert posenc.max_length(model) is None


@pytest.mark.parametrize(
    ("options", "length"),
    [("{max_position_embeddings: 512, extension: tile}", 512), ("{max_position_embeddings: 32}", 32)],
)
def test_a_folder_speaks_of_one_length(options: str, length: int, tmp_path: Path) -> None:
    before = AutoTokenizer.from_pretrained(TINY).model_max_length
    arguments = ["patch", str(TINY), "--encoding", "learned", "--output", str(tmp_path / "out"), "--options", options]
    app(arguments, standalone_mode=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = posenc.from_pretrained(tmp_path / "out")
    lengths = {tokenizer.model_max_length, model.config.max_position_embeddings, posenc.max_length(model)}
    assert lengths == {length} != {before}
    assert AutoConfig.from_pretrained(tmp_path / "out").max_position_embeddings == length
    assert len(tokenizer("word " * 2 * length, truncation=True).input_ids) == length


def test_a_model_without_an_end_has_a_tokenizer_without_one() -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(TINY), posenc.from_pretrained(TINY)
    posenc.set_model_max_length(tokenizer, model)
    assert tokenizer.model_max_length == posenc.max_length(model)
    posenc.set_model_max_length(tokenizer, posenc.patch(model, posenc.Alibi()))
    assert tokenizer.model_max_length == VERY_LARGE_INTEGER
