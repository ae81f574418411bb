"""The stages of one conversion, each measured before and after on the same held-out rows."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments, set_seed

from hf_posenc.config import Encoding
from hf_posenc.conversion.absorption import absorb, position_rows
from hf_posenc.conversion.adapters import add_lora, save_and_merge
from hf_posenc.conversion.annealing import Fade, Rows, annealed, old_positions
from hf_posenc.conversion.attention_fit import fit_attention, gains_rotation
from hf_posenc.conversion.batches import Batches, longest
from hf_posenc.conversion.calibration import HEAD_ROWS, attention_divergence, calibrate, can_calibrate
from hf_posenc.conversion.distillation import ConversionTrainer, Lesson, optimizer_of
from hf_posenc.conversion.layerwise import attention_paths, layer_paths, stream_positions
from hf_posenc.conversion.recipe import Calibrate, Recipe
from hf_posenc.conversion.rotation_choice import best_rotation
from hf_posenc.conversion.run_folder import ADAPTER, CHECKPOINTS, last_checkpoint
from hf_posenc.conversion.training import mean_loss, original_of
from hf_posenc.encodings.rope import RoPE
from hf_posenc.errors import ConfigError
from hf_posenc.evaluation.sharing import launched
from hf_posenc.patching import patch, unpatch
from hf_posenc.patching import plan as make_plan
from hf_posenc.planning import PatchPlan


@dataclass(kw_only=True)
class Stages:
    """One conversion under way.

    Attributes:
        model: the model; patched once `start` was called.
        plan: of the patch.
        recipe: what is done.
        batches: collates rows.
        rotations: what calibration chooses from, where there is nothing that it may fit (`rotation_choice`).
        train, held_out: datasets of rows.
        record: what came of every stage so far.
        calibration: how well the encoding could be fitted, and whether the fit was `kept`; None where none was made.
        training: device, steps, tokens, seconds and losses of the training.
    """

    model: PreTrainedModel
    plan: PatchPlan
    recipe: Recipe
    batches: Batches
    rotations: Sequence[RoPE]
    train: Any
    held_out: Any
    record: list[dict[str, Any]] = field(default_factory=list)
    calibration: dict[str, Any] | None = None
    training: dict[str, Any] = field(default_factory=dict)
    original: PreTrainedModel | None = field(default=None, init=False)
    fitted_on: Tensor | None = field(default=None, init=False)  # rows that the encoding was calibrated on
    rows: Tensor | None = field(default=None, init=False)  # what the original adds at every position, less what stays
    old: Encoding | None = field(default=None, init=False)
    means: tuple[float, float] = field(default=(0, 0), init=False)  # tokens and targets of a row

    @property
    def encoding(self) -> Encoding | None:
        """The encoding of the patched model, None where transformers itself computes it."""
        return getattr(self.plan.body_of(self.model), "posenc", None)

    @property
    def rows_a_step(self) -> int:
        """Rows of all processes in one step."""
        return self.recipe.batch_size * int(launched().num_processes)

    @property
    def tokens_a_step(self) -> int:
        """Tokens of all processes in one step, in the mean."""
        return round(self.rows_a_step * self.means[0])

    @property
    def steps(self) -> int:
        """Optimizer steps that the budget pays for."""
        return self.recipe.tokens // self.tokens_a_step

    def __post_init__(self) -> None:
        """Check that the budget and the text make steps.

        Raises:
            ConfigError: the budget does not pay for a step, or a step takes more rows than there are.
        """
        recipe, self.means = self.recipe, self.batches.means(self.train)
        if recipe.tokens and not self.steps:
            raise ConfigError(f"tokens={recipe.tokens} is less than one step, {self.tokens_a_step}; give more tokens.")
        if self.steps and len(self.train) < self.rows_a_step:
            raise ConfigError(f"the text fills {len(self.train)} rows, fewer than a step takes; give more text.")

    def start(self) -> None:
        """Patch, absorb and calibrate: everything that is not training.

        Raises:
            PosencError: what `patch` raises.
        """
        recipe, model = self.recipe, self.model
        self.rows = rows = position_rows(model)
        self.old = old_positions(model, self.plan) if recipe.anneal is not None else None
        fits = recipe.calibrate is not None and not recipe.lora_rank and gains_rotation(model, self.plan)
        before = self.loss()
        self.original = original = original_of(model, shared=not (self.steps or fits) or recipe.lora_rank > 0)
        patch(model, self.plan.config)
        after = self._note("replace", before)
        some = longest(self.train, (recipe.calibrate or Calibrate()).rows)
        if recipe.absorb is not None and rows is not None:
            first = min(recipe.absorb.first_row, len(rows) - 1)
            constant = rows[first:].double().mean(0).to(rows)
            if self._helps(some, lambda: absorb(model, constant)):
                self.rows = rows - constant
                if isinstance(self.old, Rows):
                    self.old = Rows(self.rows)
            after = self._note("absorb", after)
        if recipe.calibrate is not None:
            if fits:
                self._fit_attention(original, some)
            elif self.rotations:
                self._choose_rotation(some)
            elif self.encoding is not None and can_calibrate(self.encoding):
                self._calibrate(self.encoding, original, some)
            self._note("calibrate", after, tokens=some.num_rows * len(some[0]["input_ids"]))

    def _helps(self, rows: Any, change: Callable[[], Callable[[], object]]) -> bool:
        """Make a change, which returns what undoes it, and keep it where the loss on these rows is lower for it."""
        before, undo = self.loss(rows), change()
        kept = self.loss(rows) < before
        if not kept:
            undo()
        return kept

    def _calibrate(self, encoding: Encoding, original: PreTrainedModel, rows: Any) -> None:
        """Fit the encoding to the scores that these rows lost."""
        own, self.fitted_on = copy.deepcopy(encoding.state_dict()), (read := torch.tensor(rows["input_ids"]))

        def fit() -> Callable[[], object]:
            self.calibration = asdict(calibrate(self.model, original, read, self.plan.geometry))
            return lambda: encoding.load_state_dict(own)

        kept = self._helps(rows, fit)
        self.calibration = (self.calibration or {}) | {"kept": kept}

    def _fit_attention(self, original: PreTrainedModel, rows: Any) -> None:
        """Fit queries and keys to a rotation."""
        modules = [self.model.get_submodule(path) for path in self.plan.attention]
        own = [copy.deepcopy(module.state_dict()) for module in modules]

        def fit() -> Callable[[], object]:
            fit_attention(self.model, original, torch.tensor(rows["input_ids"]), self.plan)
            return lambda: [module.load_state_dict(weights) for module, weights in zip(modules, own, strict=True)]

        self.calibration = {"kept": self._helps(rows, fit)}

    def _choose_rotation(self, rows: Any) -> None:
        """Patch anew with the rotation under which the loss on these rows is lowest."""
        body = self.plan.body_of(self.model)
        chosen = best_rotation(body, self.rotations, self.plan, lambda: self.loss(rows))
        unpatch(self.model)
        self.plan = make_plan(self.model, chosen)
        patch(self.model, chosen)

    def run(self, folder: Path | None, *, resume: bool, seed: int) -> None:
        """Take all stages, and leave the model in eval mode; arguments as in `finish`."""
        if not hasattr(self.model, "hf_device_map"):  # one that is spread over devices stays where it is
            self.model.to(launched().device)
        set_seed(seed)
        self.start()
        if self.steps:
            self.finish(folder, resume=resume, seed=seed)
        self.model.train(False)

    def finish(self, folder: Path | None, *, resume: bool, seed: int) -> None:
        """Train until the budget is spent; checkpoints lie in `folder`, where there is one."""
        lesson, new = self._lesson(), self.encoding
        body = self.plan.body_of(self.model)
        if self.old is not None and new is not None:
            lesson.fade = Fade()
            body.posenc = annealed(self.old, new, lesson.fade)
        trained: Any = add_lora(self.model, rank=self.recipe.lora_rank) if self.recipe.lora_rank else self.model
        checkpoint = last_checkpoint(folder) if folder is not None and resume else None
        before = self.loss()
        with tempfile.TemporaryDirectory() as scratch:
            checkpoints = folder / CHECKPOINTS if folder is not None else Path(scratch)
            trainer = ConversionTrainer(
                lesson=lesson,
                model=trained,
                args=self._arguments(checkpoints, saves=folder is not None, seed=seed),
                train_dataset=self.train,
                data_collator=self.batches,
                optimizers=optimizer_of(trained, lesson, attention_paths(self.model, self.plan)),
                callbacks=[_Watch(self, lesson)],
            )
            first = trainer.is_world_process_zero()
            uses_cache, start = self.model.config.use_cache, time.perf_counter()
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        self.model.config.use_cache = uses_cache
        if lesson.fade is not None:
            body.posenc = new
        self._note_training(trainer.state.log_history, before)
        self._note_heads()  # before adapters are merged into weights that the original shares
        if self.recipe.lora_rank:
            self.model = save_and_merge(trained, folder / ADAPTER if folder and first else None)
        self.training |= {
            "device": str(trainer.args.device),
            "processes": trainer.args.world_size,
            "steps": trainer.state.global_step,
            "tokens_seen": trainer.state.global_step * self.tokens_a_step,
            "seconds": round(time.perf_counter() - start, 2),
            "resumed_from": checkpoint.name if checkpoint else None,
            "losses": [[e["step"], e["loss"]] for e in trainer.state.log_history if "loss" in e],
        }

    def _lesson(self) -> Lesson:
        recipe, first = self.recipe, torch.tensor(self.train[:1]["input_ids"])
        targets = recipe.batch_size * self.means[1]
        lesson = Lesson(recipe=recipe, steps=self.steps, targets=targets, causal=self.plan.geometry.causal)
        if recipe.distill is not None or recipe.layerwise is not None:
            lesson.original = self.original
        if recipe.layerwise is not None and self.original is not None:
            lesson.layers = layer_paths(self.model, self.plan)
            lesson.positions = stream_positions(self.original, lesson.layers[0], self.rows, first)
        return lesson

    def _arguments(self, folder: Path, *, saves: bool, seed: int) -> TrainingArguments:
        on_cuda = torch.cuda.is_available()
        return TrainingArguments(
            output_dir=str(folder),
            max_steps=self.steps,
            per_device_train_batch_size=self.recipe.batch_size,
            save_strategy="steps" if saves else "no",
            save_steps=max(1, self.steps // 10),
            save_total_limit=2,  # a kill while the newest is written leaves the one before
            logging_steps=max(1, self.steps // 20),
            remove_unused_columns=False,
            average_tokens_across_devices=False,  # the lesson sees to it
            ddp_find_unused_parameters=self.recipe.layerwise is not None,
            dataloader_drop_last=True,
            dataloader_pin_memory=on_cuda,
            use_cpu=not torch.accelerator.is_available(),
            report_to="none",
            seed=seed,
        )

    def loss(self, rows: Any = None) -> float:
        """Return the mean loss on rows, the held-out ones by default, at their own positions, in nats a target."""
        batches = dataclasses.replace(self.batches, reach=None)
        return mean_loss(self.model, self.held_out if rows is None else rows, batches, causal=batches.causal)

    def _note(self, stage: str, before: float, *, tokens: int = 0) -> float:
        after = self.loss()
        self.record.append({"stage": stage, "before": before, "after": after, "tokens": tokens})
        return after

    def _note_heads(self) -> None:
        """Add to the record of the calibration how far the attention of every head is from the original's by now."""
        if self.calibration is not None and self.fitted_on is not None and self.original is not None:
            found = attention_divergence(self.model, self.original, self.fitted_on[:HEAD_ROWS])
            self.calibration["divergence"]["trained"] = found

    def _note_training(self, log: list[dict[str, Any]], before: float) -> None:
        """Cut the training into its stages, at the held-out losses that were noted on the way."""
        done = 0
        for entry in log:
            if "held_out_loss" in entry:
                step, after = int(entry["step"]), float(entry["held_out_loss"])
                tokens = (step - done) * self.tokens_a_step
                self.record.append({"stage": entry["stage"], "before": before, "after": after, "tokens": tokens})
                done, before = step, after


class _Watch(TrainerCallback):
    """Notes the held-out loss at the end of every stage of the training, in the log that checkpoints keep."""

    def __init__(self, stages: Stages, lesson: Lesson) -> None:
        self.stages, self.lesson = stages, lesson

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure where a stage ends."""
        ended = [name for name, step in self.lesson.ends().items() if step == state.global_step]
        if ended:
            self.lesson.fade_to(state.global_step)
            loss = self.stages.loss()
            state.log_history.append({"step": state.global_step, "stage": " + ".join(ended), "held_out_loss": loss})
