"""Train the small GPT-2 that the quickstart converts: learned absolute positions, byte-level BPE, embedded corpus."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

from hf_posenc.conversion.provenance import git_state, versions
from hf_posenc.conversion.training import causal_batch, packed_perplexity
from hf_posenc.data import EMBEDDED, HELD_OUT, Document, describe, load_documents, pack, tokenize
from hf_posenc.errors import ConfigError, OutputExistsError

END_OF_TEXT = "<|endoftext|>"
LOG_NAME = "training_log.json"


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Shape and schedule of the base model. Lengths in tokens, sizes in features, steps in optimizer steps.

    Raises:
        ConfigError: a size that is not positive, or a hidden size that the heads do not divide.
    """

    steps: int = 3000
    vocab_size: int = 2048
    length: int = 128
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    learning_rate: float = 6e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "seed" and value <= 0:
                raise ConfigError(f"{name} is {value}; it must be positive.")
        if self.hidden_size % self.num_heads:
            raise ConfigError(f"{self.num_heads} heads do not divide a hidden size of {self.hidden_size}.")


BATCH_SIZE = 32  # rows a step: 4,096 tokens at 128
WARMUP_STEPS = 200


def train_tokenizer(documents: list[Document], *, vocab_size: int, length: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of `vocab_size` entries trained on `documents`; every byte string round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([document.text for document in documents], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=length,
        clean_up_tokenization_spaces=False,
    )


def build_model(config: PretrainConfig, *, end_of_text_id: int) -> GPT2LMHeadModel:
    """Return a fresh float32 GPT-2 with tied embeddings, a learned position table and no dropout."""
    gpt2 = GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.length,
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        activation_function="gelu_pytorch_tanh",  # one kernel; gelu_new computes the same in eight
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end_of_text_id,
        eos_token_id=end_of_text_id,
        pad_token_id=end_of_text_id,
    )
    model = GPT2LMHeadModel(gpt2)
    model.loss_type = "ForCausalLM"  # the class name hides it from transformers, which would warn at every run
    return model


def pretrain(config: PretrainConfig, output_dir: str | Path, *, command: str = "") -> dict[str, Any]:
    """Train tokenizer and model from nothing and write them, with their log, into `output_dir`; return the log.

    `command` is recorded as what reproduces the run. The weights are stored as float16 and load as float32.

    Raises:
        OutputExistsError: `output_dir` already holds a trained model.
    """
    folder = Path(output_dir)
    if (folder / LOG_NAME).exists():
        raise OutputExistsError(f"{folder} already holds a trained model. Name another folder or delete this one.")
    source = git_state()
    train, held_out = load_documents(EMBEDDED), load_documents(EMBEDDED, split=HELD_OUT)
    tokenizer = train_tokenizer(train, vocab_size=config.vocab_size, length=config.length)
    end_of_text_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    rows = pack(tokenize(train, tokenizer), config.length, eos_token_id=end_of_text_id, seed=config.seed)
    test_tokens = tokenize(held_out, tokenizer)
    test_rows = pack(test_tokens, config.length, eos_token_id=end_of_text_id)
    print(f"train {rows.report}\nheld out {test_rows.report}", flush=True)

    set_seed(config.seed)
    model = build_model(config, end_of_text_id=end_of_text_id)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model=model,
            args=_training_arguments(config, scratch),
            train_dataset=rows.dataset,
            data_collator=causal_batch,
        )
        trainer.train()
    seconds = time.perf_counter() - start

    perplexity = packed_perplexity(model, test_rows.dataset)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.use_cache = model.generation_config.use_cache = True  # the Trainer turns it off, also in what is saved
    model.to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _load_as_float32(folder)
    stored = GPT2LMHeadModel.from_pretrained(folder)
    text_bytes = sum(len(document.text.encode()) for document in held_out)
    log = {
        "command": command,
        "config": asdict(config) | {"batch_size": BATCH_SIZE, "warmup_steps": WARMUP_STEPS},
        "parameters": model.num_parameters(),
        "tokens_seen": config.steps * BATCH_SIZE * config.length,
        "seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "source": source,
        "corpus": {"train": describe(train), "held_out": describe(held_out)},
        "packing": {"train": rows.report.as_dict(), "held_out": test_rows.report.as_dict()},
        "held_out_bytes_per_token": text_bytes / test_rows.report.tokens_in,
        "held_out_perplexity": perplexity,
        "held_out_perplexity_as_stored": packed_perplexity(stored, test_rows.dataset),
        "loss": [[int(entry["step"]), entry["loss"]] for entry in trainer.state.log_history if "loss" in entry],
    }
    (folder / LOG_NAME).write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    return log


def _training_arguments(config: PretrainConfig, scratch: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=scratch,
        max_steps=config.steps,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(WARMUP_STEPS, config.steps // 10),
        weight_decay=0.1,
        adam_beta2=0.95,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        seed=config.seed,
    )


def _load_as_float32(folder: Path) -> None:
    """Make float32 the dtype that `from_pretrained` takes by default: half precision is how the file is stored."""
    path = folder / "config.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(stored | {"dtype": "float32"}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
