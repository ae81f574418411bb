"""Write a patched model as the stock architecture that computes the same, and prove it in a process of its own."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import ExportError, OutputExistsError
from hf_posenc.export import reread
from hf_posenc.export.choice import choose
from hf_posenc.export.route import Source, Target, read

TOLERANCE = 1e-5
"""Largest difference of a score in float32, as a share of the largest magnitude where that is above 1."""
STEPS = 64
"""Tokens that have to come out equal past the trained length."""
SHORT, LONGEST = 32, 4096
"""Tokens of the text whose scores are compared, and the most that generation starts from."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written, and what was proven of it.

    Attributes:
        folder: where it lies.
        target: the name of the route.
        architecture: the stock class that loads it.
        findings: name of a check -> what was measured.
    """

    folder: Path
    target: str
    architecture: str
    findings: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line a fact."""
        facts = {"architecture": self.architecture, "folder": str(self.folder), **self.findings}
        return "\n".join(f"{name}: {value}" for name, value in facts.items())


def export_native(
    model: PreTrainedModel,
    folder: str | Path,
    tokenizer: Any = None,
    *,
    target: str | None = None,
    length: int | None = None,
) -> Export:
    """Write a patched model as a stock architecture that computes the same function: no code, no trace of this package.

    What was written is loaded in a fresh process by transformers alone and compared: scores within 1e-5 in float32, and
    64 equal greedy tokens past the trained length (where positions reach that far; an encoder's largest scores there).
    Only then does it appear in `folder`.

    Args:
        model: a patched model; it is not changed.
        folder: new or empty.
        tokenizer: saved beside the model, where it is given.
        target: name of a route, see `routes`; None takes the preferred one of those that are exact.
        length: positions, in tokens, for which a table that has to end gets rows, and that `max_position_embeddings`
            states; None takes what the encoding reaches, or four times the trained length for a table.

    Raises:
        ExportError: no route is exact, with the reason of each; or what was written did not answer as the model does.
        PatchStateError: the model is not patched.
        OutputExistsError: the folder holds something.
        ConfigError, UnknownNameError: `length` or `target` is none.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputExistsError(f"{folder} exists and is not an empty folder. Give another one, or remove it.")
    source = read(model, length=length)
    route = choose(source, target)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as working:
        written = Path(working, "export")
        built = route.build(source)
        architecture = _write(source, built, written)
        if tokenizer is not None:
            _save_tokenizer(tokenizer, written)
        findings = _compare(source, written, Path(working, "expected.safetensors"))
        if folder.exists():
            folder.rmdir()
        written.rename(folder)
    return Export(folder=folder, target=route.name, architecture=architecture, findings={**findings, **built.limits})


def _write(source: Source, target: Target, folder: Path) -> str:
    """Write weights, config and generation config; return the name of the class."""
    with torch.device("meta"):
        stock = target.cls(target.config)
    # copies: what shares memory would be taken for tied
    weights = {name: weight.detach().contiguous().clone() for name, weight in target.weights.items()}
    if target.head is not None:
        head = stock.get_output_embeddings()
        name = next(name for name, module in stock.named_modules() if module is head)
        weights[f"{name}.weight"] = target.head.detach().contiguous().clone()
    dtype = source.model.dtype
    weights = {name: weight.to(dtype) if weight.is_floating_point() else weight for name, weight in weights.items()}
    unexpected = stock.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    stock.tie_weights()
    empty = [name for name, parameter in stock.named_parameters() if parameter.is_meta]
    if empty or unexpected:
        raise ExportError(
            f"{type(stock).__name__} is not built as this version of hf_posenc knows it (without weights: "
            f"{', '.join(empty) or 'none'}; unknown: {', '.join(unexpected) or 'none'}); the transformers installed is "
            "too new for this route."
        )
    generation = getattr(source.model, "generation_config", None)
    if generation is not None and stock.can_generate():
        stock.generation_config = copy.deepcopy(generation)
    stock.save_pretrained(folder)
    return type(stock).__name__


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer under a class name that transformers knew before version 5, too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _asked(source: Source) -> dict[str, Tensor]:
    """Return the texts to compare answers to: random ids, none of which is the padding one."""
    trained, reach = source.geometry.max_position_embeddings, source.rows
    steps = min(STEPS, reach - 1) if source.geometry.causal or source.config.is_encoder_decoder else 0
    long = min(trained, LONGEST, reach - steps) if steps else min(trained + STEPS, LONGEST, reach)
    generator = torch.Generator().manual_seed(0)
    padding = source.config.pad_token_id
    found = {"steps": torch.tensor([steps])}
    for name, rows, count in (("short", 2, min(SHORT, reach)), ("long", 1, max(long, 1))):
        ids = torch.randint(0, source.config.vocab_size - 1, (rows, count), generator=generator)
        found[name] = ids + (ids >= padding) if padding is not None else ids
    return found


def _compare(source: Source, folder: Path, expected: Path) -> dict[str, str]:
    """Load what was written in a fresh process and return what was measured; raises ExportError where it differs."""
    asked = _asked(source)
    model: Any = source.model
    if model.dtype != torch.float32:
        model = copy.deepcopy(model).float()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        on_device = {name: ids.to(model.device) for name, ids in asked.items()}
        save_file({**asked, **{k: v.contiguous() for k, v in reread.answers(model, on_device).items()}}, expected)
    finally:
        for module, training in modes:
            module.training = training
    said = _in_fresh_process(folder, expected)
    allowed = TOLERANCE * max(1.0, said["size"])
    wrong = {
        "weights missing": ", ".join(said["missing"]),
        "weights left over": ", ".join(said["unexpected"]),
        "modules of hf_posenc loaded": ", ".join(said["strangers"]),
        "scores differ": "" if said["scores"] <= allowed else f"by {said['scores']:.3g}, at most {allowed:.3g} allowed",
        "tokens differ": "" if said["tokens"] == said["of"] else f"after {said['tokens']} of {said['of']}",
    }
    found = "; ".join(f"{what}: {how}" for what, how in wrong.items() if how)
    if found:
        raise ExportError(f"what was written does not answer as the model does ({found}). Nothing was kept.")
    first = asked["long"].shape[1]
    what = "greedy tokens" if int(asked["steps"]) and model.can_generate() else "largest scores"
    return {
        "scores": f"off by {said['scores']:.3g} of {said['size']:.3g}",
        what: f"{said['of']} equal, after {first} tokens" if what[0] == "g" else f"{said['of']} equal",
    }


def _in_fresh_process(folder: Path, expected: Path) -> dict[str, Any]:
    """Return what the interpreter says of an export, having imported transformers and nothing of ours."""
    program = Path(reread.__file__).read_text()
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder.resolve()), str(expected.resolve())],
        capture_output=True,
        text=True,
        check=False,
        cwd=expected.parent,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ExportError(f"transformers cannot load what was written: {tail[0]}. Nothing was kept.")
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said
