"""Laws of a fine-tuning run: exact loss, the same weights after a kill, nothing written where nothing may be."""

from __future__ import annotations

import gc
import json
import math
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    modeling_utils,
)

import hf_posenc as posenc
from hf_posenc.conversion import finetune as module
from hf_posenc.conversion.finetune import RunResult, dry_run, finetune
from hf_posenc.conversion.finetune_config import FinetuneConfig, read_config
from hf_posenc.conversion.training import packed_perplexity
from hf_posenc.data import load_documents, pack, tokenize
from hf_posenc.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LengthError,
    OutputExistsError,
    UnknownNameError,
)

LENGTH, ROWS = 16, 24
SCRIPT = Path(__file__).parents[2] / "scripts" / "finetune.py"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate([*alphabet, "<end>"])}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")


@pytest.fixture(scope="module", autouse=True)
def _quick_collection() -> Iterator[None]:
    """Accelerate collects garbage twice a run, which walks every imported object unless they are set aside."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny GPT-2 (16 learned positions) in `model`, and `text.txt` that fills exactly 24 rows."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256
    )
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    text = "".join(f"{i * i:x}," for i in range(200))
    (folder / "text.txt").write_text(text[: LENGTH * ROWS - 1], encoding="utf-8")
    return folder


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Callable[..., RunResult]:
    """Return a function that fine-tunes the base into `tmp_path / name` for a few steps."""

    def start(name: str = "run", *, resume: bool = False, **options: Any) -> RunResult:
        return finetune(settings(base, tmp_path / name, **options), resume=resume)

    return start


def settings(base: Path, folder: Path, **options: Any) -> FinetuneConfig:
    defaults = {
        "model": str(base / "model"),
        "documents": str(base / "text.txt"),
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "save_steps": 2,
        "warmup_steps": 1,
        "learning_rate": 1e-2,
    }
    return FinetuneConfig(**(defaults | options))  # type: ignore[arg-type]


def difference(one: Any, other: Any) -> float:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes the given batch, counted from 1, end the run as Ctrl-C would."""
    stock = module.causal_batch

    def arm(batch: int) -> None:
        seen = 0

        def collate(rows: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == batch:
                monkeypatch.setattr(module, "causal_batch", stock)
                raise KeyboardInterrupt
            return stock(rows)

        monkeypatch.setattr(module, "causal_batch", collate)

    return arm


def test_tokens_are_counted_as_they_were_seen(run: Any) -> None:
    """24 rows are 4 batches of 5: accumulating 3, an epoch is a step of 15 rows and one of 5."""
    result = run(max_steps=4, per_device_train_batch_size=5, gradient_accumulation_steps=3)
    assert result.record["tokens_seen"] == 2 * (15 + 5) * LENGTH


WAYS: dict[str, dict[str, Any]] = {
    "as it is, past one epoch": {"per_device_train_batch_size": 8},
    "alibi, accumulated": {"encoding": "alibi", "gradient_accumulation_steps": 2},
    "learned, LoRA": {"encoding": "learned", "encoding_options": {"max_position_embeddings": 16}, "lora_rank": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_gives_the_weights_of_the_uninterrupted_one(run: Any, kill_at: Any, way: str) -> None:
    whole = run("whole", **WAYS[way])
    kill_at(5 * WAYS[way].get("gradient_accumulation_steps", 1) + 1)
    with pytest.raises(KeyboardInterrupt):
        run("killed", **WAYS[way])
    resumed = run("killed", resume=True, **WAYS[way])
    assert resumed.record["resumed_from"] == "checkpoint-4"
    assert difference(whole.model, resumed.model) == 0
    assert whole.record["losses"] == resumed.record["losses"]
    assert whole.record["tokens_seen"] == resumed.record["tokens_seen"]


def test_a_half_written_checkpoint_is_passed_over(run: Any, kill_at: Any, tmp_path: Path) -> None:
    whole = run("whole")
    kill_at(6)
    with pytest.raises(KeyboardInterrupt):
        run("killed")
    newest = tmp_path / "killed" / "checkpoints" / "checkpoint-4"
    (newest / "trainer_state.json").write_text('{"epoch": 0.', encoding="utf-8")
    (newest / "model.safetensors").write_bytes(b"")
    resumed = run("killed", resume=True)
    assert resumed.record["resumed_from"] == "checkpoint-2"
    assert difference(whole.model, resumed.model) == 0


def test_a_run_killed_before_its_first_checkpoint_starts_over(run: Any, kill_at: Any) -> None:
    kill_at(2)
    with pytest.raises(KeyboardInterrupt):
        run("killed")
    resumed = run("killed", resume=True)
    assert resumed.record["resumed_from"] is None
    assert difference(run("whole").model, resumed.model) == 0


def test_an_unfinished_run_is_neither_overwritten_nor_resumed_as_another(run: Any, kill_at: Any) -> None:
    kill_at(4)
    with pytest.raises(KeyboardInterrupt):
        run()
    with pytest.raises(OutputExistsError, match="unfinished"):
        run()
    with pytest.raises(ConfigError, match=r"learning_rate 0\.01, not 0\.5"):
        run(resume=True, learning_rate=0.5)


@pytest.mark.parametrize("resume", [False, True])
def test_a_finished_run_is_left_alone(run: Any, tmp_path: Path, resume: bool) -> None:
    run(max_steps=1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(OutputExistsError, match="already holds a result"):
        run(max_steps=1, resume=resume)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_folder_that_holds_a_model_is_left_alone(base: Path) -> None:
    with pytest.raises(OutputExistsError, match="holds a model"):
        finetune(settings(base, base / "model"))
    with pytest.raises(OutputExistsError, match="is a file"):
        finetune(settings(base, base / "text.txt"))


@pytest.mark.parametrize("encoding", [None, "alibi"])
def test_the_reported_loss_is_the_mean_over_predicted_tokens(
    run: Any, base: Path, plain: Path, encoding: str | None
) -> None:
    """One step over the whole text reports the loss of the untouched model, whatever transformers counts."""
    result = run(model=str(plain), max_steps=1, per_device_train_batch_size=ROWS, encoding=encoding)
    model = AutoModelForCausalLM.from_pretrained(plain)
    if encoding:
        posenc.patch(model, posenc.Alibi())
    rows = pack(tokenize(load_documents(str(base / "text.txt")), byte_tokenizer()), LENGTH, eos_token_id=256)
    assert (rows.report.sequences, rows.report.dropped) == (ROWS, 0)
    expected = math.log(packed_perplexity(model, rows.dataset))
    assert result.record["final_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.6"),
    reason="the Trainer of transformers 5.5 ends 3e-5 of the loss away after three accumulated steps",
)
def test_accumulation_changes_nothing_but_memory(run: Any, plain: Path) -> None:
    options = {"model": str(plain), "max_steps": 3, "learning_rate": 1e-3}
    one = run("one", per_device_train_batch_size=4, **options)
    four = run("four", per_device_train_batch_size=1, gradient_accumulation_steps=4, **options)
    assert difference(one.model, four.model) < 1e-5
    assert [loss for _, loss in one.record["losses"]] == pytest.approx(
        [loss for _, loss in four.record["losses"]], rel=1e-5
    )
    assert one.record["tokens_seen"] == four.record["tokens_seen"] == 3 * 4 * LENGTH


@pytest.mark.parametrize(("encoding", "lora_rank"), [("alibi", 0), ("rope", 0), ("rope", 2)])
def test_gradient_checkpointing_changes_nothing_but_memory(
    run: Any, plain: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, lora_rank: int
) -> None:
    calls = []

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return torch.utils.checkpoint.checkpoint(*args, **kwargs)

    monkeypatch.setattr(modeling_utils, "checkpoint", checkpoint)
    options = {"model": str(plain), "max_steps": 3, "encoding": encoding, "learning_rate": 1e-3, "lora_rank": lora_rank}
    kept = run("kept", **options)
    assert not calls
    recomputed = run("recomputed", gradient_checkpointing=True, **options)
    assert len(calls) == 2 * 3  # each of two layers in each of three steps
    assert difference(kept.model, recomputed.model) < 1e-6
    assert recomputed.model.config.use_cache
    assert not any(getattr(part, "gradient_checkpointing", False) for part in recomputed.model.modules())


@pytest.fixture
def plain(base: Path, tmp_path: Path) -> Path:
    """The base without any dropout, whose gradients do not depend on how a batch is cut."""
    model = GPT2LMHeadModel.from_pretrained(base / "model", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model.save_pretrained(tmp_path / "plain")
    byte_tokenizer().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def test_the_run_folder_tells_everything(run: Any, base: Path, tmp_path: Path) -> None:
    result = run(encoding="rope", encoding_options={"theta": 500.0})
    folder = tmp_path / "run"
    record = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert record == json.loads(json.dumps(result.record))
    assert read_config(folder / "config.yaml") == settings(
        base, folder, encoding="rope", encoding_options={"theta": 500.0}
    )
    assert record["tokens_seen"] == 6 * 2 * LENGTH
    assert record["losses"][-1] == [6, record["final_loss"]]
    assert record["losses"][-1][1] < record["losses"][0][1]
    packing = record["packing"]
    assert packing["tokens_in"] + packing["separators"] == packing["tokens_out"] + packing["dropped"]
    assert {"python", "torch", "transformers", "hf_posenc"} <= record["versions"].keys()
    assert "RoPE" in record["plan"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [note for note in record["notes"] if "attn_pdrop" in note]  # GPT2Config's default is 0.1

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert posenc.is_patched(loaded)
    assert difference(loaded, result.model) == 0
    assert loaded.config.use_cache
    assert not result.model.training


def test_texts_begin_as_their_tokenizer_begins_them(base: Path, tmp_path: Path) -> None:
    """A model meets its start token whenever it is used, and may never have met an end token between texts."""
    tokenizer, folder = byte_tokenizer(), tmp_path / "started"
    tokenizer.add_special_tokens({"bos_token": "<start>"})
    framing = processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = framing
    model = GPT2LMHeadModel.from_pretrained(base / "model")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (tmp_path / "texts").mkdir()
    for number in range(LENGTH):
        (tmp_path / "texts" / f"{number}.txt").write_text("a" * (LENGTH - 1), encoding="utf-8")
    settled = settings(base, tmp_path / "run", model=str(folder), documents=str(tmp_path / "texts"))
    rows = module._prepare(settled).rows
    assert rows.dataset["input_ids"][:] == [tokenizer("a" * (LENGTH - 1))["input_ids"]] * LENGTH
    assert rows.dataset[0]["input_ids"][0] == tokenizer.bos_token_id
    assert rows.report.separators == 0


def test_lora_trains_and_saves_the_encodings_own_parameters(run: Any, base: Path, tmp_path: Path) -> None:
    options = {"encoding": "learned", "encoding_options": {"max_position_embeddings": 16}}
    result = run(lora_rank=2, **options)
    start = AutoModelForCausalLM.from_pretrained(base / "model")
    posenc.patch(start, posenc.Learned(max_position_embeddings=16))
    trained = result.model.transformer.posenc.weight
    assert not torch.equal(trained, start.transformer.posenc.weight)
    assert torch.equal(result.model.transformer.wte.weight, start.transformer.wte.weight)  # neither adapted nor saved
    assert not torch.equal(result.model.transformer.h[0].attn.c_attn.weight, start.transformer.h[0].attn.c_attn.weight)
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert torch.equal(adapter["base_model.model.transformer.posenc.weight"], trained)
    assert result.record["parameters"]["trainable"] < result.record["parameters"]["total"] / 2
    assert difference(AutoModelForCausalLM.from_pretrained(tmp_path / "run"), result.model) == 0


def test_a_dry_run_tells_the_budget_and_writes_nothing(base: Path, tmp_path: Path) -> None:
    text = dry_run(settings(base, tmp_path / "run", encoding="alibi"))
    assert "GPT2Attention -> AlibiGPT2Attention" in text
    assert "6 steps x 32 tokens = 192 tokens, 0.50 times the text" in text
    assert not (tmp_path / "run").exists()


def test_rows_past_the_table_are_refused_unless_the_encoding_goes_on(run: Any, tmp_path: Path) -> None:
    with pytest.raises(LengthError, match="32 tokens were asked for, and the model has positions for 16"):
        run(length=32)
    assert not (tmp_path / "run").exists()
    assert run(length=32, encoding="alibi", max_steps=1).record["packing"]["length"] == 32


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown encoding": ({"encoding": "alibbi"}, UnknownNameError, "alibi"),
    "unknown encoding option": ({"encoding": "rope", "encoding_options": {"teta": 1.0}}, Exception, "theta"),
    "no such text": ({"documents": "missing.txt"}, DataError, "no file"),
    "too little text": ({"length": 4096, "encoding": "alibi"}, DataError, "fewer than one row of 4096"),
    "too few rows for a step": (
        {"per_device_train_batch_size": 25},
        DataError,
        "takes 25 rows of 16 tokens .* fills 24",
    ),
    "no such model": ({"model": "./missing"}, CheckpointError, "does not load"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_anything_is_written(run: Any, tmp_path: Path, case: str) -> None:
    options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        run(**options)
    assert not (tmp_path / "run").exists()


def test_an_empty_text_is_refused(run: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match="holds no text"):
        run(documents=str(tmp_path / "empty.txt"))


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: base\noutput_dir: runs\nlearning_rate: 1e-3\nencoding: rope\n", encoding="utf-8")
    assert read_config(file) == FinetuneConfig(model="base", output_dir="runs", encoding="rope", learning_rate=1e-3)
    flags = {
        "output_dir": "2024",
        "encoding": "rope",
        "learning_rate": "5e-4",
        "encoding_options": "{theta: 1e6}",
        "bf16": "false",
        "length": "null",
    }
    config = read_config(file, flags)
    assert read_config(file, {"encoding": "null"}).encoding is None
    assert (config.output_dir, config.learning_rate, config.bf16, config.length) == ("2024", 5e-4, False, None)
    assert config.encoding_options == {"theta": 1e6}


def test_yaml_round_trips(tmp_path: Path) -> None:
    config = FinetuneConfig(
        model="m", output_dir="o", encoding="rope", encoding_options={"theta": 1e4, "scaling": None}, learning_rate=1e-5
    )
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert read_config(tmp_path / "config.yaml") == config


BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"learning_rte": 1}, "did you mean 'learning_rate'"),
    "missing": ({"model": None}, "model is None"),
    "text for a number": ({"max_steps": "many"}, "max_steps is 'many'; it must be int"),
    "text for a rate": ({"learning_rate": "fast"}, "must be float"),
    "fraction of a step": ({"max_steps": 1.5}, "must be int"),
    "truth for a number": ({"seed": True}, "must be int"),
    "number for a name": ({"output_dir": 2024}, "must be str"),
    "no steps": ({"max_steps": 0}, "at least 1"),
    "not a number": ({"learning_rate": math.nan}, "at least 0"),
    "no rate": ({"learning_rate": 0.0}, "trains nothing"),
    "one-token rows": ({"length": 1}, "at least 2"),
    "options of nothing": ({"encoding_options": {"theta": 1.0}}, "without an encoding"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_option_is_refused_by_name(case: str) -> None:
    values, message = BAD_VALUES[case]
    with pytest.raises(ConfigError, match=message):
        FinetuneConfig.from_mapping({"model": "m", "output_dir": "o"} | values)


@pytest.mark.parametrize(("text", "message"), [("- a", "holds a list"), ("a: [", "not YAML"), ("seed: 1", "model and")])
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="no config file"):
        read_config(tmp_path / "missing.yaml")


def script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["finetune.py", *arguments])
    return int(runpy.run_path(str(SCRIPT))["main"]())


def test_the_script(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(settings(base, tmp_path / "run").to_yaml(), encoding="utf-8")
    arguments = ("--config", str(tmp_path / "run.yaml"), "--max_steps", "2")
    assert script(monkeypatch, *arguments, "--dry_run") == 0
    assert "2 steps x 32 tokens = 64 tokens" in capsys.readouterr().out
    assert script(monkeypatch, *arguments) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["steps"] == 2
    assert script(monkeypatch, *arguments) == 2
    assert "error: " in capsys.readouterr().err
