"""What every registered encoding is and asks for, found out by asking its module and not written down anywhere.

The questions are put to the encoding as GPT-2 would have it with default fields. Only the paper and the words "No
training" are read, from the docstring of the encoding's file.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.config import ENCODINGS, Encoding, EncodingConfig, encoding
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from hf_posenc.export import ranked
from hf_posenc.positions import Geometry, Positions

GPT2 = Geometry(
    hidden_size=768,
    num_attention_heads=12,
    num_key_value_heads=12,
    head_dim=64,
    max_position_embeddings=1024,
    causal=True,
)
"""The model that the questions are about: GPT-2 of 124 million parameters."""
ACTS = {
    "embed": "embedding",
    "rotate": "rotation",
    "bias": "bias",
    "gate": "gate",
    "score": "scores",
    "temperature": "temperature",
}
"""Hook -> how an encoding that overrides it acts."""
INSIDE = "as inside"
"""What stands for an encoding that is nothing without others inside of it."""
_CITED = re.compile(r"\b[A-Z][\w-]+(?: et al\.| and [A-Z][\w-]+)? (?:19|20)\d\d\b")
_PLACES = (0, 1, 5, 100, 700, 1500, 2500, 3990, 3996, 3999, 4000)
_QUERIES = 5


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One encoding, in words that stand in a table.

    Attributes:
        name: the registry's.
        paper: authors and year, or `none`.
        acts: what it acts by, hook by hook, or `nothing`.
        positions: what a query hears of a key's place. `absolute`: the place itself; `relative`: the distance, exactly;
            `both`: the distance, and how far the text has come; `content`: what stands between; `none`.
        models: `causal` or `causal, bidirectional`.
        zero_shot: the models that go on without training, or `none`.
        numbers: trained numbers in a GPT-2; `a layer` where every layer has its own, `or by layer` where it may.
        cost: what a forward pass computes something more for, and the time and memory grow with: `nothing`, every
            `token`, every `distance` between tokens, or every `pair` of tokens.
        start: what an untrained one is equal to: `no positions`, another encoding's name, or itself.
        exports: the routes of native export that may take it from some model type, the preferred ones first.
    """

    name: str
    paper: str
    acts: str
    positions: str
    models: str
    zero_shot: str
    numbers: str
    cost: str
    start: str
    exports: str


HEADINGS = {
    "name": "encoding",
    "paper": "paper",
    "acts": "acts by",
    "positions": "positions",
    "models": "models",
    "zero_shot": "zero-shot on",
    "numbers": "trained numbers in GPT-2",
    "cost": "cost",
    "start": "starts as",
    "exports": "native export",
}
"""Field of an entry -> heading of its column."""
WIDE = 150
"""Columns of a terminal from which on a table of all fields can be read."""
NARROW = ("name", "acts", "positions", "models", "zero_shot", "cost")
"""The fields that stand side by side in 80 columns."""


def catalogue() -> list[Entry]:
    """Return an entry for every registered encoding, by name. Takes about a second."""
    return [entry_of(cls) for cls in ENCODINGS.values()]


def as_markdown(entries: list[Entry]) -> str:
    """Return the entries as a Markdown table."""
    rows = [list(HEADINGS.values()), ["---"] * len(HEADINGS)]
    rows += [[f"`{entry.name}`", *list(dataclasses.asdict(entry).values())[1:]] for entry in entries]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def entry_of(cls: type[EncodingConfig]) -> Entry:
    """Return the entry of one encoding."""
    text = " ".join((sys.modules[cls.__module__].__doc__ or "").split())
    paper = cited(text)
    try:
        config = cls().for_model(GPT2)
    except (ConfigError, TypeError):  # nothing by itself: encodings inside are what it is made of
        return Entry(name=cls.name, paper=paper, **dict.fromkeys(list(HEADINGS)[2:], INSIDE))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = config.build(GPT2).double()
        start = _start(module, cls.name)
        numbers = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        positions = _positions(module)
    return Entry(
        name=cls.name,
        paper=paper,
        acts=", ".join(word for hook, word in ACTS.items() if module.overrides(hook)) or "nothing",
        positions=positions,
        models="causal, bidirectional" if _fits_encoders(config) else "causal",
        zero_shot=_zero_shot(config, module, text, start),
        numbers=f"{numbers:,}{_by_layer(config) if numbers else ''}",
        cost=_cost(module),
        start=start,
        exports=", ".join(route.name for route in ranked() if route.admits(config) is None) or "none",
    )


def cited(text: str) -> str:
    """Return the authors and year of the first paper that a text cites, or `none`."""
    found = _CITED.search(text)
    return found.group() if found else "none"


def _by_layer(config: EncodingConfig) -> str:
    choice = getattr(config, "per_layer", None)
    return "" if choice is None else " a layer" if choice else " or by layer"


def _cost(module: Encoding) -> str:
    """Return what the work grows with, the fastest exact form taken."""
    if module.overrides("score") or (module.overrides("bias") and not module.overrides("distance_bias")):
        return "pair"
    if module.overrides("bias"):
        return "distance"
    return "token" if any(module.overrides(hook) for hook in ACTS) else "nothing"


def _fits_encoders(config: EncodingConfig) -> bool:
    try:
        config.check(dataclasses.replace(GPT2, causal=False))
    except UnsupportedEncodingError:
        return False
    return True


def _zero_shot(config: EncodingConfig, module: Encoding, text: str, start: str) -> str:
    """Return the models in which what was learned before goes on to count."""
    if module.overrides("adopt"):
        return "learned tables"
    rotary = config.rope_parameters(GPT2) is not None or start == "rope"
    return "rotary models" if rotary or "No training" in text else "none"


def _start(module: Encoding, name: str) -> str:
    if module.overrides("embed"):
        return "itself"
    for other, label in (("nope", "no positions"), ("rope", "rope")):
        alike = torch.equal(_scores(module, 0), _scores(encoding(other).build(GPT2), 0))
        if alike and (name != other or name == "nope"):
            return label
    return "itself"


def _positions(module: Encoding) -> str:
    """Return what the scores depend on, by spreading all positions and by moving all of them."""
    if module.overrides("embed"):
        return "absolute"
    here = _scores(module, 0)
    scale = here.abs().max()
    if torch.equal(here, _scores(module, 0, spread=2)):
        return "content" if module.overrides("bias") else "none"
    moved = max((_scores(module, shift) - here).abs().max() for shift in (1, 37, 500))
    return "relative" if moved <= 1e-9 * scale else "both"


def _scores(module: Encoding, shift: int, *, spread: int = 1) -> Tensor:
    """Return the scores of the last queries on the keys behind them, float64, with all positions moved or spread.

    (h, pairs of a query and a key): scaled queries and keys, and the hidden states that gates see, are always the same.
    """
    draw, heads, width = torch.Generator().manual_seed(1), GPT2.num_attention_heads, GPT2.head_dim
    key, query = (torch.randn(1, heads, len(_PLACES), width, generator=draw, dtype=torch.float64) for _ in range(2))
    query = query[:, :, -_QUERIES:] * width**-0.5
    hidden = torch.randn(1, len(_PLACES), GPT2.hidden_size, generator=draw, dtype=torch.float64)
    places = torch.tensor([_PLACES]) * spread + shift
    at = Positions(query=places[:, -_QUERIES:], key=places, gates=module.gate(hidden))
    scores = module.score(query, key, at)
    if scores is None:
        scores = module.rotate(query, at.query) @ module.rotate_key(key, at.key).mT
    bias, factor = module.bias(query, key, at), module.factor(at.query)
    scores = scores if bias is None else scores + bias
    scores = scores if factor is None else scores * factor[..., None]
    return scores[0][:, at.distance()[0] >= 0]
