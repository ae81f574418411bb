"""Laws of a conversion: exact starts, measured stages, the same weights after a kill, one line for bad input."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import hf_posenc as posenc
from hf_posenc.conversion import stages
from hf_posenc.conversion.absorption import position_rows
from hf_posenc.conversion.annealing import Fade, Rows, annealed
from hf_posenc.conversion.batches import rows_of
from hf_posenc.conversion.convert import convert
from hf_posenc.conversion.distillation import Lesson
from hf_posenc.conversion.layerwise import layer_paths, layerwise_loss, stream_positions
from hf_posenc.conversion.recipe import STAGES, Absorb, Anneal, Calibrate, Distill, Layerwise, Reach, Recipe
from hf_posenc.conversion.rotation_choice import BASES
from hf_posenc.conversion.training import original_of
from hf_posenc.errors import ConfigError, TrainingError, UnsupportedFamilyError
from tests.conversion.small_models import (
    CALIBRATED,
    KERPLE,
    LENGTH,
    SMALL,
    difference,
    gpt2,
    ids,
    masking,
    quick,
    texts,
)
from tests.families.models import fresh

PATHS = ["transformer.h.0", "transformer.h.1"]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("$A", [5, 6, 2, 7, 2]),  # nothing says where a text ends: the end-of-text token does
        ("<s> $A", [1, 5, 6, 1, 7]),  # as Llama's: another token between texts may be one that the model never met
        ("<s> $A </s>", [1, 5, 6, 2, 1, 7, 2]),
        ("$A </s>", [5, 6, 2, 7, 2]),
    ],
)
def test_texts_are_told_apart_as_the_tokenizer_does_it(template: str, wanted: list[int]) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 5, "b": 6, "c": 7}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    texts, given = ["a b", "c"], [tokenizer(text)["input_ids"] for text in ("a b", "c")]
    unclosed = [document[:-1] if document[-1] == 2 else document for document in given]
    for documents, reader in ((texts, tokenizer), (given, tokenizer), (given, None), (unclosed, tokenizer)):
        model = gpt2(bos_token_id=1, eos_token_id=2)
        packed = rows_of(documents, reader, model, length=len(wanted), causal=True, seed=None)
        assert packed.dataset["input_ids"][:] == [wanted]


def test_what_is_not_trained_is_shared() -> None:
    model = gpt2()
    model.transformer.wte.requires_grad_(False)
    kept = original_of(model, shared=False)
    shared = {name for name, weight in kept.named_parameters() if weight is model.get_parameter(name)}
    assert shared == {"transformer.wte.weight"}


@pytest.mark.parametrize("target", ["kerple", "rope", "nope"])
def test_fading_goes_from_the_old_model_to_the_new_one(target: str) -> None:
    model = gpt2()
    rows = position_rows(model)
    with torch.no_grad():
        wanted = model(ids()).logits
        posenc.patch(model, posenc.encoding(target), verify=False)
        new, fade = model.transformer.posenc, Fade()
        replaced = model(ids()).logits
        model.transformer.posenc = annealed(Rows(rows), new, fade)
        assert torch.allclose(model(ids()).logits, wanted, atol=1e-5)
        fade.weight = 0.0
        assert torch.allclose(model(ids()).logits, replaced, atol=1e-5)
        fade.weight = 0.5
        assert not torch.allclose(model(ids()).logits, replaced, atol=1e-3)


def test_layers_that_do_what_the_original_does_have_nothing_to_learn() -> None:
    """A model without positions is its own patched self; what a table added is taken out exactly."""
    model = gpt2()
    torch.nn.init.zeros_(model.transformer.wpe.weight)
    original, given = original_of(model, shared=False), {"input_ids": ids()}
    posenc.patch(model, posenc.NoPE(), verify=False)
    loss = layerwise_loss(model, given, original=original, paths=PATHS, positions=None)
    assert float(loss.detach()) < 1e-8
    other = gpt2()
    rows = position_rows(other)
    assert stream_positions(other, PATHS[0], rows, ids()) is rows
    assert stream_positions(other, PATHS[0], None if rows is None else rows + 1, ids()) is None


def test_no_gradient_passes_from_a_layer_to_the_one_below() -> None:
    model = gpt2()
    original = original_of(model, shared=False)
    posenc.patch(model, posenc.Alibi(), verify=False)
    torch.nn.init.zeros_(model.transformer.h[1].attn.c_proj.weight)
    torch.nn.init.zeros_(original.transformer.h[1].attn.c_proj.weight)
    layerwise_loss(model, {"input_ids": ids()}, original=original, paths=PATHS, positions=None).backward()
    assert model.transformer.wte.weight.grad is None
    assert model.transformer.h[0].attn.c_attn.weight.grad.abs().max() > 0


def test_layers_that_share_one_are_refused() -> None:
    albert = fresh("albert")
    assert layer_paths(gpt2(), posenc.plan(gpt2(), posenc.NoPE())) == PATHS
    with pytest.raises(UnsupportedFamilyError, match="leave the stage layerwise out"):
        layer_paths(albert, posenc.plan(albert, posenc.RoPE()))


def test_every_stage_is_measured_and_pays_its_tokens(tmp_path: Path) -> None:
    recipe = quick(anneal=Anneal(share=0.5), layerwise=Layerwise(share=0.3), **CALIBRATED)
    done = convert(gpt2(), KERPLE, texts(), recipe, output_dir=tmp_path / "run")
    stages = done.record["stages"]
    assert [stage["stage"] for stage in stages] == ["replace", "absorb", "calibrate", "layerwise", "anneal", "distill"]
    assert [stage["tokens"] for stage in stages] == [0, 0, 4 * LENGTH, 2 * 64, 1 * 64, 3 * 64]
    training = [stage for stage in stages if stage["stage"] in ("anneal", "distill")]
    assert training[0]["after"] == training[1]["before"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["tokens_seen"] == 6 * 64
    assert difference(posenc.from_pretrained(tmp_path / "run"), done.model) == 0
    assert str(done).count("\n") == 5


def test_below_adapters_the_rotation_is_chosen_under_which_the_loss_is_lowest(tmp_path: Path) -> None:
    def sharp() -> GPT2LMHeadModel:
        """Return a model in which queries and keys matter."""
        model = gpt2()
        for layer in model.transformer.h:
            torch.nn.init.normal_(layer.attn.c_attn.weight)
        torch.nn.init.normal_(model.transformer.wte.weight)
        return model

    rows, recipe = texts(), quick(tokens=0, distill=None, calibrate=Calibrate(rows=40), lora_rank=2)
    asked = posenc.RoPE(partial_rotary_factor=1.0)
    done = convert(sharp(), asked, rows, recipe, held_out=rows, output_dir=tmp_path / "run")
    losses = {}
    for base in BASES:
        given = posenc.RoPE(theta=base, partial_rotary_factor=1.0)
        only = convert(sharp(), given, rows, quick(tokens=0, distill=None), held_out=rows)
        losses[base] = only.record["stages"][-1]["after"]
    assert len(set(losses.values())) == len(BASES)
    assert done.record["encoding"]["theta"] == min(losses, key=losses.__getitem__)
    assert done.record["stages"][-1]["after"] == pytest.approx(min(losses.values()), abs=1e-6)
    loaded = posenc.from_pretrained(tmp_path / "run")
    assert torch.equal(loaded(ids()).logits, done.model(ids()).logits)
    fitted = convert(sharp(), asked, rows, dataclasses.replace(recipe, lora_rank=0))
    assert fitted.record["encoding"]["theta"] == 10_000
    with pytest.raises(ConfigError, match="nothing that could be fitted"):
        convert(sharp(), posenc.NoPE(), rows, recipe)


def test_the_recommended_recipe_has_the_stages_that_have_something_to_do() -> None:
    def stages(model: Any, encoding: posenc.EncodingConfig) -> set[str]:
        recipe = posenc.recipe_for(model, encoding)
        return {name for name in STAGES if getattr(recipe, name) is not None}

    llama = LlamaForCausalLM(LlamaConfig(**SMALL, eos_token_id=0))
    assert stages(gpt2(), KERPLE) == stages(gpt2(), posenc.RoPE()) == {"absorb", "calibrate", "distill"}
    assert stages(gpt2(), posenc.NoPE()) == stages(gpt2(), posenc.Alibi()) == {"absorb", "distill"}
    assert stages(gpt2(), posenc.Learned()) == stages(llama, posenc.NoPE()) == {"distill"}
    assert stages(llama, posenc.RoPE(theta=500.0)) == {"distill"}
    scaled = posenc.RoPE(scaling={"rope_type": "yarn", "factor": 2.0})
    assert stages(gpt2(), scaled) == {"absorb", "calibrate", "reach", "distill"}
    assert posenc.recipe_for(gpt2(), scaled).reach == Reach(factor=2.0)
    asked = posenc.recipe_for(gpt2(), KERPLE, distill=None, learning_rate=1e-3, tokens=7)
    assert asked == Recipe(tokens=7, learning_rate=1e-3, absorb=Absorb(), calibrate=Calibrate())


def test_wider_models_learn_at_lower_rates() -> None:
    rates = {
        (width, encoding.name): posenc.recipe_for(gpt2(n_embd=width), encoding).learning_rate
        for width in (64, 128, 256)
        for encoding in (KERPLE, posenc.NoPE())
    }
    assert rates == {
        (64, "kerple"): 2e-3,
        (128, "kerple"): Recipe.learning_rate,
        (256, "kerple"): 5e-4,
        (64, "nope"): 4e-3,
        (128, "nope"): 2e-3,
        (256, "nope"): 1e-3,
    }


def test_training_helps() -> None:
    lesson = [[1 + (start + 3 * step) % 7 for step in range(LENGTH - 1)] for start in range(7)] * 8
    stages = convert(gpt2(), KERPLE, lesson, quick(tokens=12 * 64, distill=None, **CALIBRATED)).record["stages"]
    assert stages[-1]["after"] < stages[-1]["before"] - 0.5


@pytest.mark.slow
def test_rotary_sources_and_encoders_take_the_same_road() -> None:
    llama = LlamaForCausalLM(LlamaConfig(**SMALL, eos_token_id=0))
    done = convert(llama, posenc.NoPE(), texts(), quick(absorb=None, anneal=Anneal(share=0.5)))
    assert [stage["stage"] for stage in done.record["stages"]] == ["replace", "anneal", "distill"]
    bert = BertForMaskedLM(BertConfig(**SMALL, pad_token_id=0))
    bert.config.sep_token_id = 0
    done = convert(bert, posenc.encoding("t5"), texts(), quick(**CALIBRATED), tokenizer=masking())
    assert [stage["stage"] for stage in done.record["stages"]] == ["replace", "absorb", "calibrate", "distill"]


def test_a_loss_that_is_no_number_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lesson, "loss", lambda *_: torch.tensor(math.nan))
    with pytest.raises(TrainingError, match="the loss of step 1 is nan; take a lower learning rate"):
        convert(gpt2(), posenc.NoPE(), texts(), quick())


def of_equal_rows() -> tuple[Any, list[list[int]]]:
    """Return a model to whose words every position adds the same, and texts that it wrote, which say what that is."""
    model = gpt2()
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(torch.randn(16).expand(LENGTH, -1))
        model.transformer.wte.weight.normal_()
    written = model.generate(torch.arange(40)[:, None], do_sample=True, top_k=0, max_new_tokens=LENGTH - 1)
    return model, written.tolist()


def test_a_distilled_model_hears_the_original() -> None:
    """A table of equal rows is absorbed whole, so that the divergence from the original starts at zero."""
    model, written = of_equal_rows()
    recipe = quick(distill=Distill(weight=1.0), tokens=64, learning_rate=1e-9)
    done = convert(model, posenc.NoPE(), written, recipe)
    assert abs(done.record["losses"][0][1]) < 1e-6


@pytest.mark.parametrize("times", [1.0, -50.0])
def test_a_constant_is_absorbed_only_where_it_makes_the_loss_lower(
    times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positions of some models point every way, and their mean, alone, misleads: rxnmapper's ALBERT."""
    stock = stages.absorb
    monkeypatch.setattr(stages, "absorb", lambda model, constant: stock(model, times * constant))
    model, written = of_equal_rows()
    words = model.transformer.wte.weight.detach().clone()
    done = convert(model, posenc.NoPE(), written, quick(tokens=0))
    replaced, absorbed = done.record["stages"]
    assert torch.equal(done.model.transformer.wte.weight, words) is (times < 0)
    assert done.model.lm_head.weight is done.model.transformer.wte.weight
    if times < 0:
        assert absorbed["after"] == absorbed["before"] == replaced["after"]
    else:
        assert absorbed["after"] < absorbed["before"]
        assert absorbed["after"] == pytest.approx(replaced["before"], abs=1e-5)


@pytest.mark.parametrize("worse", [True, False])
def test_a_fit_is_kept_only_where_it_makes_the_loss_lower(worse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of random weights say little, so that a fit may do harm: here it is made to."""
    fitted = stages.calibrate

    def spoiling(model: Any, *given: Any) -> Any:
        found = fitted(model, *given)
        for weight in model.transformer.posenc.parameters():
            torch.nn.init.constant_(weight, 3.0 if worse else 1e-3)
        return found

    monkeypatch.setattr(stages, "calibrate", spoiling)
    losses = iter([2.0, 3.0 if worse else 1.0])
    stock = stages.Stages.loss
    monkeypatch.setattr(stages.Stages, "loss", lambda self, rows=None: stock(self) if rows is None else next(losses))
    done = convert(gpt2(), KERPLE, texts(), quick(tokens=0, absorb=None, **CALIBRATED))
    assert done.record["calibration"]["kept"] is not worse
    left = float(next(done.model.transformer.posenc.parameters()).detach().max())
    assert (left == pytest.approx(3.0 if worse else 1e-3)) is not worse
