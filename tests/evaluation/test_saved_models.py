"""Saved models are measured whole or not at all, and one at a time."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaModel,
)

from hf_posenc.errors import CheckpointError, ConfigError
from hf_posenc.evaluation import loading
from hf_posenc.evaluation.checkpoints import evaluate_checkpoints
from hf_posenc.report import read_curves
from hf_posenc.report.command import main
from hf_posenc.report.diagnosis import diagnose_checkpoints
from hf_posenc.report.launching import INTERRUPTED, named_paths
from tests.evaluation.models import SMALL, VOCABULARY, gpt2, llama
from tests.evaluation.retrievers import characters

TEXTS = ["The first text, and not a long one.", "Another text."]


def saved(model: Any, folder: Path, *, tokenizer: bool = True) -> str:
    """The folder of a model, with a tokenizer of characters."""
    model.save_pretrained(folder)
    if tokenizer:
        characters().save_pretrained(folder)
    return str(folder)


def test_a_body_whose_head_would_be_random_is_refused(tmp_path: Path) -> None:
    body = saved(LlamaModel(llama().config), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"no causal language model: lm_head\.weight"):
        evaluate_checkpoints({"m": body}, TEXTS, [8])


def test_the_decoder_of_an_encoder_decoder_is_not_taken_for_a_language_model(tmp_path: Path) -> None:
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, max_position_embeddings=32
    )
    path = saved(BartForConditionalGeneration(config), tmp_path)
    with pytest.raises(CheckpointError, match=r"encoder-decoder, and no causal .*: give protocol 'by_source'"):
        evaluate_checkpoints({"m": path}, TEXTS, [8])
    (curve,) = evaluate_checkpoints({"m": path}, [tuple(TEXTS)], [8], protocols=["by_source"])
    assert curve.ppl


def test_a_tokenizer_without_words_is_none(tmp_path: Path) -> None:
    """For GPT-2, transformers makes a tokenizer that knows no token out of a folder without any of its files."""
    path = saved(gpt2(), tmp_path / "m", tokenizer=False)
    (tmp_path / "a.txt").write_text(TEXTS[0], encoding="utf-8")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        evaluate_checkpoints({"m": path}, TEXTS, [8])
    with pytest.raises(CheckpointError, match="no tokenizer"):
        diagnose_checkpoints([path], tmp_path / "out", documents=str(tmp_path / "a.txt"))


@pytest.mark.parametrize("damage", ["weights", "config", "shape"])
def test_a_damaged_checkpoint_is_one_line(damage: str, tmp_path: Path) -> None:
    path = saved(gpt2(), tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    if damage == "weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    else:
        change = {"n_head": "four"} if damage == "config" else {"n_positions": 32}
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(CheckpointError, match="no causal language model: ") as found:
        evaluate_checkpoints({"m": path}, TEXTS, [8])
    assert "\n" not in str(found.value)


def test_no_model_is_in_memory_beside_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, alive, load = saved(gpt2(), tmp_path), [], loading.load

    def watched(*arguments: Any) -> tuple[Any, Any]:
        gc.collect()
        assert [model() for model in alive] == [None] * len(alive)
        model, tokenizer = load(*arguments)
        alive.append(weakref.ref(model))
        return model, tokenizer

    monkeypatch.setattr(loading, "load", watched)
    gc.freeze()  # what was there before need not be searched
    assert len(evaluate_checkpoints({"a": path, "b": path}, TEXTS, [8], protocols=["hf_docs"])) == 2
    gc.unfreeze()
    assert len(alive) == 2


def test_a_stride_of_nothing_is_refused_for_masked_models_too(tmp_path: Path) -> None:
    path = saved(BertForMaskedLM(BertConfig(**SMALL)), tmp_path)
    with pytest.raises(ConfigError):
        evaluate_checkpoints({"m": path}, TEXTS, [8], protocols=["pseudo"], stride=0)


def test_a_path_may_hold_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "lr=0.1").mkdir()
    path = str(tmp_path / "lr=0.1")
    found = named_paths([path, f"mine={path}", "owner/name"])
    assert found == {"lr=0.1": path, "mine": path, "owner/name": "owner/name"}
    for empty in ("=x", "a=", "", " =x"):
        with pytest.raises(ConfigError, match="names no model"):
            named_paths([empty])


def test_a_run_that_is_stopped_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    path = saved(gpt2(), tmp_path / "m")
    (tmp_path / "a.txt").write_text("﻿" + TEXTS[0], encoding="utf-8")
    command = ["--model", path, "--documents", str(tmp_path / "a.txt"), "--lengths", "8", "16"]
    command += ["--output", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(GPT2LMHeadModel, "forward", stop)
        assert main(command) == INTERRUPTED
    said = capsys.readouterr().err
    assert "stopped" in said
    assert "go on from them" in said
    assert "Traceback" not in said
    assert main(command) == 0
    (curve, _) = read_curves(tmp_path / "out")
    assert curve.n_bytes == len(TEXTS[0])  # the mark that some editors put in front is no text
