"""Train the small GPT-2 that the quickstart converts: learned absolute positions, byte-level BPE, embedded corpus."""

from __future__ import annotations

import copy
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

from hf_posenc.config import EncodingConfig
from hf_posenc.conversion.training import causal_batch, packed_perplexity
from hf_posenc.data import EMBEDDED, HELD_OUT, TRAIN, Document, PackedDataset, describe, load_documents, pack, tokenize
from hf_posenc.errors import ConfigError, OutputExistsError
from hf_posenc.hub.loading import from_pretrained
from hf_posenc.patching import patch
from hf_posenc.provenance import git_state, versions

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


def pretrain(
    config: PretrainConfig, output_dir: str | Path, *, encoding: EncodingConfig | None = None, command: str = ""
) -> dict[str, Any]:
    """Train tokenizer and model from nothing and write them, with their log, into `output_dir`; return the log.

    Args:
        config: shape and schedule.
        output_dir: new folder. The weights are stored as float16 and load as float32.
        encoding: what tells positions from the first step on, in place of the learned table: what an encoding is worth
            on the same budget, without a conversion.
        command: recorded as what reproduces the run.

    Raises:
        OutputExistsError: `output_dir` already holds a trained model.
        UnsupportedEncodingError: the encoding does not fit a GPT-2 of this shape.
    """
    folder = Path(output_dir)
    if (folder / LOG_NAME).exists():
        raise OutputExistsError(f"{folder} already holds a trained model. Name another folder or delete this one.")
    source = git_state()
    texts = {split: load_documents(EMBEDDED, split=split) for split in (TRAIN, HELD_OUT)}
    tokenizer = train_tokenizer(texts[TRAIN], vocab_size=config.vocab_size, length=config.length)
    end_of_text_id = int(tokenizer.eos_token_id)
    rows = {
        TRAIN: pack(tokenize(texts[TRAIN], tokenizer), config.length, eos_token_id=end_of_text_id, seed=config.seed),
        HELD_OUT: pack(tokenize(texts[HELD_OUT], tokenizer), config.length, eos_token_id=end_of_text_id),
    }
    model, losses, seconds = _train(config, rows[TRAIN], encoding, end_of_text_id=end_of_text_id)
    perplexity = packed_perplexity(model, rows[HELD_OUT].dataset)
    _save(model, tokenizer, folder)
    stored = from_pretrained(folder)
    text_bytes = sum(len(document.text.encode()) for document in texts[HELD_OUT])
    log = {
        "command": command,
        "config": asdict(config) | {"batch_size": BATCH_SIZE, "warmup_steps": _warmup(config)},
        "encoding": None if encoding is None else encoding.to_dict(),
        "parameters": model.num_parameters(),
        "tokens_seen": config.steps * BATCH_SIZE * config.length,
        "seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "source": source,
        "corpus": {split: describe(documents) for split, documents in texts.items()},
        "packing": {split: packed.report.as_dict() for split, packed in rows.items()},
        "held_out_bytes_per_token": text_bytes / rows[HELD_OUT].report.tokens_in,
        "held_out_perplexity": perplexity,
        "held_out_perplexity_as_stored": packed_perplexity(stored, rows[HELD_OUT].dataset),
        "loss": losses,
    }
    (folder / LOG_NAME).write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    return log


def _train(
    config: PretrainConfig, rows: PackedDataset, encoding: EncodingConfig | None, *, end_of_text_id: int
) -> tuple[GPT2LMHeadModel, list[list[float]], float]:
    """Return the trained model, its (step, nats per token) pairs, and the seconds it took."""
    set_seed(config.seed)
    model = build_model(config, end_of_text_id=end_of_text_id)
    if encoding is not None:
        patch(model, encoding)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = _training_arguments(config, scratch)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows.dataset, data_collator=causal_batch)
        trainer.train()
    losses = [[entry["step"], float(entry["loss"])] for entry in trainer.state.log_history if "loss" in entry]
    return model, losses, time.perf_counter() - start


def _warmup(config: PretrainConfig) -> int:
    return min(WARMUP_STEPS, config.steps // 10)


def _training_arguments(config: PretrainConfig, scratch: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=scratch,
        max_steps=config.steps,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=_warmup(config),
        weight_decay=0.1,
        adam_beta2=0.95,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        seed=config.seed,
    )


def _save(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Store half-precision weights whose config makes float32 the dtype that `from_pretrained` takes by default."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.use_cache = model.generation_config.use_cache = True  # the Trainer turns it off, also in what is saved
    copy.deepcopy(model).half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(stored | {"dtype": "float32"}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
