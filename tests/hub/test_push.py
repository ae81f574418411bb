"""Publishing, against a Hub on this machine: checked first, one commit, resumed, and no token in any log."""

from __future__ import annotations

import json
import logging
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard

import hf_posenc as posenc
from hf_posenc.errors import CheckpointError, OutputExistsError, PublishError
from hf_posenc.hub import push as push_module
from hf_posenc.hub.bundle import bundle
from hf_posenc.hub.card import model_card
from hf_posenc.hub.command import main
from hf_posenc.hub.push import push_to_hub
from hf_posenc.report import describe_protocol, write_report
from tests.hub.bare import run_bare
from tests.hub.server import OWNER, TOKEN, Fault, Hub, Repo, running
from tests.models import logits, patched, tokens

ID, BASE = f"{OWNER}/tiny", "base/gpt2"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Hub]:
    """A Hub with an open base model; whatever is logged while it runs must not hold the token."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(push_module, "PAUSE", 0.0)
    caplog.set_level(logging.DEBUG)
    with running() as server:
        server.repos[BASE] = Repo(card={"license": "mit"})
        yield server
    assert TOKEN not in caplog.text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder, with things in it that are nobody else's business."""
    source = tmp_path / "run"
    patched("gpt2", "learned-tile").save_pretrained(source)
    (source / "checkpoints").mkdir()
    (source / ".env").write_text("SECRET=1")
    (source / "optimizer.pt").write_bytes(b"0")
    run = {"model": BASE, "output_dir": str(source), "learning_rate": 1e-3, "seed": 0, "lora_rank": 0}
    result = {"config": run, "steps": 3, "tokens_seen": 99, "packing": {"length": 9}, "final_loss": 1.5}
    (source / "result.json").write_text(json.dumps({**result, "certificate": {"finite": "off by 0"}}))
    return source


def push(hub: Hub, source: Path, **options: Any) -> posenc.hub.push.Publication:
    return push_to_hub(source, ID, api=HfApi(endpoint=hub.url, token=TOKEN), **options)


def test_one_commit_holds_the_model_its_code_and_its_card(hub: Hub, folder: Path) -> None:
    push(hub, folder)
    repo = hub.repos[ID]
    code = set(bundle(patched("gpt2", "learned-tile").config)[1])
    expected = {"config.json", "generation_config.json", "model.safetensors", "result.json", "README.md", *code}
    assert set(repo.files) == set(repo.commits[1]) == expected
    assert len(repo.commits) == 2  # the one that made the repository, and ours
    assert {path for path, mode in hub.modes.items() if mode == "lfs"} == {"model.safetensors"}
    assert repo.files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert not repo.private
    card = ModelCard(repo.files["README.md"].decode())
    assert (card.data.license, card.data.base_model) == ("mit", BASE)
    assert "| `extension` | `tile` |" in card.text
    assert "| finite | off by 0 |" in card.text
    assert "trust_remote_code=True" in card.text
    published = json.loads(repo.files["result.json"])
    assert published["config"]["model"] == BASE
    assert str(folder.parent) not in repo.files["result.json"].decode()
    assert not [path for path in folder.iterdir() if path.name.startswith(".posenc")]


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        ({"role": "read"}, False),
        ({"role": "fineGrained", "fineGrained": {"scoped": []}}, False),
        (
            {
                "role": "fineGrained",
                "fineGrained": {"scoped": [{"entity": {"name": OWNER}, "permissions": ["repo.write"]}]},
            },
            True,
        ),
    ],
    ids=["read", "fine-grained without", "fine-grained with"],
)
def test_the_role_of_the_token_is_asked_before_anything(
    hub: Hub, folder: Path, role: dict[str, Any], allowed: bool
) -> None:
    hub.role = role
    if allowed:
        push(hub, folder)
        return
    with pytest.raises(PublishError, match="role"):
        push(hub, folder)
    assert hub.seen == [("GET", "/api/whoami-v2")]


def test_nothing_is_sent_for_somebody_else_or_under_another_licence(hub: Hub, folder: Path) -> None:
    api = HfApi(endpoint=hub.url, token=TOKEN)
    with pytest.raises(PublishError, match="no member of 'another'"):
        push_to_hub(folder, "another/tiny", api=api)
    with pytest.raises(PublishError, match="'mit'"):
        push(hub, folder, licence="apache-2.0")
    assert set(hub.repos) == {BASE}
    assert hub.did("POST", "") == 0


def test_weights_that_are_cut_or_missing_are_noticed_here(hub: Hub, folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="cut"):
        push(hub, folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match="no saved model"):
        push(hub, folder)
    assert hub.seen == []


@pytest.mark.parametrize(
    ("base", "private"),
    [(Repo(card={"license": "mit"}), False), (Repo(gated="manual", card={"license": "mit"}), True), (Repo(), True)],
    ids=["open", "gated", "no licence"],
)
def test_what_may_not_be_shared_freely_is_private(hub: Hub, folder: Path, base: Repo, private: bool) -> None:
    hub.repos[BASE] = base
    assert push(hub, folder).private is private
    assert hub.repos[ID].private is private


def test_a_public_repository_does_not_take_what_must_be_private(hub: Hub, folder: Path) -> None:
    hub.repos[BASE] = Repo(gated="auto", card={"license": "mit"})
    hub.repos[ID] = Repo(commits=[["a"]])
    with pytest.raises(PublishError, match="public"):
        push(hub, folder)
    hub.repos[BASE] = Repo(card={"license": "mit"})
    with pytest.raises(PublishError, match="public"):
        push(hub, folder, private=True)
    del hub.repos[BASE]
    with pytest.raises(PublishError, match="not to be seen"):
        push(hub, folder, licence="mit")
    assert hub.repos[ID].files == {}
    push(hub, folder, private=False)
    assert "model.safetensors" in hub.repos[ID].files


@pytest.mark.parametrize("how", [500, 503, "drop", "slow"])
@pytest.mark.parametrize("where", [("PUT", "/objects/"), ("POST", "/commit/"), ("POST", "/preupload/")])
def test_what_breaks_once_is_tried_again(hub: Hub, folder: Path, how: int | str, where: tuple[str, str]) -> None:
    hub.faults.append(Fault(*where, how))
    push(hub, folder)
    assert "model.safetensors" in hub.repos[ID].files
    if where[1] != "/commit/" or how != "slow":
        assert len(hub.repos[ID].commits) == 2


def test_an_upload_that_stays_broken_shows_nothing_and_goes_on_later(hub: Hub, folder: Path) -> None:
    hub.faults.append(Fault("POST", "/commit/", "drop", times=99))
    with pytest.raises(PublishError, match="could not be reached"):
        push(hub, folder)
    assert hub.repos[ID].files == {}
    assert len(hub.repos[ID].commits) == 1
    hub.faults.clear()
    push(hub, folder)
    assert "model.safetensors" in hub.repos[ID].files
    assert len(hub.uploaded) == 1  # the weights were there already


@pytest.mark.parametrize("status", [403, 412])
def test_refusals_are_not_tried_again_and_say_so(hub: Hub, folder: Path, status: int) -> None:
    hub.faults.append(Fault("POST", "/commit/", status, times=99))
    with pytest.raises(PublishError, match=str(status) if status == 403 else "Somebody else") as refused:
        push(hub, folder)
    assert hub.did("POST", "/commit/") == 1
    assert TOKEN not in str(refused.value)


def test_whoever_writes_meanwhile_is_not_overwritten(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = HfApi.upload_folder

    def after_another(api: HfApi, **options: Any) -> Any:
        hub.repos[ID].commits.append(["theirs"])
        return upload(api, **options)

    monkeypatch.setattr(HfApi, "upload_folder", after_another)
    with pytest.raises(PublishError, match="Somebody else"):
        push(hub, folder)
    assert hub.repos[ID].files == {}


def test_a_second_push_leaves_nothing_of_the_first(hub: Hub, folder: Path) -> None:
    push(hub, folder)
    hub.repos[ID].files["notes.md"] = b"somebody's own"
    shutil.rmtree(folder)
    patched("gpt2", "alibi").save_pretrained(folder)
    push(hub, folder, licence="mit")
    left = {name for name in hub.repos[ID].files if name.endswith(".py")}
    assert left == set(bundle(patched("gpt2", "alibi").config)[1])
    assert "notes.md" in hub.repos[ID].files


def test_a_dry_run_writes_what_would_go_up_and_sends_nothing(hub: Hub, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "upload"
    publication = push(hub, folder, dry_run=target)
    assert {method for method, _ in hub.seen} == {"GET"}
    push(hub, folder)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == hub.repos[ID].files
    assert str(publication).startswith(f"{ID}: public")
    with pytest.raises(OutputExistsError):
        push(hub, folder, dry_run=target)


def test_the_command_works_where_no_hub_is(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upload, curves = tmp_path / "upload", tmp_path / "curves"
    texts = [tokens(1, 200, seed)[0].tolist() for seed in range(3)]
    curve = posenc.perplexity_by_length(patched("gpt2", "learned-tile"), texts, lengths=[32, 64, 128], name="tiled")
    write_report([curve], curves, seed=0, corpus={"source": "random ids"})
    assert main([str(folder), ID, "--dry_run", str(upload), "--curves", str(curves)]) == 0
    assert f"{ID}: private, no licence is known" in capsys.readouterr().out
    card = ModelCard.load(upload / "README.md")
    assert f"- `nonoverlapping`: {describe_protocol([curve])}.\n" in card.text
    assert "Trained length: 64 tokens." in card.text
    measured = {result.metric_name.split()[2]: result.metric_value for result in card.data.eval_results}
    assert measured == {str(length): round(curve.ppl[length], 4) for length in (64, 128)}
    assert (upload / "perplexity.png").read_bytes() == (curves / "perplexity.png").read_bytes()
    assert "A learned table of absolute positions" in card.text
    assert main([str(folder / "nothing"), ID, "--dry_run", str(tmp_path / "other")]) == 2
    assert "no saved model" in capsys.readouterr().err


CARD_FROM = ("result.json", "config.json")
PULL = """
import sys, torch
from transformers import AutoModelForCausalLM
ids, expected = torch.load(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
with torch.no_grad():
    print(torch.equal(model(input_ids=ids).logits, expected))
"""


@pytest.mark.slow
def test_what_was_pushed_is_pulled_with_this_package_and_without(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.repos[BASE].gated = "auto"  # so that the repository is private, and the token is needed to read it too
    push(hub, folder)
    ids = tokens(1, 20)
    torch.save((ids, logits(patched("gpt2", "learned-tile"), ids)), tmp_path / "expected.pt")
    network = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
    network |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_CACHE": str(tmp_path / "cache")}
    arguments = [ID, tmp_path / "expected.pt"]
    assert run_bare(PULL, arguments, tmp_path / "modules", environment=network) == ["True"]
    here = PULL.replace("from transformers import AutoModelForCausalLM", "import hf_posenc as AutoModelForCausalLM")
    done = subprocess.run(
        [sys.executable, "-c", here.replace(", trust_remote_code=True", ""), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **network},
        timeout=300,
    )
    assert done.stdout.split() == ["True"], done.stderr
    assert TOKEN not in done.stderr


def test_cards_in_the_repository_are_those_of_their_results() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "cards.py"))
    folders = sorted(path.parent for path in script["CARDS"].glob("*/result.json"))
    assert {folder.name for folder in folders} >= {"quickstart", "tiny-gpt2-alibi", "tiny-gpt2-nope", "tiny-gpt2-rope"}
    for folder in folders:
        result, config = (json.loads(p.read_text()) if p.exists() else None for p in map(folder.joinpath, CARD_FROM))
        expected = model_card(result, name=script["name_of"](folder), licence="apache-2.0", config=config)
        assert (folder / "README.md").read_text() == expected
        assert yaml.safe_load(expected.split("---")[1])["model-index"]


def test_settings_that_name_folders_of_this_machine_stay_here(tmp_path: Path) -> None:
    source = tmp_path / "run"
    patched("gpt2", "alibi").save_pretrained(source)
    (source / "config.yaml").write_text(f"model: {tmp_path}\n", encoding="utf-8")
    push_to_hub(source, f"{OWNER}/model", licence="mit", dry_run=tmp_path / "upload")
    assert (tmp_path / "upload" / "config.json").exists()
    assert not (tmp_path / "upload" / "config.yaml").exists()
