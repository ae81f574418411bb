"""What an export writes, and that it appears only after a process of its own has read it back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast, Starcoder2ForCausalLM
from typer.testing import CliRunner

import hf_posenc as posenc
from hf_posenc import cli
from hf_posenc.errors import ConfigError, ExportError, OutputExistsError
from hf_posenc.export import reread, writing
from hf_posenc.export.route import ROUTES
from hf_posenc.quickstart import BASE
from tests import checkpoints
from tests.export.models import ENCODINGS, MODELS, ROUTED, prepared
from tests.families import stacked
from tests.models import TRAINED, tokens


@pytest.fixture
def same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read exports back in this process: the same code, minus the seconds that starting one takes."""

    def here(folder: Path, expected: Path) -> dict[str, Any]:
        return {**reread.main(str(folder), str(expected)), "strangers": []}

    monkeypatch.setattr(writing, "_in_fresh_process", here)


def config_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return loaded


def test_the_bundled_model_says_the_same_in_a_process_without_this_package(tmp_path: Path) -> None:
    model = posenc.from_pretrained(BASE)
    posenc.patch(model, posenc.RoPE(), verify=False)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    export = posenc.export_native(model, tmp_path / "out", tokenizer)
    assert (export.target, export.architecture) == ("starcoder2", "Starcoder2ForCausalLM")
    assert export.findings["greedy tokens"] == "64 equal, after 128 tokens"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert not [name for name in names if name.endswith((".py", ".bin"))]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "posenc" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize("target", ["starcoder2", "gpt_neox", "self_rope", "jina_embeddings_v3", "mpnet"])
def test_float32_scores_and_tokens_agree(target: str, tmp_path: Path) -> None:
    name, spec, _ = next(cell for cell in ROUTED if cell[2] == target)
    export = posenc.export_native(prepared(name, spec), tmp_path / "out", target=target)
    assert "equal" in str(export)


@pytest.mark.slow
@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize(("name", "spec", "target"), ROUTED, ids=["-".join(cell) for cell in ROUTED])
def test_float32_scores_and_tokens_agree_everywhere(name: str, spec: str, target: str, tmp_path: Path) -> None:
    posenc.export_native(prepared(name, spec), tmp_path / "out", target=target)


@pytest.mark.usefixtures("same_process")
def test_a_t5_says_the_same(tmp_path: Path) -> None:
    model = stacked.stock("t5")
    posenc.patch(model, posenc.Alibi())
    export = posenc.export_native(model, tmp_path / "out", length=TRAINED + 80)
    assert export.findings["greedy tokens"] == "64 equal, after 80 tokens"
    assert export.findings["distances"].startswith("below 144")
    assert config_of(tmp_path / "out")["relative_attention_num_buckets"] == 4 * (TRAINED + 80)


@pytest.mark.usefixtures("same_process")
def test_what_the_config_said_is_carried_over(tmp_path: Path) -> None:
    ids = {"pad_token_id": 3, "bos_token_id": 4, "eos_token_id": 5, "initializer_range": 0.125}
    model = posenc.patch(MODELS["gpt2"].fresh(**ids).bfloat16(), ENCODINGS["rope-linear"])
    model.generation_config.repetition_penalty = 1.25
    posenc.export_native(model, tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert {key: config[key] for key in ids} == ids
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 4 * TRAINED  # as far as the scaling was made for
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["repetition_penalty"] == 1.25
    assert {weight.dtype for weight in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.usefixtures("same_process")
def test_legacy_keys_are_written_for_engines_that_read_them(tmp_path: Path) -> None:
    posenc.export_native(prepared("gpt2", "rope-partial"), tmp_path / "out", target="gpt_neox")
    config = config_of(tmp_path / "out")
    assert (config["rotary_pct"], config["rotary_emb_base"], config["tie_word_embeddings"]) == (0.5, 500.0, False)
    assert "embed_out.weight" in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.usefixtures("same_process")
def test_tokenizers_keep_a_class_that_older_releases_know(tmp_path: Path) -> None:
    vocabulary = WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary), unk_token="<unk>")
    posenc.export_native(prepared("gpt2", "rope"), tmp_path / "out", tokenizer)
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("a") == 0


@pytest.mark.usefixtures("same_process")
def test_tables_get_as_many_rows_as_were_asked_for(tmp_path: Path) -> None:
    export = posenc.export_native(prepared("opt", "nope"), tmp_path / "out", target="self_table", length=100)
    assert export.findings["positions"].startswith("100,")
    model = posenc.from_pretrained(tmp_path / "out")
    assert posenc.max_length(model) == 100
    assert not posenc.is_patched(model)
    with pytest.raises(ConfigError, match="between 1 and 64"):
        posenc.export_native(prepared("gpt2", "learned"), tmp_path / "no", length=65)


@pytest.mark.usefixtures("same_process")
def test_exporting_leaves_the_model_alone(tmp_path: Path) -> None:
    model = prepared("gpt2", "rope").train()
    before = model(input_ids=tokens(1, 9)).logits
    posenc.export_native(model, tmp_path / "out")
    assert model.training
    assert torch.equal(model(input_ids=tokens(1, 9)).logits, before)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(OutputExistsError, match="not an empty folder"):
        posenc.export_native(prepared("gpt2", "rope"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize("said", ["scores differ", "weights missing"])
def test_nothing_is_left_of_an_export_that_answers_otherwise(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = writing._write

    def broken(source: Any, target: Any, folder: Path) -> str:
        name = stock(source, target, folder)
        weights = load((folder / "model.safetensors").read_bytes())  # not mapped: the file is written over
        lost = weights.pop("model.layers.0.mlp.c_fc.weight")
        if said == "scores differ":
            weights["model.layers.0.mlp.c_fc.weight"] = lost * 1.001
        writing.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return name

    monkeypatch.setattr(writing, "_write", broken)
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match=said):
        posenc.export_native(prepared("gpt2", "rope"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_an_export_that_does_not_load_says_what_transformers_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"}')
    with pytest.raises(ExportError, match=r"cannot load what was written: .*Error"):
        writing._in_fresh_process(tmp_path, tmp_path / "expected.safetensors")


@pytest.mark.usefixtures("same_process")
def test_the_command_exports_what_patch_saved(tmp_path: Path) -> None:
    prepared("gpt2", "rope").save_pretrained(tmp_path / "in")
    arguments = ["export", str(tmp_path / "in"), str(tmp_path / "out"), "--length", "300"]
    result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert "Starcoder2ForCausalLM" in result.output
    assert "no tokenizer" in result.output
    assert config_of(tmp_path / "out")["max_position_embeddings"] == 300
    assert type(posenc.from_pretrained(tmp_path / "out")) is Starcoder2ForCausalLM


def test_the_command_lists_every_route() -> None:
    result = CliRunner().invoke(cli.app, ["export", "--list"], catch_exceptions=False)
    assert result.exit_code == 0
    assert all(name in result.output for name in ROUTES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "factor"), [(posenc.NoPE(), 1e30), (posenc.RoPE(scaling={"rope_type": "yarn", "factor": 4.0}), 4.0)]
)
def test_a_trained_llama_tells_the_same_story(spec: posenc.EncodingConfig, factor: float, tmp_path: Path) -> None:
    model, tokenizer = checkpoints.stories260k()
    posenc.patch(model, spec)
    export = posenc.export_native(model, tmp_path / "out", tokenizer)
    assert (export.target, export.architecture) == ("self_rope", LlamaForCausalLM.__name__)
    assert export.findings["greedy tokens"] == "64 equal, after 512 tokens"
    assert config_of(tmp_path / "out")["rope_parameters"]["factor"] == factor
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model, tokenizer = (cls.from_pretrained(sys.argv[1]) for cls in (AutoModelForCausalLM, AutoTokenizer))\n"
        "ids = tokenizer('Once upon a time', return_tensors='pt').input_ids\n"
        "print(tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False)[0]))\n"
        "assert 'hf_posenc' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True)
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    said = tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False)[0])
    assert done.stdout.strip() == said.strip(), done.stderr
