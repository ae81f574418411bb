"""What a fine-tuning run is told: one flat record, the same from Python, from YAML and from the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from hf_posenc.errors import ConfigError, did_you_mean


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """One fine-tuning run. Names that transformers has are transformers' own; `metadata["help"]` describes each field.

    Raises:
        ConfigError: a value of the wrong type or out of range, or encoding options without an encoding.
    """

    model: str = field(metadata={"help": "Checkpoint to start from: a folder or a Hub name."})
    output_dir: str = field(metadata={"help": "Run folder to create."})
    documents: str = _option("embedded", "'embedded', a .txt/.jsonl file, folder or glob, or a Hub dataset.")
    encoding: str | None = _option(None, "Position encoding to patch in; none trains the model as it is.")
    encoding_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Fields of the encoding, e.g. {theta: 500000}."}
    )
    length: int | None = _option(None, "Tokens a row; none takes the length the model was trained for.")
    max_steps: int = _option(150, "Optimizer steps.")
    per_device_train_batch_size: int = _option(32, "Rows a process takes through the model at once.")
    gradient_accumulation_steps: int = _option(1, "Batches summed into one optimizer step.")
    learning_rate: float = _option(1e-3, "Peak of a cosine schedule that ends at 0.")
    warmup_steps: int = _option(10, "Steps of linear rise to the peak.")
    weight_decay: float = _option(0.0, "AdamW's decoupled weight decay.")
    save_steps: int = _option(100, "Steps between the checkpoints that a killed run resumes from.")
    lora_rank: int = _option(0, "Rank of LoRA adapters on all linear layers; 0 trains every weight.")
    gradient_checkpointing: bool = _option(False, "Recompute activations: less memory, about a third more time.")
    bf16: bool = _option(True, "Compute in bfloat16 where the device has it (never on the CPU).")
    seed: int = _option(0, "Seed of document order, row order and LoRA initialisation.")

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for option in fields(self):
            _require_type(option.name, getattr(self, option.name), _members(hints[option.name]))
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and not value >= lowest:  # `not >=` refuses NaN too
                raise ConfigError(f"{name} is {value}; it must be at least {lowest}.")
        if self.learning_rate == 0:
            raise ConfigError("learning_rate is 0, which trains nothing; give a positive rate.")
        if self.encoding_options and self.encoding is None:
            raise ConfigError(f"encoding_options {self.encoding_options} were given without an encoding; name one.")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> FinetuneConfig:
        """Build a config from named values, checking the names first.

        Raises:
            ConfigError: unknown or missing keys, or a value that does not fit.
        """
        hints = get_type_hints(cls)
        unknown = [name for name in values if name not in hints]
        if unknown:
            raise ConfigError(f"There is no option {unknown[0]!r}: {did_you_mean(str(unknown[0]), hints)}")
        missing = [name for name in ("model", "output_dir") if name not in values]
        if missing:
            raise ConfigError(f"{' and '.join(missing)} must be given, in the YAML file or as a flag.")
        return cls(**values)

    def to_yaml(self) -> str:
        """Return the YAML text that `read_config` turns back into an equal config."""
        return str(yaml.safe_dump(asdict(self), sort_keys=False))


_LOWEST: dict[str, float] = {
    "length": 2,
    "max_steps": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
    "save_steps": 1,
    "lora_rank": 0,
    "seed": 0,
}


def read_config(path: str | Path | None, flags: Mapping[str, str] | None = None) -> FinetuneConfig:
    """Read a YAML file (or none) and override it by flags: `{"bf16": "false"}`. Flags are YAML too, names are literal.

    Raises:
        ConfigError: the file is missing or is no mapping, or its content or a flag does not fit `FinetuneConfig`.
    """
    values = {} if path is None else read_mapping(Path(path))
    return FinetuneConfig.from_mapping(values | {name: _flag(name, text) for name, text in (flags or {}).items()})


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file of named values; raises ConfigError where it is missing or no mapping."""
    if not path.is_file():
        raise ConfigError(f"There is no config file {str(path)!r}.")
    values = _parse(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold 'option: value' lines, and holds a {type(values).__name__}.")
    return values


def parse_mapping(text: str, *, called: str) -> dict[str, Any]:
    """Return named values given as one argument of a command line, in YAML; nothing is none of them.

    Raises:
        ConfigError: no YAML, or no mapping; `called` is how the message names the argument.
    """
    values = _parse(text, called)
    if not isinstance(values, (dict, type(None))):
        raise ConfigError(f"{called} must be a mapping such as '{{theta: 500000}}', was: {text!r}")
    return values or {}


def _flag(name: str, text: str) -> Any:
    hints = get_type_hints(FinetuneConfig)
    literal = name in hints and str in _members(hints[name])  # a folder called 2024 is not a number
    return text if literal and text != "null" else _parse(text, f"--{name}")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML that reads 1e-3 as a number, which YAML 1.1 does only with a point."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}") from error


def _members(hint: Any) -> tuple[type, ...]:
    """Return the plain types that a field's annotation allows: `(int, NoneType)` for `int | None`."""
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(get_origin(member) or member for member in union)


def _require_type(name: str, value: Any, types: tuple[type, ...]) -> None:
    accepted = (*types, int) if float in types else types
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in types):
        wanted = " or ".join("none" if kind is type(None) else kind.__name__ for kind in types)
        raise ConfigError(f"{name} is {value!r}; it must be {wanted}.")
