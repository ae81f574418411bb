"""Files that cannot be trusted are refused before anything in them runs; arguments of transformers reach it."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2LMHeadModel, TorchAoConfig

import hf_posenc as posenc
from hf_posenc.errors import CheckpointError, ConfigError
from tests.models import SUBJECTS, assert_same, logits, patched, tokens

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Bomb:
    """Unpickling this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return Path.write_text, (self.path, "went off")  # type: ignore[return-value]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model whose table was learned."""
    patched("gpt2", "learned-tile").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewrite_config(folder: Path, **change: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))


def rewrite_spec(folder: Path, **change: object) -> None:
    rewrite_config(folder, posenc={**json.loads((folder / "config.json").read_text())["posenc"], **change})


@pytest.mark.parametrize("named", ["pytorch_model.bin", WEIGHTS])
def test_a_pickle_is_not_opened_whatever_it_is_called(folder: Path, named: str) -> None:
    (folder / WEIGHTS).unlink()
    bomb = folder.parent / "bomb"
    (folder / named).write_bytes(pickle.dumps(Bomb(bomb)))
    with pytest.raises(CheckpointError, match=r"pickle|damaged"):
        posenc.from_pretrained(folder)
    with pytest.raises(Exception):  # noqa: B017, PT011 - by transformers, whose error it is
        AutoModelForCausalLM.from_pretrained(folder)
    assert not bomb.exists()


def test_asking_for_a_pickle_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="safetensors only"):
        posenc.from_pretrained(folder, use_safetensors=False)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/elsewhere.safetensors", "..\\elsewhere.safetensors"])
def test_an_index_that_leads_out_of_the_checkpoint_is_refused(folder: Path, name: str) -> None:
    shutil.move(folder / WEIGHTS, folder.parent / "elsewhere.safetensors")
    keys = load_file(folder.parent / "elsewhere.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(keys, name)}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a file of this checkpoint"):
        posenc.from_pretrained(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', "{}"])
def test_an_index_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="where the weights are"):
        posenc.from_pretrained(folder)


@pytest.mark.parametrize("size", [2**40, 2**63, 101 * 2**20])
def test_a_header_that_claims_too_much_is_refused(folder: Path, size: int) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + (folder / WEIGHTS).read_bytes()[8:])
    with pytest.raises(CheckpointError, match="cannot be read"):
        posenc.from_pretrained(folder)


def test_an_architecture_that_is_no_model_is_refused(folder: Path) -> None:
    rewrite_config(folder, architectures=["Posenclogging"])
    with pytest.raises(CheckpointError, match="Posenclogging"):
        posenc.from_pretrained(folder)


@pytest.mark.parametrize(
    ("version", "said"), [(2, "newer hf_posenc wrote it"), (0, "no release"), ("1", "no release"), (None, "no release")]
)
def test_specs_of_other_versions_are_refused_by_name(folder: Path, version: object, said: str) -> None:
    rewrite_spec(folder, version=version)
    with pytest.raises(ConfigError, match=f"{version!r} of 'learned'.*{said}"):
        posenc.from_pretrained(folder)


def test_a_new_class_may_have_parts_that_the_checkpoint_has_nothing_of(tmp_path: Path) -> None:
    patched("bert", "learned").save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert posenc.is_patched(classifier)
    assert torch.equal(classifier.bert.posenc.weight, patched("bert", "learned").bert.posenc.weight)
    weights = load((tmp_path / WEIGHTS).read_bytes())  # not mapped: the file is written over
    for lost in ("bert.posenc.weight", "bert.encoder.layer.1.output.dense.bias"):
        save_file({key: value for key, value in weights.items() if key != lost}, tmp_path / WEIGHTS, {"format": "pt"})
        with pytest.raises(CheckpointError, match=lost):
            AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_weights_of_something_else_are_refused(folder: Path) -> None:
    save_file({"unrelated": torch.ones(1)}, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(CheckpointError, match="nothing of PosencGPT2LMHeadModel"):
        posenc.from_pretrained(folder)


def test_new_weights_win_over_any_older_layout(tmp_path: Path) -> None:
    older = patched("gpt2", "alibi", own=True)
    torch.save(older.state_dict(), tmp_path / "pytorch_model.bin")
    older.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / INDEX).exists()
    with torch.no_grad():
        older.transformer.ln_f.bias.add_(1.0)
    older.save_pretrained(tmp_path)
    ids = tokens(1, 9)
    for loaded in (posenc.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert torch.equal(logits(loaded.eval(), ids), logits(older, ids))


def test_shards_load(tmp_path: Path) -> None:
    model = patched("gpt2", "learned-tile")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(logits(posenc.from_pretrained(tmp_path).eval(), tokens(1, 9)), logits(model, tokens(1, 9)))


def test_placement_and_dtype_are_those_asked_for(folder: Path) -> None:
    model = posenc.from_pretrained(folder, device_map={"": "cpu"}, dtype=torch.float64)
    assert model.dtype == torch.float64
    expected = logits(patched("gpt2", "learned-tile"), tokens(1, 9))
    assert_same(logits(model, tokens(1, 9)).float(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("config", [posenc.Alibi(), posenc.encoding("kerple")])
def test_projections_load_quantised_and_what_an_encoding_trains_does_not(
    config: posenc.EncodingConfig, tmp_path: Path
) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    model = posenc.patch(SUBJECTS["llama"].fresh(), config, verify=False)
    model.save_pretrained(tmp_path)
    found = posenc.from_pretrained(tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    assert type(found.model.layers[0].self_attn.q_proj.weight).__name__ == "Int8Tensor"
    own = {name: p.dtype for name, p in found.named_parameters() if "posenc" in name}
    assert len(own) == sum("posenc" in name for name, _ in model.named_parameters())
    assert set(own.values()) <= {torch.float32}
    expected, given = logits(model, tokens(1, 40)), logits(found, tokens(1, 40))
    assert 0 < (given - expected).abs().max() < 0.1 * expected.abs().max()  # rounded to 8 bits, and nothing else


def test_stock_models_with_pickled_weights_have_to_be_asked_for(tmp_path: Path) -> None:
    model = SUBJECTS["gpt2"].fresh()
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        posenc.from_pretrained(tmp_path)
    assert type(posenc.from_pretrained(tmp_path, use_safetensors=False)) is GPT2LMHeadModel
