"""Where a paper and its code, or two codes, disagree: nineteen places, each a named field with a default and two sides.

Every row says what comes out of each side: published values, or what the two formulas give by hand.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hf_posenc import scaling as scalings
from hf_posenc import temperature as temperatures
from hf_posenc.config import ENCODINGS
from hf_posenc.errors import ConfigError
from hf_posenc.scaling import KINDS
from tests.encodings.switches import (
    Numbers,
    Switch,
    biases,
    built,
    cope_place,
    distances,
    fire,
    fire_argument,
    frequencies,
    geometry,
    label,
    layers_of_four,
    normalized,
    pair,
    sandwich,
    sinusoid,
    still_pair,
    t5_row,
    table,
    temperature,
    trained,
    turned,
)

SINES = (0.8414709848, 0.0998334166, 0.0099998333, 0.0009999998)
COSINES = (0.5403023059, 0.9950041653, 0.9999500004, 0.9999995)
LLAMA2 = {"scaling": {"factor": 16.0, "original_max_position_embeddings": 4096}}
"""YaRN's ramp lies between pairs 20 and 46 there: 33 is kept by half, 45 by a 26th part."""
GPT_OSS = {"theta": 150000.0, "scaling": {"factor": 32.0, "original_max_position_embeddings": 4096}}
"""YaRN's ramp lies between 8.09277912 and 17.39802450 there, or, truncated, between 8 and 18."""
KEPT = (17.39802450 - 13) / (17.39802450 - 8.09277912)
SWITCHES = [
    Switch(
        1,
        "rope",
        "yarn.ramp",
        frequencies(45, dim=128),
        {"dimension": [pair(45, 128) * (1 / 26 + 25 / 26 / 16)], "rotations": [9.6425915e-5]},
        LLAMA2,
    ),
    Switch(
        2,
        "rope",
        "yarn.truncate",
        frequencies(13, dim=64),
        {True: [0.0040695547], False: [pair(13, 64, 150000.0) * (KEPT + (1 - KEPT) / 32)]},
        GPT_OSS,
    ),
    Switch(
        3,
        "rope",
        "yarn.mix",
        frequencies(33, dim=128),
        {"linear": [0.0046004355], "harmonic": [pair(33, 128) / (0.5 + 0.5 * 16)]},
        LLAMA2,
    ),
    Switch(
        4,
        "rope",
        "yarn.mscale_all_dim",
        lambda config: [built(config, geometry()).attention_factor],
        {None: [0.1 * math.log(40) + 1], 1.0: [1.0]},
        {"scaling": {"factor": 40.0, "mscale": 1.0, "original_max_position_embeddings": 4096}},
    ),
    Switch(
        4,
        "nope",
        "temperature.scale",
        temperature(0, 9),
        {None: [1.0] * 2, (0.1 * math.log(40) + 1) ** 2: [1.8738542071] * 2},
        {"temperature": {"kind": "constant"}},
    ),
    Switch(
        5,
        "dual_chunk",
        "clamp",
        distances(15, *range(16)),
        {
            "chunk": [10, 9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0],
            "chunk-1": [9, 8, 7, 6, 5, 4, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0],
        },
        {"chunk": 10, "local": 4},
    ),
    Switch(
        6,
        "self_extend",
        "shift",
        distances(20, 0, 10, 17),
        {"fractional": [12.5, 7.5, 3], "floor": [13, 8, 3]},
        {"group": 2, "window": 5},
    ),
    Switch(
        7,
        "alibi",
        "form",
        biases(6, 0, 4, 5, 6, num_attention_heads=2),
        {
            "relative": [-6 / 256, -2 / 256, -1 / 256, 0],
            "bloom": [0, 4 / 256, 5 / 256, 6 / 256],
            "mpt": [-6 / 256, -2 / 256, -1 / 256, 0],
            "falcon": [0, 2 / 256, 2.5 / 256, 3 / 256],
        },
    ),
    Switch(
        8,
        "sinusoidal",
        "layout",
        sinusoid,
        {
            "interleaved": [one for pair in zip(SINES, COSINES, strict=True) for one in pair],
            "concatenated": [*SINES, *COSINES],
            "tensor2tensor": [
                *(0.8414709848, 0.0463992235, 0.0021544330, 0.0000999999983),
                *(0.5403023059, 0.9989229760, 0.9999976792, 0.999999995),
            ],
        },
    ),
    Switch(
        9,
        "learned",
        "extension",
        table,
        {
            "interpolate": [0, 5, 10, 15, 20, 25, 30, 30],
            "align_corners": [30 * i / 7 for i in range(8)],
            "half_pixel": [0, 2.5, 7.5, 12.5, 17.5, 22.5, 27.5, 30],
        },
        {"max_position_embeddings": 8},
    ),
    Switch(10, "sandwich", "first_index", biases(1, 0), {1: [-1.44661851 / 8], 0: [sandwich(0)]}),
    Switch(
        11,
        "fire",
        "threshold",
        fire_argument((255, 128), (511, 128), (4095, 512)),
        {
            "half_length": [0.7999813526, 0.6639409087, 0.6572768403],
            "length": [fire(255, 128, 512), fire(511, 128, 512), 0.6572768403],
        },
        {"width": 1},
    ),
    Switch(
        11,
        "fire",
        "count",
        fire_argument((1023, 512), (10, 10)),
        {"from_zero": [0.8528225304, 0.2112666036], "from_one": [fire(1024, 512, 256), 0.2112666036]},
        {"width": 1},
    ),
    Switch(
        12,
        "kerple",
        "parametrization",
        trained(-1.0, lambda encoding: encoding.distance_bias(torch.tensor([3.0]).double())),
        {
            "softplus": [-math.log1p(math.exp(-1)) * math.log1p(3 * math.log1p(math.exp(-1)))],
            "clamp": [-0.01 * math.log1p(0.03)],
        },
    ),
    Switch(
        13,
        "nope",
        "temperature.kind",
        temperature(8190, 8191, 8192),
        {
            "llama4": [1.0, 1.0693147181, 1.0693147181],
            "ministral3": [1.0, 1.0, 1.0693147181],
            "log_n": [1 + math.log((p + 1) / 8192) / math.log(8192) if p > 8191 else 1.0 for p in (8190, 8191, 8192)],
        },
        {"temperature": {"length": 8192}},
    ),
    Switch(
        13,
        "nope",
        "temperature.length",
        temperature(4095),
        {None: [4 / 3], 512: [4 / 3], 4096: [1.0]},
        {"temperature": {"kind": "log_n"}},
    ),
    Switch(
        15,
        "rope",
        "proportional.rope_type",
        frequencies(15, dim=128),
        {"default": [1.7782794e-4], "proportional": [0.1154782]},
        {"partial_rotary_factor": 0.25, "scaling": {}},
    ),
    Switch(
        16,
        "rope",
        "pairing",
        turned,
        {
            None: [-1.984110649, 1.959900667, 2.462377902, 4.019799668],
            "interleaved": [-1.142639664, 1.922075597, 2.959850668, 4.029799502],
        },
    ),
    Switch(
        17,
        "cope",
        "gates",
        trained(0.0, cope_place),
        {"scaled": [1 / (1 + math.exp(-1))], "unscaled": [1 / (1 + math.exp(-2))]},
    ),
    Switch(14, "fope", "still_sines", still_pair, {"one": [3.0 - 4.0, 4.0 + 3.0], "zero": [3.0, 4.0]}),
    Switch(
        18,
        "drope",
        "normalization",
        normalized,
        {"none": [1.0, 1.0, 7.0, 7.0], "all_heads": [0.2, 0.2, 1.4, 1.4], "per_head": [1.0, 1.0, 1.0, 1.0]},
    ),
    Switch(19, "t5", "multiplier", trained(0.7, t5_row), {"one": [0.7], "sqrt_head_dim": [1.4]}),
    Switch(19, "t5", "per_layer", layers_of_four, {False: [1], True: [4]}),
]
EVEN = {("learned", "extension"), ("nope", "temperature.kind"), ("rope", "proportional.rope_type")}
"""Fields that have no default, or another one: they choose among methods, of which these are some."""


def test_all_nineteen_are_here() -> None:
    assert {switch.number for switch in SWITCHES} == set(range(1, 20))


@pytest.mark.parametrize("switch", SWITCHES, ids=label)
def test_both_sides_give_what_they_are_known_for(switch: Switch) -> None:
    seen: list[Numbers] = []
    for value, expected in switch.sides.items():
        found = switch.probe(switch.config(value))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=2e-6, abs=2e-7), (value, found)
        seen.append(found)
    assert any(found != pytest.approx(seen[0], rel=1e-5, abs=1e-9) for found in seen[1:])


@pytest.mark.parametrize("switch", [one for one in SWITCHES if (one.encoding, one.field) not in EVEN], ids=label)
def test_the_first_side_is_the_default(switch: Switch) -> None:
    """In a scaling a key that is left out does what the default says."""
    default = next(iter(switch.sides))
    kind, _, key = switch.field.rpartition(".")
    if kind == "temperature":
        assert getattr(temperatures.Temperature(kind="constant"), key) == default
    elif kind:
        choices = KINDS[kind].choices.get(key)
        assert choices is None or choices[0] == default
    else:
        fields = {field.name: field.default for field in dataclasses.fields(ENCODINGS[switch.encoding])}
        assert fields[key] == default
    assert switch.probe(switch.left_out()) == switch.probe(switch.config(default))


@pytest.mark.parametrize("switch", SWITCHES, ids=label)
def test_nothing_else_is_taken_for_a_side(switch: Switch) -> None:
    with pytest.raises(ConfigError):
        switch.config("the other one")


@pytest.mark.parametrize("switch", [pytest.param(switch, id=label(switch)) for switch in SWITCHES])
def test_every_side_is_documented(switch: Switch) -> None:
    """Field and sides stand in the docstring of the config, keys of a scaling in those of the scalings."""
    key = switch.field.rpartition(".")[2]
    text = ENCODINGS[switch.encoding].__doc__ or ""
    if "." in switch.field:
        things = [*vars(scalings).values(), *vars(temperatures).values()]
        text += " ".join(str(getattr(thing, "__doc__", "")) for thing in things)
    assert key in text
    for side in (side for side in switch.sides if isinstance(side, str)):
        assert side in text
