"""The catalogue of encodings: README has it as it is, and what it finds out by asking is what the methods say."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import hf_posenc as posenc
from hf_posenc.catalogue import INSIDE, Entry, as_markdown, catalogue, cited, entry_of

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
ENTRIES = {entry.name: entry for entry in catalogue()}


def test_readme_has_the_table_as_it_is() -> None:
    """To renew it: `python -c "from hf_posenc.catalogue import *; print(as_markdown(catalogue()))"`."""
    written = re.search(r"<!-- encodings -->\n(.*?)\n?<!-- /encodings -->", README, flags=re.DOTALL)
    assert written is not None
    assert written.group(1) == as_markdown(list(ENTRIES.values()))


def test_every_encoding_has_an_entry_and_every_entry_is_whole() -> None:
    assert list(ENTRIES) == posenc.encodings()
    assert all(all(vars(entry).values()) for entry in ENTRIES.values())
    assert {name for name, entry in ENTRIES.items() if entry.start == INSIDE} == {"layered", "stacks"}
    assert {name for name, entry in ENTRIES.items() if entry.paper == "none"} == {"lerope"}


@pytest.mark.parametrize(
    ("field", "value", "names"),
    [
        ("positions", "absolute", "learned sinusoidal"),
        ("positions", "none", "nope drope"),
        ("positions", "content", "cable cope fox"),
        ("positions", "both", "dual_chunk fire fope lm_infinite self_extend sinks"),
        (
            "positions",
            "relative",
            "alibi bert_relative kerple lerope rerope rope sandwich shaw string t5 transformer_xl xpos",
        ),
        ("models", "causal", "cable cope drope dual_chunk fire fox lm_infinite nope sinks xpos"),
        ("start", "no positions", "bert_relative cope drope fire nope shaw t5 transformer_xl"),
        ("start", "rope", "lerope"),
        ("zero_shot", "learned tables", "learned"),
        (
            "zero_shot",
            "rotary models",
            "dual_chunk lerope lm_infinite rerope rope self_extend sinks string",
        ),
        ("acts", "scores", "dual_chunk lm_infinite rerope self_extend sinks string"),
        ("acts", "embedding", "learned sinusoidal"),
        ("acts", "nothing", "nope"),
        ("cost", "nothing", "nope"),
        ("cost", "token", "drope fope learned lerope rope sinusoidal xpos"),
        ("cost", "distance", "alibi kerple sandwich t5"),
        ("exports", "self_table", "learned sinusoidal"),
        ("exports", "self_bias", "alibi kerple sandwich"),
        ("exports", "self_bias, mpnet", "t5"),
    ],
)
def test_what_it_finds_out_is_what_the_methods_are(field: str, value: str, names: str) -> None:
    """Written down here once, by hand, from the papers."""
    assert [name for name, entry in ENTRIES.items() if getattr(entry, field) == value] == sorted(names.split())


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("alibi", "0"),
        ("t5", f"{32 * 12} or by layer"),
        ("kerple", f"{2 * 12} a layer"),
        ("fire", f"{32 + 32 + 32 * 12 + 12 + 2} or by layer"),
        ("shaw", f"{(2 * 16 + 1) * 64:,} a layer"),
        ("transformer_xl", f"{2 * 768 + 768 * 768:,} a layer"),
        ("learned", f"{1024 * 768:,}"),
        ("lerope", "32 or by layer"),
    ],
)
def test_numbers_are_those_of_a_gpt2(name: str, numbers: str) -> None:
    assert ENTRIES[name].numbers == numbers


@pytest.mark.parametrize(
    ("text", "paper"),
    [
        ("Press et al. 2022, section 3, and Su 2021.", "Press et al. 2022"),
        ("Checked by us. Chiang and Cholak 2022, and Su 2021.", "Chiang and Cholak 2022"),
        ("As of 2022, in GPT-2 of old. Wang-Li et al. 2024.", "Wang-Li et al. 2024"),
        ("Nobody wrote of it; see issue 2021.", "none"),
        ("", "none"),
    ],
)
def test_papers_are_authors_and_years(text: str, paper: str) -> None:
    assert cited(text) == paper


class Backwards(posenc.Encoding):
    """Turns and biases by the place of the key alone, from a trained number on."""

    def __init__(self, config: posenc.EncodingConfig, geometry: posenc.Geometry) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.zeros(()))

    def bias(self, query: Tensor, key: Tensor, positions: posenc.Positions) -> Tensor:
        return self.slope * positions.key[:, None, None] ** 2


@dataclass(frozen=True, kw_only=True)
class New(posenc.EncodingConfig):
    """One that nobody has registered."""

    name: ClassVar[str] = "new"
    label: ClassVar[str] = "New"
    module: ClassVar[type[posenc.Encoding]] = Backwards


def test_a_new_encoding_gets_an_entry_by_being_asked() -> None:
    state = torch.random.get_rng_state()
    expected = Entry(
        name="new",
        paper="none",
        acts="bias",
        positions="both",
        models="causal, bidirectional",
        zero_shot="none",
        numbers="1",
        cost="pair",
        start="no positions",
        exports="none",
    )
    assert entry_of(New) == expected
    assert torch.equal(torch.random.get_rng_state(), state)
    assert as_markdown([replace(expected, name="odd")]).splitlines()[2].startswith("| `odd` | none | bias | both |")
