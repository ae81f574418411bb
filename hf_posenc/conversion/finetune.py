"""Fine-tune a causal language model, usually right after its position encoding was replaced."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_posenc.conversion.adapters import add_lora, save_and_merge
from hf_posenc.conversion.batches import rows_of
from hf_posenc.conversion.finetune_config import FinetuneConfig
from hf_posenc.conversion.run_folder import (
    ADAPTER,
    CHECKPOINTS,
    last_checkpoint,
    require_free,
    write_config,
    write_result,
)
from hf_posenc.conversion.training import causal_batch
from hf_posenc.data import PackedDataset, PackingReport, describe, load_documents
from hf_posenc.errors import CheckpointError, ConfigError, DataError, LengthError
from hf_posenc.provenance import git_state, versions

# Under these names model configs keep the dropout of attention weights.
_ATTENTION_DROPOUTS = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob", "attn_dropout")


@dataclass(frozen=True)
class RunResult:
    """A finished run: the trained model (eval mode, LoRA merged), its tokenizer, and the content of `result.json`."""

    output_dir: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    record: dict[str, Any]


@dataclass
class _Run:
    """Everything that is known before the first step."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rows: PackedDataset
    facts: dict[str, Any]  # what result.json says about the above


def finetune(config: FinetuneConfig, *, resume: bool = False) -> RunResult:
    """Load, patch where an encoding is named, train, and write the run folder; return what was trained.

    The folder holds `config.yaml`, `result.json`, `loss.png`, the model and its tokenizer; with LoRA the model is the
    merged one and `adapter/` keeps the adapter. Under `accelerate launch` every process trains and the first writes.

    Args:
        config: what to do.
        resume: continue the unfinished run in `config.output_dir` from its last checkpoint (from the start if it was
            killed before the first). Weights end up the same as those of a run that was never stopped.

    Raises:
        OutputExistsError: the folder holds a result, a model, or an unfinished run without `resume`.
        OutputError: the folder cannot be written to.
        ConfigError: the config does not fit the model, or differs from the one of the run to resume.
        LengthError: rows longer than the model has positions for.
        DataError: documents that cannot be used.
    """
    require_free(config.output_dir, asdict(config), resume=resume)
    run = _prepare(config)
    folder = Path(config.output_dir)
    checkpoint = last_checkpoint(folder) if resume else None
    uses_cache = run.model.config.use_cache
    args = _training_arguments(config)
    _require_a_step(config, run.rows.report, processes=args.world_size)
    trainer = Trainer(
        model=run.model,
        args=args,
        train_dataset=run.rows.dataset,
        data_collator=causal_batch,
    )
    if trainer.is_world_process_zero():
        write_config(folder, config.to_yaml())
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    seconds = time.perf_counter() - start
    # What the Trainer set for training would otherwise be saved with the model, or slow its use.
    run.model.config.use_cache = uses_cache
    if config.gradient_checkpointing:
        run.model.gradient_checkpointing_disable()
    record = run.facts | _outcome(trainer, seconds=seconds, checkpoint=checkpoint)
    first = trainer.is_world_process_zero()
    model = save_and_merge(run.model, folder / ADAPTER if first else None) if config.lora_rank else run.model
    model.train(False)
    if first:
        model.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)
        write_result(folder, record)
    trainer.accelerator.wait_for_everyone()  # nobody reads the folder before it is whole
    return RunResult(output_dir=folder, model=model, tokenizer=run.tokenizer, record=record)


def dry_run(config: FinetuneConfig) -> str:
    """Return what `finetune(config)` would do, as text: plan, packing, token budget. Trains and writes nothing.

    Raises:
        Everything that `finetune` raises before its first step.
    """
    require_free(config.output_dir, asdict(config), resume=False)
    run = _prepare(config)
    args, packing = _training_arguments(config), run.rows.report
    _require_a_step(config, packing, processes=args.world_size)
    tokens = config.max_steps * _rows_a_step(config, args.world_size) * packing.length
    parameters = run.facts["parameters"]
    lines = [
        run.facts["plan"] or "No encoding named: the model is trained as it is.",
        f"Parameters: {parameters['trainable']:,} trained of {parameters['total']:,}.",
        f"Text: {packing.documents:,} documents, {packing.tokens_in:,} tokens + {packing.separators:,} separators "
        f"= {packing.sequences:,} rows of {packing.length} + {packing.dropped} dropped.",
        f"Budget: {config.max_steps:,} steps x {tokens // config.max_steps:,} tokens = {tokens:,} tokens, "
        f"{tokens / packing.tokens_out:.2f} times the text.",
        *run.facts["notes"],
    ]
    return "\n".join(lines)


def _prepare(config: FinetuneConfig) -> _Run:
    """Check and load everything a run needs; nothing is written."""
    import hf_posenc as posenc  # here, because the package's own front page imports this module's neighbours

    encoding = None if config.encoding is None else posenc.encoding(config.encoding, **config.encoding_options)
    documents = load_documents(config.documents)
    notes: list[str] = []
    model, tokenizer = _load(config.model, notes)
    length = config.length or posenc.max_length(model) or _trained_length(model)
    texts = [document.text for document in documents]
    rows = rows_of(texts, tokenizer, model, length=length, causal=True, seed=config.seed)
    plan = certificate = None
    set_seed(config.seed)
    if encoding is not None:
        plan = str(posenc.plan(model, encoding))
        model = posenc.patch(model, encoding)
        certificate = posenc.verify(model).findings
        posenc.set_model_max_length(tokenizer, model)
    positions = posenc.max_length(model)
    if positions is not None and length > positions:
        raise LengthError(
            f"Rows of {length} tokens were asked for, and the model has positions for {positions}. "
            "Take shorter rows, or name an encoding that goes further."
        )
    if config.lora_rank:
        model = add_lora(model, rank=config.lora_rank)
    counts = {
        "total": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    facts = {
        "config": asdict(config),
        "versions": versions(),
        "source": git_state(),
        "corpus": describe(documents),
        "packing": rows.report.as_dict(),
        "plan": plan,
        "certificate": certificate,
        "parameters": counts,
        "notes": notes,
    }
    return _Run(model=model, tokenizer=tokenizer, rows=rows, facts=facts)


def _load(name: str, notes: list[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        model_config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{name!r} does not load: {error}") from error
    if not torch.cuda.is_available():
        for key in _ATTENTION_DROPOUTS:
            if getattr(model_config, key, 0):
                rate = getattr(model_config, key)
                notes.append(f"{key} {rate} was set to 0: with dropout, attention leaves the CPU's fast kernel.")
                setattr(model_config, key, 0.0)
    model = AutoModelForCausalLM.from_pretrained(name, config=model_config, dtype=torch.float32)
    if getattr(model, "loss_type", None) is None:
        model.loss_type = "ForCausalLM"  # GPT-2's class name hides it, and transformers would warn
    return model, tokenizer


def _trained_length(model: PreTrainedModel) -> int:
    length = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ConfigError(f"{type(model).__name__} does not say which length it was trained for; give `length`.")
    return length


def _training_arguments(config: FinetuneConfig) -> TrainingArguments:
    on_cuda = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(Path(config.output_dir) / CHECKPOINTS),
        max_steps=config.max_steps,
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(config.warmup_steps, config.max_steps // 2),
        weight_decay=config.weight_decay,
        **_checkpointing(config),
        bf16=config.bf16 and on_cuda and torch.cuda.is_bf16_supported(),
        save_steps=config.save_steps,
        save_total_limit=2,  # a kill while the newest is written leaves the one before
        logging_steps=max(1, config.max_steps // 20),
        dataloader_drop_last=True,
        dataloader_pin_memory=on_cuda,
        use_cpu=not torch.accelerator.is_available(),  # unless told so, processes launched on CPUs train side by side
        include_num_input_tokens_seen="all",
        report_to="none",
        seed=config.seed,
    )


def _checkpointing(config: FinetuneConfig) -> dict[str, Any]:
    """Return the arguments that ask for it, which transformers 5.24 renamed; none where nobody does."""
    if not config.gradient_checkpointing:
        return {}
    renamed = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}}


def _rows_a_step(config: FinetuneConfig, processes: int) -> int:
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * processes


def _require_a_step(config: FinetuneConfig, packing: PackingReport, *, processes: int) -> None:
    wanted = _rows_a_step(config, processes)
    if packing.sequences < wanted:
        raise DataError(
            f"A step takes {wanted} rows of {packing.length} tokens and the text fills {packing.sequences}. "
            "Give more text, a smaller batch or shorter rows."
        )


def _outcome(trainer: Trainer, *, seconds: float, checkpoint: Path | None) -> dict[str, Any]:
    """Return the part of the record that only training can tell."""
    losses = [[int(entry["step"]), float(entry["loss"])] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "device": str(trainer.args.device),
        "processes": trainer.args.world_size,
        "bf16": trainer.args.bf16,
        "steps": trainer.state.global_step,
        "tokens_seen": int(trainer.state.num_input_tokens_seen),
        "seconds": round(seconds, 2),  # of this process; a resumed run counts from its checkpoint on
        "resumed_from": checkpoint.name if checkpoint else None,
        "final_loss": losses[-1][1],
        "losses": losses,
    }
