"""The Trainer of a conversion: what is asked of the model at every step, and how fast each kind of weight moves.

Everything follows from the number of the step, so that a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from hf_posenc.conversion.annealing import Fade
from hf_posenc.conversion.layerwise import layerwise_loss
from hf_posenc.conversion.recipe import Recipe
from hf_posenc.conversion.training import asked
from hf_posenc.errors import TrainingError
from hf_posenc.evaluation.scoring import evaluation_mode

ENCODING = "posenc"
WARMUP = 0.1
"""Share of the steps in which learning rates rise."""


@dataclass(kw_only=True)
class Lesson:
    """What the steps of one run ask of the model.

    Attributes:
        recipe: of the conversion.
        steps: of the run.
        targets: tokens asked for in a batch, in the mean.
        causal: whether a label belongs to the logits of the token before it.
        original: the model before the patch, None where no stage needs it.
        fade: of the old positions, None where they do not fade.
        layers: paths of the layers, where these are taught one by one.
        positions: (rows, width), what the original adds to the stream that layers add to, or None.
    """

    recipe: Recipe
    steps: int
    targets: float
    causal: bool
    original: PreTrainedModel | None = None
    fade: Fade | None = None
    layers: Sequence[str] = field(default_factory=tuple)
    positions: Tensor | None = None

    @property
    def layerwise_steps(self) -> int:
        """The number of first steps in which layers are taught one by one."""
        stage = self.recipe.layerwise
        return 0 if stage is None else math.ceil(stage.share * self.steps)

    @property
    def anneal_steps(self) -> int:
        """The number of first steps in which old positions fade."""
        stage = self.recipe.anneal
        return 0 if stage is None else math.ceil(stage.share * self.steps)

    def ends(self) -> dict[str, int]:
        """Return the last step, counted from 1, of every stage of the training."""
        found = {"layerwise": self.layerwise_steps, "anneal": self.anneal_steps}
        last = "text" if self.recipe.distill is None else "distill"
        return {name: step for name, step in found.items() if step} | {last: self.steps}

    def fade_to(self, step: int) -> None:
        """Let old positions be as strong as before step `step`, counted from 0."""
        if self.fade is not None:
            self.fade.weight = max(0.0, 1 - step / self.anneal_steps)

    def loss(self, model: nn.Module, inputs: dict[str, Tensor], step: int) -> Tensor:
        """Return what step `step`, counted from 0, is to make small, in nats a token or as `layerwise_loss` has it."""
        self.fade_to(step)
        given = {name: value for name, value in inputs.items() if name != "labels"}
        plain = {name: value for name, value in given.items() if name != "position_ids"}
        if self.original is not None and step < self.layerwise_steps:
            table = None if self.positions is None else self.positions[: given["input_ids"].shape[1]]
            return layerwise_loss(model, plain, original=self.original, paths=self.layers, positions=table)
        logits, targets = asked(model(**given, use_cache=False).logits, inputs["labels"], causal=self.causal)
        share = len(targets) / self.targets  # of one batch among all of them, whichever process reads it
        loss = nn.functional.cross_entropy(logits.float(), targets) * share
        if self.recipe.distill is None or self.original is None:
            return loss
        with evaluation_mode(self.original):
            wanted, _ = asked(self.original(**plain, use_cache=False).logits, inputs["labels"], causal=self.causal)
        found, told = logits.float().log_softmax(-1), wanted.float().log_softmax(-1)
        divergence = nn.functional.kl_div(found, told, log_target=True, reduction="batchmean") * share
        return torch.lerp(loss, divergence, self.recipe.distill.weight)


class ConversionTrainer(Trainer):
    """A Trainer whose loss is that of a `Lesson`, which makes means of means over batches and processes right.

    Args:
        lesson: what is asked of the model.
        **kwargs: handed to `Trainer`.
    """

    def __init__(self, *, lesson: Lesson, **kwargs: Any) -> None:
        self.lesson = lesson
        super().__init__(**kwargs)
        self.model_accepts_loss_kwargs = False  # the loss is a mean already

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of this step; raises TrainingError where it is no number any more."""
        loss = self.lesson.loss(model, inputs, self.state.global_step)
        if not torch.isfinite(loss):
            raise TrainingError(
                f"the loss of step {self.state.global_step + 1} is {float(loss)}; take a lower learning rate than "
                f"{self.lesson.recipe.learning_rate}, and look for rows of unusual text."
            )
        return (loss, None) if return_outputs else loss


def optimizer_of(model: nn.Module, lesson: Lesson, attention: Sequence[str]) -> tuple[Any, Any]:
    """Return AdamW and its schedule: a rise, then a cosine to 0; weights outside of attention wait for layerwise.

    Args:
        model: the model, with or without adapters.
        lesson: of the run.
        attention: paths of the attention modules.
    """
    recipe = lesson.recipe
    kinds: dict[str, list[nn.Parameter]] = {"encoding": [], "attention": [], "rest": []}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            kind = "attention" if any(f"{path}." in name for path in attention) else "rest"
            kinds["encoding" if ENCODING in name.split(".") else kind].append(weight)
    factors = {"encoding": recipe.encoding_factor, "attention": recipe.attention_factor, "rest": 1.0}
    groups = [
        {"params": weights, "lr": recipe.learning_rate * factors[kind], "kind": kind}
        for kind, weights in kinds.items()
        if weights
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    rise = max(1, round(WARMUP * lesson.steps))

    def rate(kind: str) -> Any:
        def at(step: int) -> float:
            if kind == "rest" and step < lesson.layerwise_steps:
                return 0.0
            done = max(0, step - rise) / max(1, lesson.steps - rise)
            return min(1.0, (step + 1) / rise) * (1 + math.cos(math.pi * min(1.0, done))) / 2

        return at

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [rate(str(group["kind"])) for group in groups])
