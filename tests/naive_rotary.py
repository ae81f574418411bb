"""Slow, readable twins of the rotary encodings beyond RoPE's first scalings, in float64 and loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tests.naive import Row, rotated

Matrix = list[Row]


def frequencies(theta: float, dim: int) -> Row:
    """Radians per token of every pair."""
    return [1 / theta ** (2 * k / dim) for k in range(dim // 2)]


def by_parts(theta: float, dim: int, original: int, factor: float, slow: float, fast: float, mix: str) -> Row:
    """Peng et al. 2023, equations 17-20: what turns often stays, what turns rarely is slowed down."""
    row = []
    for frequency in frequencies(theta, dim):
        turns = original / (2 * math.pi / frequency)
        gamma = 0.0 if turns < slow else 1.0 if turns > fast else (turns - slow) / (fast - slow)
        if mix == "harmonic":
            wavelength = (1 - gamma) * factor * 2 * math.pi / frequency + gamma * 2 * math.pi / frequency
            row.append(2 * math.pi / wavelength)
        else:
            row.append((1 - gamma) * frequency / factor + gamma * frequency)
    return row


def by_parts_of_the_repository(theta: float, dim: int, original: int, factor: float) -> Row:
    """Interpolation, then NTK, then no change, each blended into the next by a ramp over the pair's index."""

    def ramp(often: float, rarely: float) -> Row:
        ends = [dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (often, rarely)]
        low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
        return [min(max((k - low) / (high - low), 0.0), 1.0) for k in range(dim // 2)]

    plain = frequencies(theta, dim)
    ntk = frequencies(theta * factor ** (dim / (dim - 2)), dim)
    row = []
    for k, (inner, outer) in enumerate(zip(ramp(1.25, 0.75), ramp(16, 2), strict=True)):
        mixed = inner * plain[k] / factor + (1 - inner) * ntk[k]
        row.append(outer * mixed + (1 - outer) * plain[k])
    return row


def interleaved(vector: Sequence[float], position: int, speeds: Row) -> Row:
    """One head's vector turned by its position: dimension 2k pairs with 2k + 1."""
    out = list(vector)
    for k, speed in enumerate(speeds):
        x, y, angle = vector[2 * k], vector[2 * k + 1], position * speed
        out[2 * k] = x * math.cos(angle) - y * math.sin(angle)
        out[2 * k + 1] = y * math.cos(angle) + x * math.sin(angle)
    return out


def scores_by_distance(
    query: Matrix, key: Matrix, rows: Sequence[int], columns: Sequence[int], speeds: Row, distance: Callable[..., Any]
) -> list[list[float | None]]:
    """Scores of one head where a key seems `distance(i, j)` away from a query; None where that is None."""
    out: list[list[float | None]] = []
    for q, i in zip(query, rows, strict=True):
        row: list[float | None] = []
        for k, j in zip(key, columns, strict=True):
            seems = distance(i, j)
            turned = None if seems is None else rotated(q, seems, speeds)
            row.append(None if turned is None else sum(a * b for a, b in zip(turned, k, strict=True)))
        out.append(row)
    return out


def self_extend(i: int, j: int, group: int, window: int, fractional: bool = False) -> float:
    """Jin et al. 2024, section 3: distances in groups beyond the window."""
    if i - j < window:
        return i - j
    return i // group - j // group + window - (window / group if fractional else window // group)


def rerope(i: int, j: int, window: int, leak: float = math.inf) -> float:
    """Su 2023: from the window on a distance grows `leak` times slower, or not at all."""
    return i - j if i - j < window else window + (i - j - window) / leak


def dual_chunk(i: int, j: int, chunk: int, local: int, last: int) -> int:
    """An et al. 2024, equations 3-6: within a chunk, to the one before, and to those further back."""
    length = chunk - local
    if i // length == j // length:
        return i % length - j % length
    if i // length == j // length + 1:
        return min(i % length + length, last) - j % length
    return last - j % length


def string_positions(i: int, j: int, shift: int, local: int) -> int:
    """An et al. 2025, equation 4: distances from the shift on start over behind a local window."""
    return i - j if i - j < shift else i - j - shift + local


def lm_infinite(i: int, j: int, globals_: int, window: int) -> int | None:
    """Han et al. 2024, section 4: a window and some first tokens, none further away than the window."""
    if i - j >= window and j >= globals_:
        return None
    return min(i - j, window)


def sinks(i: int, j: int, first: int, recent: int) -> int | None:
    """Xiao et al. 2024, section 3.2, by the cache itself: evict, then count positions within what is left."""
    cache: list[int] = []
    for token in range(i + 1):
        cache.append(token)
        if len(cache) > first + recent:
            cache.pop(first)
    return cache.index(i) - cache.index(j) if j in cache else None


def xpos_score(query: Row, key: Row, distance: int, theta: float, dim: int, base: float) -> float:
    """Sun et al. 2022, equation 12: the score of a pair fades by zeta^(distance / base)."""
    speeds = frequencies(theta, dim)
    turned, score = rotated(query, distance, speeds), 0.0
    for k in range(len(query)):
        pair = k % (dim // 2)
        zeta = (2 * pair / dim + 0.4) / 1.4 if k < dim else 1.0
        score += turned[k] * key[k] * zeta ** (distance / base)
    return score


def temperature(kind: str, position: int, seen: int, scale: float, length: int, offset: float = 0.0) -> float:
    """The factor on the scores of one query at that position, which sees so many keys."""
    if kind in ("constant", "per_head"):
        return scale
    if kind == "log_n":
        return max(1.0, math.log(seen) / math.log(length))
    if kind in ("ssmax", "ssmax_paper"):
        return scale * math.log(seen) + offset
    if kind == "llama4":
        return 1 + scale * math.log1p((position + 1) // length)
    if kind == "ministral3":
        return 1 + scale * math.log(1 + position // length)
    if kind == "inkling":
        return 1 + scale * math.log(max(1.0, (position + 1) / length))
    return float((1 + (position + 1) / length) ** scale)


def fope(
    state: list[float],
    position: int,
    cosines: list[list[float]],
    sines: list[list[float]],
    theta: float,
    length: int,
    still: float,
) -> list[float]:
    """One head turned by FoPE: pair k by the k-th column of both mixtures of the frequencies that finish a turn."""
    half = len(state) // 2
    speeds = [theta ** (-k / half) for k in range(half) if theta ** (-k / half) * length >= 2 * math.pi]
    out = [0.0] * len(state)
    for k in range(half):
        cos, sin = 1.0, still
        if k < len(speeds):
            cos = sum(math.cos(position * speed) * cosines[f][k] for f, speed in enumerate(speeds))
            sin = sum(math.sin(position * speed) * sines[f][k] for f, speed in enumerate(speeds))
        out[k] = state[k] * cos - state[half + k] * sin
        out[half + k] = state[half + k] * cos + state[k] * sin
    return out
