"""Encoders with a decoder, tiny and random, under every way of acting: the laws that a patch has to keep in both."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_posenc as posenc
from hf_posenc.errors import ConfigError, ExportError, UnsupportedEncodingError, UnsupportedFamilyError
from hf_posenc.export import routes
from hf_posenc.inspection import inspection
from tests.families.stacked import ALONE, BIASED, MODEL_TYPES, REACHED, TABLED, answers, source, steps, stock
from tests.models import TRAINED, assert_same, largest, logits, tokens

LENGTH = 5 * TRAINED // 2
SPECS = {
    "alibi": posenc.Alibi(),
    "nope": posenc.NoPE(allow_bidirectional=True),
    "rope": posenc.RoPE(theta=500.0),
    "sinusoidal": posenc.Sinusoidal(),
    "t5": posenc.encoding("t5", num_buckets=16),
}
QUICK = [("bart", "alibi"), ("encoder-decoder", "t5"), ("m2m_100", "sinusoidal"), ("t5", "rope"), ("whisper", "nope")]
"""One cell of every kind; the others are for the slow tier."""


def spec_for(model_type: str, spec: posenc.EncodingConfig) -> posenc.EncodingConfig:
    """The spec for all stacks that can have it."""
    return posenc.Stacks(decoder=spec) if model_type == "longt5" else spec


def own_spec(model_type: str) -> posenc.EncodingConfig:
    """The spec of what the type has already."""
    bias = posenc.encoding("t5", per_layer=model_type == "umt5")
    return spec_for(model_type, bias if model_type in BIASED else posenc.Learned())


def cells() -> list[Any]:
    """Every type under every way of acting."""
    return [
        pytest.param(*cell, id="-".join(cell), marks=() if cell in QUICK else pytest.mark.slow)
        for cell in itertools.product(MODEL_TYPES, SPECS)
    ]


def some(quick: str, model_types: list[str]) -> list[Any]:
    """These types, of which those that are not named are for the slow tier."""
    return [pytest.param(name, marks=() if name in quick.split() else pytest.mark.slow) for name in model_types]


@pytest.mark.parametrize(("model_type", "name"), cells())
def test_a_model_type_keeps_the_laws(model_type: str, name: str, tmp_path: Path) -> None:
    model = stock(model_type, attends=name not in ("nope", "sinusoidal"))
    ids, heard = tokens(2, 40), tokens(2, 30, seed=1)
    before, keys = answers(model, source(model, heard), ids), list(model.state_dict())
    posenc.patch(model, spec_for(model_type, SPECS[name]))  # verifies
    ids, heard = tokens(2, LENGTH), tokens(2, LENGTH, seed=1)
    said = answers(model, source(model, heard), ids)
    assert said.isfinite().all()
    assert_same(steps(model, source(model, heard), ids, [21, 1, 1, 10, 60, 1, 1]), said[:, :95])
    padded_laws(model, model_type, heard, ids)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
        assert_same(answers(model, source(model, heard), ids), said)
        model.set_attn_implementation("sdpa")
    saved_laws(model, heard[:, :30], tmp_path)
    posenc.unpatch(model)
    assert torch.equal(answers(model, source(model, tokens(2, 30, seed=1)), tokens(2, 40)), before)
    assert list(model.state_dict()) == keys
    assert not [path for path, module in model.named_modules() if "posenc" in path or hasattr(module, "posenc_joints")]


def padded_laws(model: Any, model_type: str, heard: Tensor, ids: Tensor) -> None:
    """Padding on either side of either text changes nothing that is said, cached or not."""
    short, pads = ids[:1, :-7], torch.zeros_like(ids[:1, :7])
    rows, mask = torch.cat([torch.cat([pads, short], 1), ids[1:]]), torch.ones_like(ids)
    mask[0, :7] = 0
    alone = answers(model, source(model, heard[:1]), short)
    assert_same(answers(model, source(model, heard), rows, decoder_attention_mask=mask)[0, 7:], alone[0])
    stepped = steps(model, source(model, heard), rows, [30, 1, 5], decoder_attention_mask=mask)
    assert_same(stepped[0, 7:], alone[0, :29])
    if model_type == "longt5":  # its encoder is the stock one, which says something else on the other side of a block
        return
    few = answers(model, source(model, heard[:1, :-7]), ids[:1])
    for side in (1, -1):
        parts, seen = [heard[:1, :-7], pads], [torch.ones_like(heard[:1, :-7]), pads]
        given = source(model, torch.cat(parts[::side], 1), torch.cat(seen[::side], 1))
        assert_same(answers(model, given, ids[:1]), few)


def saved_laws(model: Any, heard: Tensor, folder: Path) -> None:
    """What is loaded says bit for bit what was saved."""
    expected = answers(model, source(model, heard), tokens(2, 40))
    model.save_pretrained(folder)
    loaded = posenc.from_pretrained(folder, attn_implementation=model.config._attn_implementation).eval()
    assert torch.equal(answers(loaded, source(loaded, heard), tokens(2, 40)), expected)
    assert loaded.config.posenc == model.config.posenc


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_its_own_encoding_put_back_changes_nothing_at_all(model_type: str) -> None:
    model = stock(model_type)
    heard, ids = tokens(2, 50, seed=1), tokens(2, TRAINED)
    heard[0, 40:] = 0
    given = source(model, heard, heard.ne(0).long())
    attend = model.config._attn_implementation
    rounded = answers(model, given, ids)
    model.set_attn_implementation("eager")  # on sdpa a bias of the distance goes another way, which rounds otherwise
    before = answers(model, given, ids)
    posenc.patch(model, own_spec(model_type))
    assert largest(answers(model, given, ids) - before) == 0.0
    model.set_attn_implementation(attend)
    assert_same(answers(model, given, ids), rounded)
    with torch.no_grad():
        for body in model.modules():
            for parameter in getattr(body, "posenc", torch.nn.Module()).parameters():
                parameter.add_(1.0).mul_(torch.linspace(0.5, 2, parameter.numel()).view_as(parameter))
    assert largest(answers(model, given, ids) - before) > 1e-3, "the law must be able to fail"


@pytest.mark.parametrize("model_type", ["m2m_100", "nllb-moe"])
def test_padding_that_no_mask_shows_is_not_counted(model_type: str) -> None:
    """The stock model counts over the ids, and so do we; what stands where padding is does not matter."""
    model = stock(model_type)
    encoder, ids = model.get_encoder(), tokens(2, 30)
    ids[0, :5] = ids[1, 8:11] = model.config.pad_token_id
    added = encoder.embed_positions(ids)
    posenc.patch(model, posenc.Learned(), verify=False)
    seen: list[Tensor] = []
    encoder.embed_positions.register_forward_hook(lambda module, args, output: seen.append(output))
    encoder(input_ids=ids)
    real = ids.ne(model.config.pad_token_id)
    assert torch.equal(seen[0].expand_as(added)[real], added[real])


@pytest.mark.parametrize("model_type", some("bart m2m_100 t5", [name for name in REACHED if name != "encoder-decoder"]))
def test_without_positions_the_order_of_what_is_heard_plays_no_part(model_type: str) -> None:
    """So nothing of the old positions is left in the encoder, and cross-attention has none."""
    model = stock(model_type, attends=False)
    heard, ids = tokens(1, 30, seed=1), tokens(1, 20)
    mixed = heard[:, torch.randperm(30, generator=torch.Generator().manual_seed(0))]
    before = answers(model, source(model, heard), ids)
    effect = largest(answers(model, source(model, mixed), ids) - before)
    posenc.patch(model, posenc.Stacks(encoder=posenc.NoPE(allow_bidirectional=True)))
    left = largest(answers(model, source(model, mixed), ids) - answers(model, source(model, heard), ids))
    assert left < 1e-4
    assert left < effect / 50


@pytest.mark.parametrize("model_type", ["bart", "t5", "encoder-decoder"])
def test_each_stack_can_have_its_own(model_type: str) -> None:
    model = stock(model_type)
    heard, ids = tokens(1, 30, seed=1), tokens(1, 20)
    before = answers(model, source(model, heard), ids)
    states = model.get_encoder()(input_ids=heard)[0]
    posenc.patch(model, posenc.Stacks(decoder=posenc.RoPE()))
    assert torch.equal(model.get_encoder()(input_ids=heard)[0], states)
    assert largest(answers(model, source(model, heard), ids) - before) > 1e-3
    assert not [name for name, _ in model.get_encoder().named_modules() if "posenc" in name]
    posenc.unpatch(model)
    posenc.patch(model, posenc.Stacks(encoder=posenc.Alibi(), decoder={"name": "rope"}))
    certificate = posenc.verify(model)
    assert {"encoder: left padding", "decoder: future", "decoder: cache"} <= set(certificate.findings)
    assert "encoder: future" not in certificate.findings
    spec = model.config.posenc
    assert (spec["name"], spec["encoder"]["name"], spec["decoder"]["name"]) == ("stacks", "alibi", "rope")
    labels = {type(module).__name__ for module in model.modules() if hasattr(module, "posenc_joint")}
    assert {name[: name.index("T")] if model_type == "t5" else name[: name.index("B")] for name in labels} == {
        "Alibi",
        "Rotary",
    }


@pytest.mark.parametrize("model_type", some("marian whisper", ALONE))
def test_a_decoder_by_itself_is_a_model_of_one_stack(model_type: str, tmp_path: Path) -> None:
    model = stock(model_type, alone=True)
    before = logits(model, tokens(2, 40))
    with pytest.raises(UnsupportedFamilyError if model_type == "whisper" else ConfigError, match="encoder"):
        posenc.patch(model, posenc.Stacks(encoder=posenc.Alibi(), decoder=posenc.Alibi()))
    posenc.patch(model, posenc.Learned())
    assert torch.equal(logits(model, tokens(2, 40)), before)
    posenc.unpatch(model)
    posenc.patch(model, posenc.RoPE())
    assert model.config.posenc["name"] == "rope"
    said = logits(model, tokens(2, LENGTH))
    model.save_pretrained(tmp_path)
    loaded = posenc.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, tokens(2, LENGTH)), said)
    posenc.unpatch(model)
    assert torch.equal(logits(model, tokens(2, 40)), before)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("bart", "alibi"),
        ("t5", "rope"),
        ("whisper", "sinusoidal"),
        pytest.param("encoder-decoder", "rope", marks=pytest.mark.slow),
        pytest.param("m2m_100", "sinusoidal", marks=pytest.mark.slow),
    ],
)
def test_generate_takes_the_tokens_that_full_forwards_take(model_type: str, name: str) -> None:
    model = stock(model_type, attends=name != "sinusoidal")
    posenc.patch(model, SPECS[name], verify=False)
    given = source(model, tokens(1, TRAINED + 9, seed=1))
    full = torch.tensor([[1]])
    for _ in range(20):
        full = torch.cat([full, answers(model, given, full)[:, -1:].argmax(-1)], dim=1)
    how = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    found = model.generate(**given, **how, num_beams=1)
    assert torch.equal(found[:, -20:], full[:, 1:])  # Whisper's leaves the first token out
    if model_type != "whisper":
        ids = tokens(2, TRAINED, seed=2)
        ids[1, 40:] = 0
        mask = ids.ne(0).long()
        beams = model.generate(input_ids=ids, attention_mask=mask, num_beams=3, **how)
        row = model.generate(input_ids=ids[1:, :40], attention_mask=mask[1:, :40], num_beams=3, **how)
        assert torch.equal(beams[1:], row)


READ_BACK = """
import sys, torch, transformers
for folder in sys.argv[1:]:
    auto, given, ids, expected = torch.load(folder + "/expected.pt")
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        print(torch.equal(model(**given, decoder_input_ids=ids).logits, expected), "hf_posenc" in sys.modules)
"""


@pytest.mark.slow  # a fresh interpreter
def test_a_process_without_this_package_reads_stacks_back_bit_for_bit(tmp_path: Path) -> None:
    specs = {"encoder-decoder": SPECS["alibi"], "whisper": SPECS["rope"], "bart": SPECS["t5"]}
    for model_type, spec in specs.items():
        model, ids = posenc.patch(stock(model_type), spec), tokens(2, 30)
        model.save_pretrained(tmp_path / model_type)
        auto = "AutoModelForSpeechSeq2Seq" if model_type == "whisper" else "AutoModelForSeq2SeqLM"
        given = source(model, ids)
        torch.save((auto, given, ids, answers(model, given, ids)), tmp_path / model_type / "expected.pt")
    folders = [str(tmp_path / model_type) for model_type in specs]
    outside = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", READ_BACK, *folders],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, **outside},
    )
    assert done.stdout.splitlines() == ["True False"] * len(specs), done.stderr


def test_what_cannot_be_is_refused_by_name() -> None:
    model = stock("bart")
    with pytest.raises(ConfigError, match="got neither"):
        posenc.Stacks()
    with pytest.raises(ConfigError, match=r"Stacks\.encoder is one stack"):
        posenc.Stacks(encoder=posenc.Stacks(decoder=posenc.Alibi()))
    with pytest.raises(ConfigError, match=r"Stacks\.decoder must be an encoding config or its spec"):
        posenc.Stacks(decoder="alibi")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedEncodingError, match="encoder: NoPE was asked for on a bidirectional model"):
        posenc.plan(model, posenc.NoPE())
    with pytest.raises(ConfigError, match="takes none: it counts the tokens that the attention mask shows"):
        posenc.patch(model, posenc.Alibi())(
            input_ids=tokens(1, 9), decoder_input_ids=tokens(1, 9), position_ids=torch.arange(9)[None]
        )
    with pytest.raises(UnsupportedFamilyError, match=r"encoder of Whisper.* hears frames of sound"):
        posenc.plan(stock("whisper"), posenc.Stacks(encoder=posenc.Alibi()))
    with pytest.raises(UnsupportedFamilyError, match=r"encoder of LongT5.* attention is local"):
        posenc.plan(stock("longt5", attends=False), posenc.Alibi())


@pytest.mark.slow
def test_inspection_speaks_of_both_stacks_and_export_of_no_bart() -> None:
    rows = inspection(stock("bart"))
    assert rows["encoding"].startswith("encoder: BartLearnedPositionalEmbedding at embed_positions; decoder: ")
    assert "decoder: 2 times BartAttention, the first at layers.0.self_attn" in rows["attention"]
    assert rows["packed rows"].startswith("not safe")
    assert "alibi" in rows["can take"]
    assert "inside the scores" in inspection(stock("t5", attends=False))["encoding"]
    assert routes(posenc.patch(stock("bart"), posenc.Alibi(), verify=False)) == {}
    with pytest.raises(ExportError, match="takes over the decoder"):
        routes(posenc.patch(stock("bart", alone=True), posenc.Alibi(), verify=False))


def test_a_plan_names_the_paths_in_both_stacks() -> None:
    plan = posenc.plan(stock("bart"), posenc.Stacks(encoder=posenc.RoPE(), decoder=posenc.Alibi()))
    assert list(plan.parts) == ["encoder", "decoder"]
    assert plan.changes["model.encoder.embed_positions"] == ("BartLearnedPositionalEmbedding", "PositionTable")
    assert plan.changes["model.decoder.layers.1.self_attn"] == ("BartAttention", "AlibiBartAttention")
    assert not [path for path in plan.changes if "encoder_attn" in path]
    assert [part.geometry.causal for part in plan.parts.values()] == [False, True]
    assert [part.geometry.num_attention_heads for part in plan.parts.values()] == [4, 2]


@pytest.mark.parametrize(
    ("model_type", "own", "longer"),
    [("bart", TRAINED, 100), ("whisper", TRAINED, 100), ("m2m_100", None, 100), ("t5", None, 100)],
)
def test_how_long_a_text_may_be(model_type: str, own: int | None, longer: int, tmp_path: Path) -> None:
    model = stock(model_type, attends=False)
    assert posenc.max_length(model) == own
    spec = posenc.Learned(max_position_embeddings=longer, extension="tile")
    posenc.patch(model, posenc.Stacks(decoder=spec))
    assert posenc.max_length(model) == (TRAINED if model_type == "bart" else longer)  # the shorter stack
    said = answers(model, source(model, tokens(1, 30)), tokens(1, longer))
    with pytest.raises(posenc.errors.LengthError, match=f"no position {longer + 1}"):
        answers(model, source(model, tokens(1, 30)), tokens(1, longer + 1))
    model.save_pretrained(tmp_path)
    loaded = posenc.from_pretrained(tmp_path).eval()
    assert torch.equal(answers(loaded, source(model, tokens(1, 30)), tokens(1, longer)), said)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("model_type", "name"), [("bart", "alibi"), ("t5", "rope"), ("m2m_100", "sinusoidal")])
def test_checkpointed_gradients_are_the_gradients(model_type: str, name: str, reentrant: bool) -> None:
    model = posenc.patch(stock(model_type), SPECS[name], verify=False).train()
    heard, ids = tokens(2, LENGTH, seed=1), tokens(2, LENGTH)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(input_ids=heard, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again = gradients()
    assert len(again) == len(plain)
    for one, other in zip(plain, again, strict=True):  # of what the decoder heard they are added up in another order
        assert_same(other, one)


def test_the_tables_cover_all_types() -> None:
    assert len(MODEL_TYPES) >= 16
    assert {"bart", "marian", "whisper", "encoder-decoder"} <= set(TABLED)
    assert {"t5", "umt5", "longt5", "switch_transformers"} <= set(BIASED)
