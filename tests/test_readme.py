"""README is true: its Python runs, its table is what happens on small models, and its commands exist."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest

import hf_posenc as posenc
from hf_posenc.cli import app
from hf_posenc.errors import UnsupportedEncodingError
from hf_posenc.evaluation.protocols import PROTOCOLS
from hf_posenc.family import FAMILIES
from hf_posenc.quickstart import BASE
from tests.models import SUBJECTS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = {
    "`Learned`, tiled or interpolated": posenc.Learned(max_position_embeddings=256, extension="tile"),
    "`Sinusoidal`": posenc.Sinusoidal(),
    "`NoPE`": posenc.NoPE(),
    "`RoPE`, plain or `ntk`": posenc.RoPE(scaling={"rope_type": "ntk", "factor": 2.0}),
    "`RoPE`, `linear`": posenc.RoPE(scaling={"rope_type": "linear", "factor": 2.0}),
    "`RoPE`, `yarn`": posenc.RoPE(scaling={"rope_type": "yarn", "factor": 4.0}),
    "`RoPE`, `llama3`": posenc.RoPE(
        scaling={"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    ),
    "`RoPE`, `dynamic`": posenc.RoPE(scaling={"rope_type": "dynamic", "factor": 2.0}),
    "`Alibi`": posenc.Alibi(),
}


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def state(family: str, config: posenc.EncodingConfig) -> str:
    """What patching a small model of the family with this encoding comes to."""
    model = SUBJECTS[family].fresh()
    try:
        posenc.patch(model, config)
    except UnsupportedEncodingError:
        return "refused"
    posenc.verify(model)
    return "native" if posenc.surgery.record_of(model).plan.route == "native" else "yes"  # type: ignore[union-attr]


def table() -> str:
    """The table of encodings by families, measured."""
    families = [family for family in posenc.families() if family in SUBJECTS]
    lines = [f"| | {' | '.join(families)} |", f"| --- |{' --- |' * len(families)}"]
    for label, config in ROWS.items():
        lines.append(f"| {label} | {' | '.join(state(family, config) for family in families)} |")
    return "\n".join(lines)


def test_the_table_is_what_happens() -> None:
    written = re.search(r"<!-- table -->\n(.*?)\n?<!-- /table -->", README, flags=re.DOTALL)
    assert written is not None
    assert written.group(1) == table()


def test_every_model_type_is_listed() -> None:
    written = re.search(r"<!-- model types -->\n(.*?)\n<!-- /model types -->", README, flags=re.DOTALL)
    assert written is not None
    assert written.group(1) == model_types()


def model_types() -> str:
    """The model types that have a record, as README lists them."""
    lines = textwrap.wrap(", ".join(f"`{name}`" for name in FAMILIES), width=120, break_on_hyphens=False)
    return "\n".join([f"{len(list(FAMILIES))} model types have a record:", *lines])


def test_every_protocol_is_described() -> None:
    written = re.search(r"<!-- protocols -->\n(.*?)\n?<!-- /protocols -->", README, flags=re.DOTALL)
    assert written is not None
    assert written.group(1) == protocols()


def protocols() -> str:
    """The table of protocols, from their records."""
    lines = [
        "| protocol | windows | `s` at length 1,024 | before a text | average |",
        "| --- | --- | ---: | --- | --- |",
    ]
    starts = {None: "as you say", "prepend": "BOS", "every_window": "BOS in each window"}
    for name, protocol in PROTOCOLS.items():
        stride = f"{protocol.stride(1024):,}" if protocol.stride else ""
        mean = f"{protocol.mean}; and by token" if protocol.mean else "by token"
        cells = [f"`{name}`", protocol.says.format(stride="`s` tokens"), stride, starts[protocol.bos_policy], mean]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    posenc.encodings()  # the registry is filled before it is copied
    monkeypatch.setattr(posenc.config.ENCODINGS, "_things", dict(posenc.config.ENCODINGS._things))  # it registers one
    namespace: dict[str, object] = {}
    for block in blocks("python"):
        exec(block.replace("openai-community/gpt2", BASE), namespace)  # the bundled model stands in for the Hub's
    assert isinstance(posenc.from_pretrained(tmp_path / "gpt2-alibi"), posenc.modeling.PreTrainedModel)


def test_the_commands_exist() -> None:
    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    text = "\n".join(blocks("console")).replace("\\\n", " ")
    named = [shlex.split(line, comments=True)[1] for line in text.splitlines() if line.startswith("hf-posenc ")]
    assert named
    assert {name for name in named if not name.startswith("-")} <= known
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets


def test_the_files_that_it_links_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
