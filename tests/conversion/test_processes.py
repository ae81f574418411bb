"""Fine-tuning in processes of its own: killed for real, and spread over two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests.launching import TORCHRUN

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny GPT-2 without dropout in `model`, its byte tokenizer, and `text.txt`."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate([*alphabet, "<end>"])}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>").save_pretrained(folder / "model")
    (folder / "text.txt").write_text("".join(f"{i * i:x}," for i in range(1000)), encoding="utf-8")
    return folder


def command(base: Path, folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> list[str]:
    options = {"model": base / "model", "documents": base / "text.txt", "output_dir": folder, "encoding": "learned"}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    table = ("--encoding_options", "{max_position_embeddings: 16}")
    return [sys.executable, *launcher, str(ROOT / "scripts" / "finetune.py"), *flags, *table, *arguments]


def execute(base: Path, folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Run to the end and return the saved weights."""
    subprocess.run(command(base, folder, *arguments, launcher=launcher), env=ENVIRONMENT, check=True, timeout=300)
    return load_file(folder / "model.safetensors")


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.slow
def test_two_processes_give_what_one_gives_with_the_doubled_batch(base: Path, tmp_path: Path) -> None:
    one = execute(base, tmp_path / "one", "--max_steps=6", "--per_device_train_batch_size=4")
    two = execute(base, tmp_path / "two", "--max_steps=6", "--per_device_train_batch_size=2", launcher=TORCHRUN)
    assert difference(one, two) < 1e-5
    records = [json.loads((tmp_path / name / "result.json").read_text(encoding="utf-8")) for name in ("one", "two")]
    assert [record["processes"] for record in records] == [1, 2]
    assert records[0]["tokens_seen"] == records[1]["tokens_seen"]
    assert records[0]["final_loss"] == pytest.approx(records[1]["final_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_weights(base: Path, tmp_path: Path) -> None:
    arguments = ("--max_steps=400", "--per_device_train_batch_size=2", "--save_steps=20")
    whole = execute(base, tmp_path / "whole", *arguments)
    killed = subprocess.Popen(command(base, tmp_path / "killed", *arguments), env=ENVIRONMENT)
    deadline = time.monotonic() + 200
    while not (tmp_path / "killed" / "checkpoints" / "checkpoint-60").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed" / "result.json").exists()
    resumed = execute(base, tmp_path / "killed", *arguments, "--resume")
    assert difference(whole, resumed) == 0
    record = json.loads((tmp_path / "killed" / "result.json").read_text(encoding="utf-8"))
    assert record["resumed_from"] is not None
