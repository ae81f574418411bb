"""Layers that differ, inside models: which layer does what, with caches, padding, checkpoints and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel, StaticCache

import hf_posenc as posenc
from hf_posenc.config import from_dict
from hf_posenc.encodings.layered import Layered
from hf_posenc.errors import ConfigError, UnknownNameError, UnsupportedEncodingError
from tests.models import SUBJECTS, TRAINED, assert_same, in_steps, logits, padding_of, tokens

LAYERS = 4
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 20}
MIXES: dict[str, dict[str, Any]] = {
    "every-other-nope": {"pattern": [posenc.RoPE(), posenc.NoPE()]},
    "every-fourth-nope": {"pattern": [{"name": "rope"}] * 3 + [{"name": "nope"}]},
    "growing-and-static": {"pattern": [posenc.RoPE(scaling=DYNAMIC), posenc.Alibi()]},
    "table-bias-gate-score": {"layers": [{"name": name} for name in ("learned", "t5", "fox", "rerope")]},
    "waves-and-temperature": {
        "layers": [
            posenc.Sinusoidal(),
            posenc.RoPE(temperature={"kind": "log_n", "length": 8}),
            posenc.NoPE(),
            posenc.encoding("kerple"),
        ]
    },
}


def patched(mix: str, subject: str = "gpt2", **fields: Any) -> PreTrainedModel:
    """A model of four layers with that mixture, whose trained tables have left their starts."""
    model = posenc.patch(SUBJECTS[subject].fresh(num_hidden_layers=LAYERS, **fields), Layered(**MIXES[mix]))
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "posenc." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("subject", ["gpt2", "llama"])
@pytest.mark.parametrize("mix", list(MIXES))
def test_pieces_padding_and_backends_change_nothing(mix: str, subject: str) -> None:
    model, ids = patched(mix, subject), tokens(2, 50)
    full = logits(model, ids)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)):
        assert_same(in_steps(model, ids, [17, 1, 6, 1, 25], cache), full, 1e-4)
    padded = nn.functional.pad(ids, (3, 0), value=padding_of(model))
    mask = nn.functional.pad(torch.ones_like(ids), (3, 0))
    assert_same(logits(model, padded, attention_mask=mask)[:, 3:], full, 1e-4)
    model.set_attn_implementation("eager")
    assert_same(logits(model, ids), full, 1e-4)


@pytest.mark.parametrize("subject", ["gpt2", "llama"])
@pytest.mark.parametrize("mix", list(MIXES))
def test_a_checkpoint_gives_the_same_bits(mix: str, subject: str, tmp_path: Path) -> None:
    model, ids = patched(mix, subject), tokens(2, 50)
    model.save_pretrained(tmp_path)
    loaded = posenc.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert loaded.config.posenc == json.loads(json.dumps(model.config.posenc))


@pytest.mark.parametrize("subject", ["gpt2", "llama"])
def test_a_pattern_repeats_from_the_first_layer_on(subject: str) -> None:
    model, ids = patched("every-fourth-nope", subject), tokens(1, 20)
    explicit = Layered(layers=[posenc.RoPE(), posenc.RoPE(), posenc.RoPE(), posenc.NoPE()])
    assert torch.equal(
        logits(posenc.patch(SUBJECTS[subject].fresh(num_hidden_layers=LAYERS), explicit), ids), logits(model, ids)
    )
    shifted = Layered(layers=[posenc.NoPE(), posenc.RoPE(), posenc.RoPE(), posenc.RoPE()])
    other = logits(posenc.patch(SUBJECTS[subject].fresh(num_hidden_layers=LAYERS), shifted), ids)
    assert (other - logits(model, ids)).abs().max() > 1e-3


@pytest.mark.parametrize("config", [posenc.RoPE(theta=500.0), posenc.Alibi(), posenc.NoPE()], ids=lambda c: c.name)
def test_a_pattern_of_one_is_that_encoding(config: posenc.EncodingConfig) -> None:
    ids = tokens(2, 80)
    alone = posenc.patch(SUBJECTS["gpt2"].fresh(), config)
    assert torch.equal(
        logits(posenc.patch(SUBJECTS["gpt2"].fresh(), Layered(pattern=[config])), ids), logits(alone, ids)
    )


def test_which_layers_have_no_positions_is_as_in_smollm3() -> None:
    """Its config counts from 1: layers 3, 7, ... 35 of 36 do not rotate, and a 1 stands for those that do."""
    from transformers import SmolLM3Config

    expected = SmolLM3Config(num_hidden_layers=36).no_rope_layers
    rope = posenc.RoPE()
    shape = posenc.Geometry(
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=16,
        causal=True,
    )
    built = Layered(pattern=[rope, rope, rope, posenc.NoPE()]).build_layers(shape, 36)
    assert [int(layer.overrides("rotate")) for layer in built.layers] == expected  # type: ignore[union-attr]


def test_every_layer_learns_by_itself() -> None:
    model, ids = posenc.patch(SUBJECTS["gpt2"].fresh(), Layered(pattern=[{"name": "t5"}])), tokens(2, 30)
    model(input_ids=ids, labels=ids).loss.backward()
    tables = [parameter for name, parameter in model.named_parameters() if "posenc." in name]
    assert len(tables) == 2
    gradients = [table.grad for table in tables]
    assert all(gradient is not None and gradient.any() for gradient in gradients)
    assert not torch.equal(*gradients)  # type: ignore[arg-type]


def test_what_is_read_from_the_model_is_recorded_inside() -> None:
    model = SUBJECTS["llama"].fresh(rope_parameters={"rope_type": "default", "rope_theta": 777.0})
    config = Layered(pattern=[posenc.RoPE(), posenc.encoding("lm_infinite")])
    posenc.patch(model, config)
    rope, infinite = model.config.posenc["pattern"]
    assert rope["theta"] == infinite["theta"] == 777.0
    assert infinite["window"] == TRAINED
    assert posenc.max_length(model) is None
    filled = config.for_model(posenc.planning.geometry_of(SUBJECTS["gpt2"].fresh(), posenc.family.find_family("gpt2")))
    assert from_dict(json.loads(json.dumps(filled.to_dict()))) == filled != config


def test_a_table_in_one_layer_limits_the_model() -> None:
    model = patched("table-bias-gate-score")
    assert posenc.max_length(model) == TRAINED
    with pytest.raises(posenc.errors.LengthError, match="no position 65"):
        logits(model, tokens(1, TRAINED + 1))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({}, ConfigError, "none of them was given"),
        ({"layers": [posenc.NoPE()], "pattern": [posenc.NoPE()]}, ConfigError, "both of them"),
        ({"layers": []}, ConfigError, "Layered.layers must be a list"),
        ({"pattern": "rope"}, ConfigError, "Layered.pattern must be a list"),
        ({"pattern": [posenc.NoPE(), "rope"]}, ConfigError, r"Layered.pattern\[1\] must be an encoding config"),
        ({"pattern": [{"name": "ropee"}]}, UnknownNameError, "did you mean 'rope'"),
        ({"pattern": [{"name": "rope", "thetta": 5.0}]}, ConfigError, "did you mean 'theta'"),
        ({"pattern": [Layered(pattern=[posenc.NoPE()])]}, ConfigError, "layered itself"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Layered(**fields)


@pytest.mark.parametrize(
    ("subject", "config", "error", "message"),
    [
        ("gpt2", Layered(layers=[posenc.NoPE()] * 3), ConfigError, "3 encodings, the model 2 layers"),
        (
            "llama",
            Layered(layers=[posenc.Learned(), posenc.Sinusoidal()]),
            UnsupportedEncodingError,
            r"layer 0 \(learned\) and layer 1 \(sinusoidal\)",
        ),
        ("gpt2", Layered(pattern=[posenc.Learned()]), UnsupportedEncodingError, r"layer 1 \(learned\)"),
        ("bert", Layered(pattern=[posenc.Alibi(), posenc.NoPE()]), UnsupportedEncodingError, "bag of words"),
        ("bert", Layered(pattern=[posenc.encoding("cope")]), UnsupportedEncodingError, "CoPE"),
    ],
)
def test_what_does_not_fit_the_model_leaves_it_alone(
    subject: str, config: posenc.EncodingConfig, error: type[Exception], message: str
) -> None:
    model, ids = SUBJECTS[subject].fresh(), tokens(1, 10)
    before = logits(model, ids)
    with pytest.raises(error, match=message):
        posenc.patch(model, config)
    assert not posenc.is_patched(model)
    assert torch.equal(logits(model, ids), before)


def test_a_table_alone_keeps_what_the_model_says() -> None:
    model, ids = SUBJECTS["gpt2"].fresh(), tokens(1, 30)
    before = logits(model, ids)
    posenc.patch(model, Layered(layers=[posenc.Learned(), posenc.NoPE()]))
    assert torch.equal(logits(model, ids), before)
    assert Layered(pattern=[posenc.RoPE(), posenc.NoPE()]).within_length == "changed"


def test_every_layer_is_checked_before_anything_is_built() -> None:
    geometry = posenc.planning.geometry_of(SUBJECTS["bert"].fresh(), posenc.family.find_family("bert"))
    with pytest.raises(UnsupportedEncodingError, match="bag of words"):
        Layered(pattern=[posenc.Alibi(), posenc.NoPE()]).check(geometry)


def test_an_encoder_takes_what_its_layers_take() -> None:
    forced = posenc.NoPE(allow_bidirectional=True)
    model, ids = SUBJECTS["bert"].fresh(), tokens(2, 100)
    posenc.patch(model, Layered(pattern=[posenc.Alibi(sides="split"), forced]))
    assert logits(model, ids).isfinite().all()


def test_fields_survive_replace() -> None:
    config = Layered(pattern=[posenc.encoding("fox", slopes=[0.5, 0.25])])
    assert dataclasses.replace(config) == config
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config
