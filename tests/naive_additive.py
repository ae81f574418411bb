"""Slow, readable twins of the encodings that add to the scores, in float64 and loops, sharing nothing with the package.

Heads, queries and keys are lists; `query` and `key` are vectors by head, then token, then dimension; `at` and `to` are
the positions of the queries and of the keys. Scores are in the units that softmax takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = list[float]
Heads = list[list[Row]]


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    """The inner product."""
    return sum(a * b for a, b in zip(one, other, strict=True))


def t5_bucket(distance: int, buckets: int, max_distance: int, two_sided: bool) -> int:
    """The bucket of query minus key position, by the logarithm of the paper's code, which is exact up to rounding."""
    start = 0
    if two_sided:
        buckets //= 2
        start = buckets if distance < 0 else 0
        distance = abs(distance)
    distance = max(distance, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return start + min(buckets - 1, exact + math.floor(share * (buckets - exact) + 1e-9))


def t5(
    table: Heads | list[Row], at: Sequence[int], to: Sequence[int], buckets: int, longest: int, sides: bool
) -> Heads:
    """The table's entry of bucket and head."""
    rows = [[table[t5_bucket(i - j, buckets, longest, sides)] for j in to] for i in at]
    return [[[entry[h] for entry in row] for row in rows] for h in range(len(table[0]))]  # type: ignore[misc]


def kerple(r1: Row, r2: Row, kernel: str, at: Sequence[int], to: Sequence[int]) -> Heads:
    """Both kernels of Chi et al. 2022."""

    def one(scale: float, shape: float, distance: int) -> float:
        if kernel == "log":
            return -scale * math.log(1 + shape * distance)
        return -scale * distance**shape

    return [[[one(a, b, abs(i - j)) for j in to] for i in at] for a, b in zip(r1, r2, strict=True)]


def sandwich(heads: int, width: int, first: int, at: Sequence[int], to: Sequence[int]) -> Heads:
    """The sum over pairs, less its value on the diagonal, by head."""

    def one(distance: int) -> float:
        return sum(math.cos(distance / 10000 ** (2 * k / width)) for k in range(first, first + width // 2))

    return [[[(one(i - j) - width / 2) * heads / (8 * h) for j in to] for i in at] for h in range(1, heads + 1)]


def fire_argument(i: float, distance: float, c: float, threshold: float) -> float:
    """What the network is asked for query position i, already counted from 0 or 1."""
    return math.log(c * abs(distance) + 1) / (math.log(c * max(i, threshold) + 1) + 1e-6)


def network(x: float, hidden: tuple[Row, Row], output: tuple[list[Row], Row]) -> Row:
    """One hidden ReLU layer from one number to one a head."""
    units = [max(0.0, w * x + b) for w, b in zip(*hidden, strict=True)]
    return [dot(weights, units) + b for weights, b in zip(*output, strict=True)]


def shaw(query: Heads, table: list[Row], at: Sequence[int], to: Sequence[int], left: int, right: int) -> Heads:
    """Scaled query times the row of the clipped distance."""
    return [
        [[dot(q, table[min(max(j - i, -left), right) + left]) for j in to] for q, i in zip(head, at, strict=True)]
        for head in query
    ]


def shaw_values(weights: Heads, table: list[Row], at: Sequence[int], to: Sequence[int], left: int, right: int) -> Heads:
    """What relative values add to the output: by head and query, rows of clipped distances in the weights' shares."""
    out = []
    for head in weights:
        rows = []
        for shares, i in zip(head, at, strict=True):
            met = [table[min(max(j - i, -left), right) + left] for j in to]
            rows.append([dot(shares, column) for column in zip(*met, strict=True)])
        out.append(rows)
    return out


def bert_relative(
    query: Heads, key: Heads | None, table: list[Row], at: Sequence[int], to: Sequence[int], scale: float
) -> Heads:
    """Scaled query, and with a key the scaled key, times the row of the distance."""
    reach = (len(table) + 1) // 2
    out = []
    for h, head in enumerate(query):
        rows = []
        for q, i in zip(head, at, strict=True):
            row = []
            for n, j in enumerate(to):
                entry = table[min(max(i - j, 1 - reach), reach - 1) + reach - 1]
                other = 0.0 if key is None else scale * dot(key[h * len(key) // len(query)][n], entry)
                row.append(dot(q, entry) + other)
            rows.append(row)
        out.append(rows)
    return out


def transformer_xl(
    query: Heads, key: Heads, u: list[Row], v: list[Row], projection: Heads, at: Sequence[int], to: Sequence[int]
) -> Heads:
    """What the scaled scores of Dai et al. 2019 have beyond those of query and key."""
    width, dim = len(projection[0][0]), len(u[0])
    scale = dim**-0.5
    out = []
    for h, head in enumerate(query):
        rows = []
        for q, i in zip(head, at, strict=True):
            row = []
            for n, j in enumerate(to):
                angles = [(i - j) / 10000 ** (2 * k / width) for k in range(width // 2)]
                wave = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
                place = [dot(weights, wave) for weights in projection[h]]
                content = scale * dot(u[h], key[h * len(key) // len(query)][n])
                row.append(content + dot([a + scale * b for a, b in zip(q, v[h], strict=True)], place))
            rows.append(row)
        out.append(rows)
    return out


def gated(gates: list[Row], slots: Sequence[int]) -> Heads:
    """By head, query slot and key: the sum of what the tokens behind the key, up to the query, have remembered.

    Keys ahead of the query have no value; they get the negated sum over the tokens between, which is what two
    cumulative sums give.
    """
    return [
        [[sum(head[j + 1 : i + 1]) - sum(head[i + 1 : j + 1]) for j in range(len(head))] for i in slots]
        for head in gates
    ]


def cope(query: Heads, key: Heads, table: list[Row], slots: Sequence[int], unscaled_gates: bool) -> Heads:
    """Contextual positions; `query` is scaled by 1/sqrt(dim), and the rows of the table meet it as it was before."""
    root = math.sqrt(len(table[0]))
    out = []
    for h, head in enumerate(query):
        keys = key[h * len(key) // len(query)]
        rows = []
        for q, i in zip(head, slots, strict=True):
            row = []
            for j in range(len(keys)):
                place = 0.0
                for k in range(j, i + 1):
                    place += 1 / (1 + math.exp(-dot(q, keys[k]) * (root if unscaled_gates else 1)))
                place = min(place, len(table) - 1)
                below = math.floor(place)
                above = min(below + 1, len(table) - 1)
                weight = place - below
                row.append(root * ((1 - weight) * dot(q, table[below]) + weight * dot(q, table[above])))
            rows.append(row)
        out.append(rows)
    return out
