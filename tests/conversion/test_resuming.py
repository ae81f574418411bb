"""A run that was killed, in whatever stage, ends with the weights of one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hf_posenc as posenc
from hf_posenc.conversion import stages
from hf_posenc.conversion.convert import convert
from hf_posenc.conversion.distillation import Lesson
from hf_posenc.conversion.recipe import Anneal, Layerwise, Reach
from hf_posenc.errors import ConfigError, OutputExistsError
from tests.conversion.small_models import CALIBRATED, KERPLE, difference, gpt2, quick, texts

ANNEALED: dict[str, Any] = {"anneal": Anneal(share=0.5), "layerwise": Layerwise(share=0.3)} | CALIBRATED
"""Six steps: layers one by one in two, the old positions fading in three, the original teaching in the last four."""
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "before the first step": (ANNEALED, 0),
    "layerwise": (ANNEALED, 1),
    "anneal": (ANNEALED, 2),
    "distill": (ANNEALED, 4),
    "text": (CALIBRATED | {"distill": None}, 3),
    "reach": ({"reach": Reach(factor=2.0)}, 3),
    "LoRA": ({"lora_rank": 2} | CALIBRATED, 3),
}
QUICK = "reach"


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] if way != QUICK else []) for way in WAYS])
def test_a_killed_run_ends_as_one_that_was_not(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, step = WAYS[way]
    recipe, encoding = quick(**given), posenc.RoPE() if way == "reach" else KERPLE
    whole = convert(gpt2(), encoding, texts(), recipe, output_dir=tmp_path / "whole")
    kill_at(step, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        convert(gpt2(), encoding, texts(), recipe, output_dir=tmp_path / "killed")
    monkeypatch.undo()
    with pytest.raises(OutputExistsError, match="unfinished run"):
        convert(gpt2(), encoding, texts(), recipe, output_dir=tmp_path / "killed")
    with pytest.raises(ConfigError, match="started with seed 0, not 1"):
        convert(gpt2(), encoding, texts(), recipe, output_dir=tmp_path / "killed", resume=True, seed=1)
    resumed = convert(gpt2(), encoding, texts(), recipe, output_dir=tmp_path / "killed", resume=True)
    assert resumed.record["resumed_from"] == (f"checkpoint-{step}" if step else None)
    assert difference(whole.model, resumed.model) == 0
    assert [stage["after"] for stage in whole.record["stages"]] == [s["after"] for s in resumed.record["stages"]]


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step of training, counted from 0, be the one in which the run is killed."""
    stock = Lesson.loss

    def loss(self: Lesson, model: Any, inputs: Any, now: int) -> Any:
        if now == step:
            raise KeyboardInterrupt
        return stock(self, model, inputs, now)

    monkeypatch.setattr(Lesson, "loss", loss)


@pytest.mark.slow
def test_a_run_killed_while_it_is_calibrated_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    whole = convert(gpt2(), KERPLE, texts(), quick(**CALIBRATED))
    monkeypatch.setattr(stages, "calibrate", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(gpt2(), KERPLE, texts(), quick(**CALIBRATED), output_dir=tmp_path / "killed")
    monkeypatch.undo()
    again = convert(gpt2(), KERPLE, texts(), quick(**CALIBRATED), output_dir=tmp_path / "killed", resume=True)
    assert difference(whole.model, again.model) == 0
