"""Save and load: bit-exact in a new process, loud where something does not fit (robust behaviours 27-30 and 33)."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, GPT2LMHeadModel

import hf_posenc as posenc
from hf_posenc.errors import CheckpointError, ConfigError
from tests.models import SPECS, SUBJECTS, TRAINED, patched, tokens

CELLS = [(subject, spec) for subject in SUBJECTS for spec in SPECS]
READ_BACK = r"""
import sys
import torch, {module}
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
for folder in sys.argv[1:]:
    ids, logits, causal = torch.load(folder + "/expected.pt")
    auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    try:
        model = auto.from_pretrained(folder).eval()
    except ValueError as error:
        print("\nrefused", "trust_remote_code=True" in str(error))
        continue
    with torch.no_grad():
        print("equal" if torch.equal(model(input_ids=ids).logits, logits) else "different")
"""


def in_new_process(module: str, folders: list[Path]) -> list[str]:
    """What a fresh interpreter says of each folder, having imported one module besides transformers."""
    code = READ_BACK.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    # transformers asks on the same stream whether to run code
    return [line for line in done.stdout.splitlines() if line.startswith(("equal", "different", "refused"))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Every cell that can be patched, saved with an input and the logits it gives."""
    folders = {}
    for subject, spec in CELLS:
        model = patched(subject, spec)
        folder = tmp_path_factory.mktemp(f"{subject}-{spec}")
        ids = tokens(2, 40)
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        model.save_pretrained(folder)
        torch.save((ids, logits, SUBJECTS[subject].causal), folder / "expected.pt")
        folders[subject, spec] = folder
    return folders


def test_a_new_process_reads_back_every_cell_bit_for_bit(saved: dict[tuple[str, str], Path]) -> None:
    assert in_new_process("hf_posenc", list(saved.values())) == ["equal"] * len(saved)


def test_plain_transformers_refuses_every_cell_that_it_cannot_compute(saved: dict[tuple[str, str], Path]) -> None:
    said = dict(zip(saved, in_new_process("os", list(saved.values())), strict=True))
    for (subject, spec), verdict in said.items():
        model_type = json.loads((saved[subject, spec] / "config.json").read_text())["model_type"]
        native = not model_type.startswith("posenc_")
        assert verdict == ("equal" if native else "refused True"), (subject, spec)
    assert list(said.values()).count("equal") >= 4  # the rotary families take scalings natively


def test_the_spec_survives_config_json_exactly(saved: dict[tuple[str, str], Path]) -> None:
    for (subject, spec), folder in saved.items():
        written = json.loads((folder / "config.json").read_text()).get("posenc")
        if written is None:
            continue
        config = posenc.config.from_dict(written)
        assert config.to_dict() == written
        assert type(config) is type(SPECS[spec]), (subject, spec)


def test_saving_again_after_loading_changes_nothing(saved: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    folder = saved["gpt2", "learned-tile"]
    posenc.from_pretrained(folder).save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == (folder / "config.json").read_text()
    first, second = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("spec", ["alibi", "rope", "sinusoidal", "rope-dynamic"])
def test_nothing_derived_is_in_the_checkpoint(saved: dict[tuple[str, str], Path], spec: str) -> None:
    keys = load_file(saved["gpt2", spec] / "model.safetensors").keys()
    assert not [key for key in keys if "posenc" in key or "wpe" in key]


def test_loading_twenty_times_over_a_poisoned_heap_is_exact(saved: dict[tuple[str, str], Path]) -> None:
    folder = saved["gpt2", "rope-yarn"]
    ids, logits, _ = torch.load(folder / "expected.pt")
    for _ in range(20):
        poison = [torch.full((997,), float("nan")) for _ in range(200)]
        del poison
        with torch.no_grad():
            assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits, logits)


@pytest.mark.parametrize("subject", ["gpt2", "opt", "bert"])
def test_meta_device_then_empty_then_load_is_exact(saved: dict[tuple[str, str], Path], subject: str) -> None:
    folder = saved[subject, "rope"]
    ids, logits, causal = torch.load(folder / "expected.pt")
    auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.from_pretrained(folder))
    model.to_empty(device="cpu")
    model.tie_weights()
    missing = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False).missing_keys
    assert all("decoder" in key or "lm_head" in key for key in missing)  # tied
    for name, buffer in model.named_buffers():  # BERT's own; ours has none
        buffer.copy_(torch.arange(buffer.shape[-1]) if name.endswith("position_ids") else torch.zeros(()))
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=ids).logits, logits)


def test_tied_weights_stay_tied(saved: dict[tuple[str, str], Path]) -> None:
    model = posenc.from_pretrained(saved["gpt2", "alibi"])
    assert model.lm_head.weight is model.transformer.wte.weight


def test_half_precision_loads_in_half_precision(saved: dict[tuple[str, str], Path]) -> None:
    model = posenc.from_pretrained(saved["gpt2", "learned-tile"], dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(input_ids=tokens(1, 2 * TRAINED)).logits.dtype == torch.bfloat16


def test_a_body_without_its_head_loads_the_same_encoding(saved: dict[tuple[str, str], Path]) -> None:
    folder = saved["gpt2", "learned"]
    whole, body = posenc.from_pretrained(folder), AutoModel.from_pretrained(folder)
    assert type(body).__name__ == "PosencGPT2Model"
    ids = tokens(1, 9)
    assert torch.equal(body(input_ids=ids)[0], whole.transformer(input_ids=ids)[0])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda weights: weights.pop("transformer.posenc.weight"), "transformer.posenc.weight"),
        (lambda weights: weights.update({"transformer.posenc.slopes": torch.ones(4)}), "transformer.posenc.slopes"),
        (lambda weights: weights.pop("transformer.h.0.ln_1.weight"), "transformer.h.0.ln_1.weight"),
    ],
    ids=["missing", "unexpected", "missing in the body"],
)
def test_weights_that_do_not_fit_are_refused(saved, tmp_path, change, named) -> None:  # type: ignore[no-untyped-def]
    source = saved["gpt2", "learned"]
    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match=named.replace(".", r"\.")):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"theta_base": 1}, "theta_base"), ({"version": 99}, "99"), ({"name": "rpoe"}, "'rope'")],
    ids=["unknown field", "newer version", "unknown name"],
)
def test_a_spec_that_cannot_be_read_is_refused(saved, tmp_path, change, said) -> None:  # type: ignore[no-untyped-def]
    config = json.loads((saved["gpt2", "rope"] / "config.json").read_text())
    config["posenc"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((saved["gpt2", "rope"] / "model.safetensors").read_bytes())
    with pytest.raises(posenc.PosencError, match=said):
        posenc.from_pretrained(tmp_path)


def test_damaged_weights_are_named_as_such(saved: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    source = saved["gpt2", "rope"]
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="damaged"):
        posenc.from_pretrained(tmp_path)


def test_a_spec_missing_from_a_patched_config_is_an_error() -> None:
    config = AutoConfig.for_model("posenc_gpt2", n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(posenc.PosencError, match="spec"):
        posenc.modeling.model_class(GPT2LMHeadModel, posenc.surgery.rebuild)(config)


def test_a_loaded_model_goes_on_like_a_patched_one(saved: dict[tuple[str, str], Path]) -> None:
    model = posenc.from_pretrained(saved["gpt2", "alibi"])
    assert posenc.is_patched(model)
    posenc.verify(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(input_ids=tokens(1, 9)).logits, model(input_ids=tokens(1, 9)).logits)
    with pytest.raises(posenc.errors.PatchStateError, match="loaded"):
        posenc.unpatch(model)
    with pytest.raises(posenc.errors.PatchStateError, match="already"):
        posenc.patch(model, posenc.RoPE())


def test_stock_checkpoints_load_as_what_they_are(tmp_path: Path) -> None:
    model = SUBJECTS["gpt2"].fresh()
    model.save_pretrained(tmp_path)
    loaded = posenc.from_pretrained(tmp_path)
    assert type(loaded) is GPT2LMHeadModel
    assert not posenc.is_patched(loaded)


def test_a_config_of_wrong_kind_is_refused_before_anything() -> None:
    with pytest.raises(ConfigError, match="expected an encoding config"):
        posenc.patch(SUBJECTS["gpt2"].fresh(), "alibi")  # type: ignore[type-var]
