"""What no conversion could follow is one clear line, and the model is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import hf_posenc as posenc
from hf_posenc.conversion import stages
from hf_posenc.conversion.calibration import attention_divergence
from hf_posenc.conversion.convert import convert
from hf_posenc.conversion.recipe import Anneal, Calibrate, Layerwise, Reach
from hf_posenc.errors import ConfigError, DataError, OutputError, UnsupportedEncodingError
from hf_posenc.evaluation.sharing import launched
from tests.conversion.small_models import CALIBRATED, KERPLE, LENGTH, SMALL, WORDS, gpt2, masking, quick, texts
from tests.conversion.test_resuming import kill_at


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, eos_token_id=0, num_key_value_heads=1))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no documents": ({"documents": []}, DataError, "at least one"),
    "no list": ({"documents": None}, DataError, "must be a list"),
    "one text": ({"documents": "text"}, DataError, "put it into a list"),
    "no tokenizer": ({"documents": ["text"]}, DataError, "give tokenizer="),
    "other vocabulary": ({"documents": [[WORDS + 1] * 40]}, DataError, "the model's own tokenizer"),
    "negative token": ({"documents": [[-1] * 40]}, DataError, "ids begin at 0"),
    "no integers": ({"documents": [[1.5] * 40]}, DataError, "integer token ids"),
    "no document": ({"documents": [[1, 2], None]}, DataError, "Document 1 is neither"),
    "a row or two": ({"documents": texts(2)}, DataError, "too few"),
    "nothing to fit": ({"recipe": quick(**CALIBRATED)}, ConfigError, "nothing that could be fitted"),
    "no step": ({"recipe": quick(tokens=10)}, ConfigError, "less than one step"),
    "large batch": ({"recipe": quick(batch_size=64, tokens=10**6)}, ConfigError, "fewer than a step takes"),
    "no recipe": ({"recipe": {"tokens": 1}}, ConfigError, "expected a Recipe"),
    "length 0": ({"length": 0}, ConfigError, "at least 2"),
    "half a token": ({"length": 8.5}, ConfigError, "must be an integer"),
    "long rows": ({"length": 2 * LENGTH}, ConfigError, f"{2 * LENGTH} positions .* as it is has {LENGTH}"),
    "negative seed": ({"seed": -1}, ConfigError, "seed=-1 must be"),
    "old table ends": ({"recipe": quick(anneal=Anneal(), reach=Reach())}, ConfigError, "old table"),
    "new table ends": (
        {"encoding": posenc.Learned(), "recipe": quick(absorb=None, reach=Reach())},
        ConfigError,
        f"Learned has {LENGTH}",
    ),
    "no fading": (
        {"encoding": posenc.encoding("fox"), "recipe": quick(anneal=Anneal())},
        UnsupportedEncodingError,
        "Leave anneal out",
    ),
    "nowhere to write": ({"output_dir": "/proc/nowhere/run"}, OutputError, "cannot be written to"),
}


def refused(model: Any, given: dict[str, Any], error: type[Exception], said: str) -> None:
    asked = {"encoding": posenc.NoPE(), "documents": texts(), "recipe": quick()} | given
    with pytest.raises(error, match=said) as caught:
        convert(model, **asked)
    assert "\n" not in str(caught.value)
    assert not posenc.is_patched(model)


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input_gets_one_clear_line(wrong: str) -> None:
    refused(gpt2(), *WRONG[wrong])


def test_weights_that_cannot_be_trained_are_refused() -> None:
    frozen = gpt2().requires_grad_(False)
    refused(frozen, {}, ConfigError, "nothing to train")
    convert(frozen, KERPLE, texts(), quick(tokens=64))
    for dtype in (torch.bfloat16, torch.float16):
        refused(gpt2().to(dtype), {}, ConfigError, "load it with dtype=torch.float32")
        refused(gpt2().to(dtype), {"encoding": KERPLE, "recipe": quick(lora_rank=2)}, ConfigError, "float32")
    convert(gpt2().bfloat16(), posenc.NoPE(), texts(), quick(tokens=0))


def test_documents_may_be_a_stream_or_rows_of_a_dataset() -> None:
    rows = ({"input_ids": text} for text in texts())
    one, other = (convert(gpt2(), posenc.NoPE(), given, quick(tokens=0)) for given in (texts(), rows))
    assert one.record["text_hash"] == other.record["text_hash"]


def test_a_rotation_that_transformers_computes_is_converted_to_as_well() -> None:
    """A rotary model stays a stock one, with other angles: no module of ours is in it."""
    wider = posenc.RoPE(theta=500.0)
    done = convert(llama(), wider, texts(), quick(absorb=None, layerwise=Layerwise(), attention_factor=0.0))
    assert [stage["stage"] for stage in done.record["stages"]] == ["replace", "layerwise", "distill"]
    moved = {
        name for name, weight in llama().named_parameters() if not torch.equal(weight, done.model.get_parameter(name))
    }
    assert moved
    assert not any("self_attn" in name for name in moved)
    recipe = quick(absorb=None, anneal=Anneal())
    refused(llama(), {"encoding": wider, "recipe": recipe}, ConfigError, "nothing can fade; leave anneal out")


def test_below_adapters_a_rotation_that_leaves_nothing_open_cannot_be_calibrated() -> None:
    given = posenc.RoPE(theta=500.0, partial_rotary_factor=1.0)
    refused(
        gpt2(),
        {"encoding": given, "recipe": quick(lora_rank=2, calibrate=Calibrate(rows=4))},
        ConfigError,
        "nothing that could be fitted to scores below adapters; leave calibrate out",
    )
    assert posenc.recipe_for(gpt2(), given, lora_rank=2).calibrate is None
    assert posenc.recipe_for(gpt2(), given).calibrate is not None
    assert posenc.recipe_for(gpt2(), posenc.RoPE(), lora_rank=2).calibrate is not None


@pytest.mark.slow
def test_adapters_teach_a_masked_model() -> None:
    bert = BertForMaskedLM(BertConfig(**SMALL, pad_token_id=0))
    done = convert(bert, posenc.RoPE(), texts(), quick(lora_rank=2), tokenizer=masking())
    assert done.record["stages"][-1]["stage"] == "distill"


@pytest.mark.slow
def test_heads_are_held_against_the_original_and_not_against_the_merged_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adapters are merged into weights that the original shares."""
    seen: list[torch.Tensor] = []

    def noting(model: Any, original: Any, rows: torch.Tensor) -> list[list[float]]:
        seen.append(rows)
        return attention_divergence(model, original, rows)

    monkeypatch.setattr(stages, "attention_divergence", noting)
    done = convert(gpt2(), KERPLE, texts(), quick(lora_rank=4, learning_rate=0.3, calibrate=Calibrate(rows=4)))
    said = torch.tensor(done.record["calibration"]["divergence"]["trained"])
    assert torch.allclose(said, torch.tensor(attention_divergence(done.model, gpt2(), seen[0])), rtol=1e-3)


SLOW = [pytest.mark.slow]


@pytest.mark.parametrize("other", ["text", pytest.param("model", marks=SLOW), pytest.param("recipe", marks=SLOW)])
def test_a_run_goes_on_with_what_it_was_begun_with(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_at(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        convert(gpt2(), posenc.NoPE(), texts(), quick(), output_dir=tmp_path)
    monkeypatch.undo()
    model, documents = gpt2(), texts(39 if other == "text" else 40)
    if other == "model":
        torch.nn.init.zeros_(model.lm_head.weight)
    recipe = quick(learning_rate=1e-3) if other == "recipe" else quick()
    with pytest.raises(ConfigError, match=f"was started with {other}"):
        convert(model, posenc.NoPE(), documents, recipe, output_dir=tmp_path, resume=True)


def test_the_model_is_brought_to_the_device_on_which_it_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its original, which is copied from it, would stay behind."""
    model, moved = gpt2(), []
    monkeypatch.setattr(model, "to", moved.append)
    convert(model, posenc.NoPE(), texts(), quick(tokens=0))
    assert moved == [launched().device]
