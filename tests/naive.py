"""Slow, readable twins of every encoding, in float64 and loops, that share nothing with the package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Row = list[float]


def sinusoidal_row(position: int, width: int, layout: str, theta: float = 10000.0) -> Row:
    """One row of the sinusoidal table (Vaswani et al. 2017, section 3.5)."""
    pairs = width // 2
    row = [0.0] * width
    for k in range(pairs):
        exponent = k / (pairs - 1) if layout == "tensor2tensor" else 2 * k / width
        angle = position / theta**exponent
        sine, cosine = (2 * k, 2 * k + 1) if layout == "interleaved" else (k, pairs + k)
        row[sine], row[cosine] = math.sin(angle), math.cos(angle)
    return row


def rope_frequencies(theta: float, dim: int, scaling: dict[str, Any] | None, length: int = 0) -> tuple[Row, float]:
    """Radians per token of every rotated pair, and the factor on cosine and sine, for a text of `length` tokens."""
    scaling = scaling or {"rope_type": "default"}
    kind, factor = scaling["rope_type"], scaling.get("factor", 1.0)
    original = scaling.get("original_max_position_embeddings", 0)
    if kind == "ntk":
        theta = theta * factor ** (dim / (dim - 2))
    if kind == "dynamic" and length > original:
        theta = theta * (factor * length / original - (factor - 1)) ** (dim / (dim - 2))
    plain = [1 / theta ** (2 * k / dim) for k in range(dim // 2)]
    if kind == "linear":
        return [f / factor for f in plain], 1.0
    if kind == "llama3":
        return [_llama3(f, scaling) for f in plain], 1.0
    if kind == "yarn":
        return _yarn(plain, theta, dim, scaling)
    return plain, 1.0


def _llama3(frequency: float, scaling: dict[str, Any]) -> float:
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return float((1 - smooth) * frequency / factor + smooth * frequency)


def _yarn(plain: Row, theta: float, dim: int, scaling: dict[str, Any]) -> tuple[Row, float]:
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    bounds = []
    for rotations in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)):
        bounds.append(dim / 2 * math.log(original / (2 * math.pi * rotations)) / math.log(theta))
    low, high = bounds
    if scaling.get("truncate", True):
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, dim - 1.0)
    if low == high:
        high += 0.001
    row = []
    for k, frequency in enumerate(plain):
        interpolated = min(1.0, max(0.0, (k - low) / (high - low)))
        row.append(interpolated * frequency / factor + (1 - interpolated) * frequency)
    if scaling.get("attention_factor") is not None:
        return row, scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        above, below = (0.1 * scaling[name] * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim"))
        return row, above / below
    return row, 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def rotated(vector: Sequence[float], position: int, frequencies: Row, factor: float = 1.0) -> Row:
    """One head's vector turned by its position: dimension k pairs with k + half, what is past the pairs stays."""
    half = len(frequencies)
    out = list(vector)
    for k, frequency in enumerate(frequencies):
        cosine, sine = factor * math.cos(position * frequency), factor * math.sin(position * frequency)
        out[k] = vector[k] * cosine - vector[half + k] * sine
        out[half + k] = vector[half + k] * cosine + vector[k] * sine
    return out


def alibi_slopes(heads: int) -> Row:
    """The slopes of Press et al. 2022, section 3; between powers of two, every second one of the next power."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]
    below = 1 << (heads.bit_length() - 1)
    return alibi_slopes(below) + [alibi_slopes(2 * below)[2 * i] for i in range(heads - below)]


def alibi_bias(heads: int, query: Sequence[int], key: Sequence[int]) -> list[list[Row]]:
    """Bias by head, query and key."""
    return [[[-slope * abs(i - j) for j in key] for i in query] for slope in alibi_slopes(heads)]


def tiled(table: list[Row], rows: int) -> list[Row]:
    """The table again and again."""
    return [table[i % len(table)] for i in range(rows)]


def interpolated(table: list[Row], rows: int) -> list[Row]:
    """Row i lies at i * len(table) / rows between the old rows; behind the last old row nothing changes any more."""
    out = []
    for i in range(rows):
        place = i * len(table) / rows
        lower = int(place)
        upper = min(lower + 1, len(table) - 1)
        weight = place - lower
        out.append([(1 - weight) * a + weight * b for a, b in zip(table[lower], table[upper], strict=True)])
    return out


def attention(
    query: list[list[Row]],
    key: list[list[Row]],
    value: list[list[Row]],
    bias: list[list[Row]] | None,
    *,
    scale: float,
    causal: bool,
) -> list[list[Row]]:
    """One attention layer by head, query and dimension; with fewer key heads, consecutive query heads share one."""
    out = []
    shared = len(query) // len(key)
    for h, rows in enumerate(query):
        keys, values = key[h // shared], value[h // shared]
        head = []
        for i, q in enumerate(rows):
            seen = range(i + 1) if causal else range(len(keys))
            scores = [scale * sum(a * b for a, b in zip(q, keys[j], strict=True)) for j in seen]
            if bias is not None:
                scores = [score + bias[h][i][j] for j, score in zip(seen, scores, strict=True)]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            total = sum(weights)
            head.append(
                [
                    sum(w / total * values[j][d] for j, w in zip(seen, weights, strict=True))
                    for d in range(len(values[0]))
                ]
            )
        out.append(head)
    return out
