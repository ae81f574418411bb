"""Adapters of patched models: what trains, what is saved, and onto what it loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc as posenc
from hf_posenc.conversion.adapters import CONFIG_NAME, add_lora, load_adapter
from hf_posenc.errors import CheckpointError, ConfigError
from tests.models import SUBJECTS, TRAINED, assert_same, logits, tokens

IDS = tokens(2, TRAINED)
SPECS: dict[str, tuple[str, posenc.EncodingConfig]] = {
    "additive with weights": ("gpt2", posenc.encoding("kerple")),
    "additive": ("gpt2", posenc.Alibi()),
    "absolute with weights": ("gpt2", posenc.Learned(max_position_embeddings=2 * TRAINED, extension="tile")),
    "rotary": ("llama", posenc.encoding("string", local=8)),
    "native": ("llama", posenc.RoPE(theta=500.0)),
    "with weights by layer": ("gpt2", posenc.encoding("t5", per_layer=True)),
}


def trained(subject: str, config: posenc.EncodingConfig) -> Any:
    """A patched model in peft after three steps."""
    torch.manual_seed(2)
    model = add_lora(posenc.patch(SUBJECTS[subject].fresh(), config, verify=False), rank=2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def base(subject: str, config: posenc.EncodingConfig) -> Any:
    """The model that adapters are loaded onto, with the encoding's random start where it has one."""
    torch.manual_seed(2)
    return posenc.patch(SUBJECTS[subject].fresh(), config, verify=False)


@pytest.mark.parametrize("kind", SPECS)
def test_an_adapter_brings_its_positions_along(kind: str, tmp_path: Path) -> None:
    subject, config = SPECS[kind]
    model = trained(subject, config)
    model.save_pretrained(tmp_path)
    untrained = logits(base(subject, config), IDS)
    said = logits(model, IDS)
    assert (said - untrained).abs().max() > 1e-3
    plain = SUBJECTS[subject].fresh()
    loaded = load_adapter(plain, tmp_path).eval()  # patches
    assert posenc.is_patched(plain)
    assert torch.equal(logits(loaded, IDS), said)
    assert torch.equal(logits(load_adapter(base(subject, config), tmp_path).eval(), IDS), said)
    own = {name: value for name, value in model.named_parameters() if "posenc" in name and "default" in name}
    assert bool(own) == ("with weights" in kind)
    assert all(value.requires_grad for value in own.values())
    assert_same(logits(loaded.merge_and_unload(), IDS), said)
    assert posenc.is_patched(loaded.get_base_model())


def test_an_adapter_is_refused_by_a_model_with_other_positions(tmp_path: Path) -> None:
    subject, config = SPECS["additive"]
    trained(subject, config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"trained on Alibi.*this model has RoPE"):
        load_adapter(base(subject, posenc.RoPE()), tmp_path)


def test_an_adapter_of_an_unpatched_model_stays_one(tmp_path: Path) -> None:
    add_lora(SUBJECTS["gpt2"].fresh(), rank=2).save_pretrained(tmp_path)
    assert not posenc.is_patched(load_adapter(SUBJECTS["gpt2"].fresh(), tmp_path).get_base_model())
    with pytest.raises(ConfigError, match="unpatched model"):
        load_adapter(base("gpt2", posenc.Alibi()), tmp_path)


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=CONFIG_NAME):
        load_adapter(SUBJECTS["gpt2"].fresh(), tmp_path)
    (tmp_path / CONFIG_NAME).write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(CheckpointError, match="IA3"):
        load_adapter(SUBJECTS["gpt2"].fresh(), tmp_path)
