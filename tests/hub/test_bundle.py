"""The code beside a saved model: it loads where this package is not, again and again, and says the same."""

from __future__ import annotations

import ast
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM

import hf_posenc as posenc
from hf_posenc.config import ENCODINGS
from hf_posenc.hub.bundle import ALLOWED, ENTRY, bundle
from tests.contracts.test_encodings_matrix import CAN, reach, trained
from tests.hub.bare import run_bare
from tests.models import SUBJECTS, logits, patched, tokens

# by rotation in the cache and out of it, by bias with weights, by a table, by remapped positions, several at once
CELLS = [("gpt2", "rope-dynamic"), ("llama", "alibi"), ("opt", "rope"), ("roberta", "learned-tile"), ("bert", "alibi")]
NAMES = ["kerple", "string", "layered"]
READ_AND_SAVE_AGAIN = """
import sys, torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

held = []
for folder in sys.argv[1:]:
    ids, expected = torch.load(Path(folder).parent / "expected.pt")
    causal = "MaskedLM" not in AutoConfig.from_pretrained(folder, trust_remote_code=True).architectures[0]
    auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    held.append((folder, auto.from_pretrained(folder, trust_remote_code=True).eval(), ids, expected))
for folder, model, ids, expected in held:  # after all of them are loaded
    with torch.no_grad():
        print(torch.equal(model(input_ids=ids).logits, expected))
    model.save_pretrained(Path(folder).parent / "again" / "model")
"""
AND_TRAIN = (
    READ_AND_SAVE_AGAIN
    + """
from transformers import AutoModel, AutoModelForTokenClassification, Trainer, TrainingArguments

trained = Path(sys.argv[1]).parent / "trained"
model = next(model for folder, model, *_ in held if "kerple" in folder)
before = next(model.transformer.posenc.parameters()).detach().clone()
rows = [{"input_ids": row, "labels": row} for row in torch.arange(2, 50).view(4, 12)]
args = TrainingArguments(trained, max_steps=2, save_steps=2, learning_rate=1e-2, use_cpu=True, report_to="none")
Trainer(model=model.train(), args=args, train_dataset=rows).train()
again = AutoModelForCausalLM.from_pretrained(trained / "checkpoint-2", trust_remote_code=True)
after = next(again.transformer.posenc.parameters())
print("trained", torch.equal(after, next(model.transformer.posenc.parameters())), not torch.equal(after, before))
for auto in (AutoModel, AutoModelForTokenClassification):
    print(type(auto.from_pretrained(trained / "checkpoint-2", trust_remote_code=True)).__name__)
"""
)


def saved(model: Any, folder: Path, length: int) -> Path:
    """Save a model as a folder that is called `model`, beside what it says of some tokens."""
    ids = tokens(2, length)
    model.save_pretrained(folder / "model")
    torch.save((ids, logits(model, ids)), folder / "expected.pt")
    return folder / "model"


def _text(folder: Path) -> dict[str, str]:
    """What is readable in a saved model: configs and code."""
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".json", ".py")}


def twice(first: list[Path], modules: Path) -> list[str]:
    """Have an interpreter without this package load and save all these, and a second one what came out; its lines."""
    assert run_bare(READ_AND_SAVE_AGAIN, first, modules / "a") == ["True"] * len(first)
    second = [folder.parent / "again" / "model" for folder in first]
    for before, after in zip(first, second, strict=True):
        torch.save(torch.load(before.parent / "expected.pt"), after.parent / "expected.pt")
        assert _text(before) == _text(after)
    return run_bare(AND_TRAIN, second, modules / "b")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved model for every way in which positions act; all folders have the same name."""
    found = {}
    for subject, spec in CELLS:
        found[f"{subject}-{spec}"] = saved(patched(subject, spec), tmp_path_factory.mktemp(subject), 40)
    for name in NAMES:
        found[f"gpt2-{name}"] = saved(trained("gpt2", name), tmp_path_factory.mktemp(name), 40)
    torch.manual_seed(0)  # a family whose attention is declared
    bloom = BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4, seq_length=64)).eval()
    found["bloom-rope"] = saved(posenc.patch(bloom, posenc.RoPE(), verify=False), tmp_path_factory.mktemp("bloom"), 40)
    return found


def test_models_load_without_this_package_and_so_do_what_these_save(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_elsewhere = saved(outside(monkeypatch, tmp_path, "halving_alone", "import torch"), tmp_path / "outside", 20)
    first = [*folders.values(), from_elsewhere]
    heads = ["PosencGPT2Model", "PosencGPT2ForTokenClassification"]
    said = twice(first, tmp_path)
    assert said[: len(first)] == ["True"] * len(first)
    assert said[-3:] == ["trained True True", *heads]


@pytest.mark.slow
def test_models_with_any_encoding_do(tmp_path: Path) -> None:
    first = []
    for subject, name in CAN:
        model = trained(subject, name)
        if model.config.model_type.startswith("posenc_"):
            first.append(saved(model, tmp_path / f"{subject}-{name}", reach(name)))
    assert {str(path.parent.name).partition("-")[2] for path in first} == set(posenc.encodings()) - {
        "stacks"
    }  # of models with both
    assert twice(first, tmp_path)[: len(first)] == ["True"] * len(first)


def test_the_code_is_flat_and_needs_nothing_else(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        files = {path.stem: path.read_text() for path in folder.glob("*.py")}
        assert all(text.startswith("# SPDX-License-Identifier: Apache-2.0\n") for text in files.values())
        for node in (node for text in files.values() for node in ast.walk(ast.parse(text))):
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= ALLOWED
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert node.module in files
            elif isinstance(node, ast.ImportFrom):
                assert str(node.module).partition(".")[0] in ALLOWED


def test_the_code_holds_the_encodings_that_the_model_needs_and_no_others() -> None:
    def encodings(name: str) -> set[str]:
        files = bundle(trained("gpt2", name).config)[1]
        return {name for _, found, name in (file.partition("_encodings_") for file in files) if found}

    engine = encodings("nope") - {"nope.py"}  # those that a plan asks for by name, whatever the model
    assert encodings("alibi") - engine == {"alibi.py"}
    assert {"self_extend.py", "rope.py"} <= encodings("self_extend") <= {"self_extend.py", "rope.py"} | engine
    assert {"layered.py", "rope.py", "kerple.py"} <= encodings("layered") <= {"layered.py", "kerple.py"} | engine
    assert len(engine) <= 4


def test_no_code_of_the_model_runs_where_this_package_is_imported(tmp_path: Path) -> None:
    model = patched("gpt2", "alibi")
    model.save_pretrained(tmp_path)
    (tmp_path / f"{ENTRY}.py").write_text("raise SystemExit('ran')")
    for trust in (None, False, True):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)
        assert type(loaded) is type(model)
    assert type(posenc.from_pretrained(tmp_path)) is type(model)


def test_code_that_differs_never_shares_a_file_name() -> None:
    configs = [patched(*cell).config for cell in (("gpt2", "alibi"), ("gpt2", "nope"), ("opt", "alibi"))]
    names = [set(bundle(config)[1]) - {f"{ENTRY}.py"} for config in configs]
    assert names[0].isdisjoint(names[1] | names[2])
    assert bundle(configs[0]) == bundle(patched("gpt2", "alibi", own=True).config)


def test_saving_over_another_model_leaves_none_of_its_code(tmp_path: Path) -> None:
    patched("gpt2", "sinusoidal").save_pretrained(tmp_path)
    (tmp_path / "posenc_notes.py").write_text("# somebody's own")
    patched("gpt2", "alibi").save_pretrained(tmp_path)
    kept = {path.name for path in tmp_path.glob("*.py")}
    assert kept == {*bundle(patched("gpt2", "alibi").config)[1], "posenc_notes.py"}


def test_the_map_of_classes_never_points_into_another_repository(tmp_path: Path) -> None:
    model = patched("gpt2", "alibi", own=True)
    model.config.auto_map = {"AutoConfig": "somebody/model--modeling_posenc.PosencGPT2Config"}
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert written["AutoConfig"] == "modeling_posenc.PosencGPT2Config"
    assert written["AutoModelForCausalLM"] == "modeling_posenc.PosencGPT2LMHeadModel"


OUTSIDE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
{imports}
from hf_posenc.config import Encoding, EncodingConfig, register_encoding

class HalvingEncoding(Encoding):
    def __init__(self, config, geometry) -> None:
        super().__init__()

    def bias(self, query, key, positions):
        return -0.5 * positions.distance()[:, None].abs().float()

@register_encoding
@dataclass(frozen=True, kw_only=True)
class Halving(EncodingConfig):
    name: ClassVar[str] = "halving"
    label: ClassVar[str] = "Halving"
    module: ClassVar[type[Encoding]] = HalvingEncoding
"""


def outside(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, imports: str) -> Any:
    """A model with an encoding that somebody wrote in a module of their own."""
    (folder / f"{name}.py").write_text(textwrap.dedent(OUTSIDE).format(imports=imports))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(ENCODINGS, "_things", dict(ENCODINGS._things))
    module = __import__(name)
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, name, module)
    return posenc.patch(SUBJECTS["gpt2"].fresh(), module.Halving())


def test_what_cannot_stand_alone_is_saved_without_code_and_said_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = outside(monkeypatch, tmp_path, "halving_needy", "import yaml")
    with pytest.warns(UserWarning, match="halving_needy imports yaml"):
        model.save_pretrained(tmp_path / "model")
    assert "auto_map" not in json.loads((tmp_path / "model" / "config.json").read_text())
    assert not list((tmp_path / "model").glob("*.py"))
    ids = tokens(1, 9)
    assert torch.equal(logits(posenc.from_pretrained(tmp_path / "model").eval(), ids), logits(model, ids))
