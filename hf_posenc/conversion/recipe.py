"""What a conversion does, stage by stage: frozen, versioned, and the same from Python and from YAML.

A stage that is None is off, and all are off unless the recipe names them: `defaults.recipe_for` names those that help.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, get_type_hints

from hf_posenc.errors import ConfigError, did_you_mean

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a recipe. `_limits` names, for every field, the smallest and the largest value it may have."""

    _limits: ClassVar[Mapping[str, tuple[float, float]]] = {}

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        for name, (least, most) in self._limits.items():
            value, whole = getattr(self, name), get_type_hints(type(self))[name] is int
            fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not (fits and least <= value <= most):
                kind, end = "an integer" if whole else "a number", "" if most == math.inf else f" and at most {most}"
                raise ConfigError(f"{type(self).__name__}.{name} must be {kind} of at least {least}{end}: {value!r}")


@dataclass(frozen=True, kw_only=True)
class Absorb(Stage):
    """Add what all rows of a removed table share to every token's embedding, where that lowers the loss.

    Spends no tokens.

    Attributes:
        first_row: position from which on rows count; GPT-2's first row lies far from all others. Neutral value: 0.
    """

    first_row: int = 1
    _limits: ClassVar[Mapping[str, tuple[float, float]]] = {"first_row": (0, math.inf)}


@dataclass(frozen=True, kw_only=True)
class Calibrate(Stage):
    """Fit the encoding's own parameters to the scores that the model lost, and nothing else.

    A rotation has none: queries and keys are fitted to it (`attention_fit`). Below LoRA adapters, which leave the
    weights of the model alone, the base and the share of the rotation are chosen instead, where they are left open.

    Attributes:
        rows: rows of training text that both models read.
    """

    rows: int = 64
    _limits: ClassVar[Mapping[str, tuple[float, float]]] = {"rows": (1, math.inf)}


@dataclass(frozen=True, kw_only=True)
class Anneal(Stage):
    """Fade the old positions out and the new ones in, in a straight line.

    Attributes:
        share: of all steps, in which that happens.
    """

    share: float = 0.3
    _limits: ClassVar[Mapping[str, tuple[float, float]]] = {"share": (0.01, 1)}


@dataclass(frozen=True, kw_only=True)
class Layerwise(Stage):
    """Teach every layer by itself: from what reaches it in the original, it is to make what the original makes of it.

    Trains attention and encoding only.

    Attributes:
        share: of all steps, the first ones, in which that happens.
    """

    share: float = 0.3
    _limits: ClassVar[Mapping[str, tuple[float, float]]] = {"share": (0.01, 0.99)}


@dataclass(frozen=True, kw_only=True)
class Distill(Stage):
    """Let the original say, beside the text, which words could have come.

    Attributes:
        weight: of the divergence from the original; the loss on the text has the rest.
    """

    weight: float = 0.8
    _limits: ClassVar[Mapping[str, tuple[float, float]]] = {"weight": (0.01, 1)}


@dataclass(frozen=True, kw_only=True)
class Reach(Stage):
    """Train at the positions of longer texts, by rows whose positions skip ahead once (`collators.PoSE`).

    Attributes:
        factor: the longest position over the length of a row.
    """

    factor: float = 4.0
    _limits: ClassVar[Mapping[str, tuple[float, float]]] = {"factor": (1, math.inf)}


@dataclass(frozen=True, kw_only=True)
class Recipe(Stage):
    """Everything that a conversion is told beside model, encoding and text.

    Attributes:
        tokens: training budget in tokens of all stages; 0 trains nothing. One pass of a row counts its tokens once,
            however many models read it.
        batch_size: rows that one process takes through the model in one step.
        learning_rate: peak of a cosine schedule that ends at 0, after a rise over a tenth of the steps.
        encoding_factor: the learning rate of the encoding's own parameters over `learning_rate`.
        attention_factor: that of the attention modules' weights over `learning_rate`.
        lora_rank: of LoRA adapters on all linear layers; 0 trains every weight.
        absorb, calibrate, anneal, layerwise, distill, reach: the stages.
        version: of this schema.
    """

    tokens: int = 250_000
    batch_size: int = 8
    learning_rate: float = 1e-3
    encoding_factor: float = 10.0
    attention_factor: float = 1.0
    lora_rank: int = 0
    absorb: Absorb | None = None
    calibrate: Calibrate | None = None
    anneal: Anneal | None = None
    layerwise: Layerwise | None = None
    distill: Distill | None = None
    reach: Reach | None = None
    version: int = VERSION

    _limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "tokens": (0, math.inf),
        "batch_size": (1, math.inf),
        "learning_rate": (1e-9, 1),
        "encoding_factor": (0, 1e4),
        "attention_factor": (0, 1e4),
        "lora_rank": (0, 4096),
        "version": (VERSION, VERSION),
    }

    def __post_init__(self) -> None:
        """Check the fields; raises ConfigError."""
        super().__post_init__()
        for name, cls in STAGES.items():
            if not isinstance(getattr(self, name), cls | None):
                raise ConfigError(f"Recipe.{name} must be {cls.__name__}(...) or None, was: {getattr(self, name)!r}")
        if self.lora_rank and (self.anneal or self.layerwise):
            raise ConfigError("Recipe.lora_rank trains adapters only; anneal and layerwise need lora_rank=0.")

    def to_dict(self) -> dict[str, Any]:
        """Return the plain-JSON form, which `from_dict` reads back exactly."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Read the form that `to_dict` writes; a field that is left out has its default.

        Raises:
            ConfigError: an unknown field, another version, or a value out of range.
        """
        _check_names(cls, values)
        stages = {name: _stage(stage, values[name]) for name, stage in STAGES.items() if name in values}
        return cls(**(dict(values) | stages))


STAGES: dict[str, type[Stage]] = {
    "absorb": Absorb,
    "calibrate": Calibrate,
    "anneal": Anneal,
    "layerwise": Layerwise,
    "distill": Distill,
    "reach": Reach,
}


def _stage(cls: type[Stage], values: Any) -> Stage | None:
    if values is None or isinstance(values, Stage):
        return values
    if not isinstance(values, Mapping):
        raise ConfigError(f"{cls.__name__.lower()} must be a mapping of its fields, or null; was: {values!r}")
    _check_names(cls, values)
    return cls(**values)


def _check_names(cls: type[Stage], values: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(cls)]
    for name in values:
        if name not in known:
            raise ConfigError(f"{cls.__name__} has no field {name!r}; {did_you_mean(str(name), known)}")
