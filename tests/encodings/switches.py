"""A place where a paper and its code disagree, and what can be asked of the encodings on either side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hf_posenc as posenc

Numbers = list[float]


@dataclass(frozen=True)
class Switch:
    """One disagreement.

    `sides` maps every value of the field to what `probe` gives for it; the first one is the default.
    """

    number: int
    encoding: str
    field: str
    probe: Callable[..., Numbers]
    sides: dict[Any, Numbers]
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)

    def config(self, value: Any) -> Any:
        """The config with that value, `temperature.key` being a field of it, `rope_type.key` a key of a scaling."""
        return self._with({self.field.rpartition(".")[2]: value})

    def left_out(self) -> Any:
        """The config that says nothing of the field."""
        return self._with({})

    def _with(self, fields: dict[str, Any]) -> Any:
        kind = self.field.rpartition(".")[0]
        if not kind:
            return posenc.encoding(self.encoding, **self.fixed, **fields)
        if kind == "temperature":
            return posenc.encoding(self.encoding, temperature={**self.fixed["temperature"], **fields})
        return posenc.RoPE(**{**self.fixed, "scaling": {"rope_type": kind, **self.fixed["scaling"], **fields}})


def geometry(**fields: Any) -> posenc.Geometry:
    plain = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4}
    return posenc.Geometry(**{**plain, "max_position_embeddings": 512, "causal": True, **fields})


def label(switch: Switch) -> str:
    return f"{switch.number}-{switch.encoding}-{switch.field}"


def built(config: Any, shape: posenc.Geometry) -> Any:
    return posenc.build(config, shape)


def frequencies(*pairs: int, dim: int) -> Callable[[Any], Numbers]:
    """Radians per token of these pairs."""
    return lambda config: [built(config, geometry(head_dim=dim)).inv_freq[k] for k in pairs]


def distances(row: int, *columns: int) -> Callable[[Any], Numbers]:
    """How far away keys seem to a query at `row`, off the angle of a pair that turns by 0.01 a token."""

    def probe(config: Any) -> Numbers:
        state = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
        keys = torch.tensor([columns])
        positions = posenc.Positions(query=torch.tensor([[row]]), key=keys)
        score = built(config, geometry()).score(
            state.expand(1, 1, 1, 4), state.expand(1, 1, len(columns), 4), positions
        )
        return (score.clamp(-1, 1).acos() * 100).flatten().tolist()

    return probe


def biases(query: int, *keys: int, **shape: Any) -> Callable[[Any], Numbers]:
    """The bias of the last head."""

    def probe(config: Any) -> Numbers:
        found = geometry(**shape)
        states = torch.zeros(1, found.num_attention_heads, len(keys), found.head_dim, dtype=torch.float64)
        positions = posenc.Positions(query=torch.tensor([[query]]), key=torch.tensor([keys]))
        bias = built(config, found).bias(states[:, :, :1], states, positions)
        return bias[0, -1].flatten().tolist()

    return probe


def trained(number: float, probe: Callable[..., Any], **shape: Any) -> Callable[[Any], Numbers]:
    """What `probe` gives of an encoding all of whose numbers are `number`."""

    def run(config: Any) -> Numbers:
        encoding = built(config, geometry(**shape)).double()
        with torch.no_grad():
            for parameter in encoding.parameters():
                parameter.fill_(number)
            found: Tensor = probe(encoding)
        return found.flatten().tolist()

    return run


def sinusoid(config: Any) -> Numbers:
    return built(config, geometry()).embed(torch.tensor([[1]])).flatten().tolist()


def table(config: Any) -> Numbers:
    encoding: Any = built(config, geometry(max_position_embeddings=4))
    encoding.adopt(torch.tensor([[0.0], [10.0], [20.0], [30.0]]).expand(-1, 8))
    return encoding.weight[:, 0].tolist()


def turned(config: Any) -> Numbers:
    states = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    return built(config, geometry()).rotate(states.expand(1, 1, 1, 4), torch.tensor([[1]])).flatten().tolist()


def fire_argument(*places: tuple[int, int]) -> Callable[[Any], Numbers]:
    """What the network of FIRE is asked at (query, distance): one unit that passes its argument on."""

    def probe(config: Any) -> Numbers:
        encoding: Any = built(config, geometry()).double()
        with torch.no_grad():
            for layer in (encoding.hidden, encoding.output):
                layer.weight.fill_(1)
                layer.bias.zero_()
            encoding.c.fill_(0.1)
        states, found = torch.zeros(1, 1, 1, 4, dtype=torch.float64), []
        for i, d in places:
            at = posenc.Positions(query=torch.tensor([[i]]), key=torch.tensor([[i - d]]))
            found.append(encoding.bias(states, states, at).item())
        return found

    return probe


def temperature(*positions: int) -> Callable[[Any], Numbers]:
    def probe(config: Any) -> Numbers:
        found = built(config, geometry()).factor(torch.tensor([positions]))
        return found.flatten().tolist()

    return probe


def cope_place(encoding: Any) -> Tensor:
    """Rows that count up tell the position of a key: the query's own, whose score is 1."""
    encoding.weight.zero_()
    encoding.weight[:, 0] = torch.arange(64)
    query, key = torch.zeros(1, 1, 1, 4).double(), torch.zeros(1, 1, 1, 4).double()
    query[..., 0] = 0.5  # scaled: without the division by sqrt(4) it is 1, and reads a row's number off
    key[..., 0] = 2
    found: Tensor = encoding.bias(query, key, posenc.Positions(query=torch.tensor([[0]]), key=torch.tensor([[0]])))
    return found


def t5_row(encoding: Any) -> Tensor:
    states = torch.zeros(1, 1, 1, 4).double()
    found: Tensor = encoding.bias(states, states, posenc.Positions(query=torch.tensor([[3]]), key=torch.tensor([[1]])))
    return found


def layers_of_four(config: Any) -> Numbers:
    """How many sets of numbers a model of four layers has."""
    return [float(len(list(config.build_layers(geometry(), 4).parameters())))]


def sandwich(first: int) -> float:
    return (sum(math.cos(1e4 ** (-2 * k / 128)) for k in range(first, first + 64)) - 64) / 8


def fire(query: float, distance: float, threshold: int) -> float:
    return math.log1p(0.1 * distance) / (math.log1p(0.1 * max(query, threshold)) + 1e-6)


def pair(k: int, dim: int, theta: float = 10000.0) -> float:
    """Radians per token of a pair that nothing slows down."""
    return float(theta ** (-2 * k / dim))


def still_pair(config: Any) -> Numbers:
    """What becomes of the pair (3, 4) that does not turn, at position 1."""
    states = torch.tensor([0.0, 3.0, 0.0, 4.0], dtype=torch.float64)
    return built(config, geometry()).rotate(states.expand(1, 1, 1, 4), torch.tensor([[1]])).flatten()[1::2].tolist()


def normalized(config: Any) -> Numbers:
    """What becomes of two heads of a query, (1, 1) and (7, 7)."""
    encoding = config.build(geometry(num_attention_heads=2, num_key_value_heads=2, head_dim=2))
    states = torch.tensor([[1.0, 1.0], [7.0, 7.0]], dtype=torch.float64)[None, :, None]
    rotated = encoding.rotate(states, torch.tensor([[5]])) if encoding.overrides("rotate") else states
    return rotated.flatten().tolist()
