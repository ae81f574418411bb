"""How a long sequence is cut into windows, as pure functions on lengths.

A sequence of `n + 1` tokens has `n` targets: input `i` predicts token `i + 1`. Windows count *inputs*, so a window of
length L uses exactly the positions 0 .. L-1 and has up to L targets, the last of which lies one token past its inputs.
Therefore every target is scored exactly once for every length and stride, also across the borders of windows that do
not overlap, and the token count is the same for all of them. The first token of a sequence is never a target; a BOS
token prepended to a document makes its first token one.

Windows begin at multiples of the stride, and the last one may be short, as in transformers' guide on perplexity;
lm-evaluation-harness moves the last window back instead to give it full context, which changes the numbers of tails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hf_posenc.errors import ConfigError, UnknownNameError, did_you_mean

NONOVERLAPPING = "nonoverlapping"
SLIDING = "sliding"
PROTOCOLS = (NONOVERLAPPING, SLIDING)


class Window(NamedTuple):
    """Inputs `begin .. end-1` go through the model; the targets of the last `scored` of them count."""

    begin: int
    end: int
    scored: int


def nonoverlapping(n_targets: int, length: int) -> Iterator[Window]:
    """Yield disjoint windows of `length` inputs, each without any context from before it.

    Its perplexity falls with the length even for a model that ignores distant tokens, because fewer targets stand at
    the start of a window with little context; read it beside `sliding` (Press et al. 2022, appendix B).
    """
    return sliding(n_targets, length, length)


def sliding(n_targets: int, length: int, stride: int) -> Iterator[Window]:
    """Yield windows of `length` inputs that advance by `stride`, each scoring only the targets no earlier one scored.

    Past the first window every target sees at least `length - stride` tokens of context (full windows; the last
    window, too, begins at a multiple of the stride). For 10 targets, length 4 and stride 2:
    (0, 4, 4) (2, 6, 2) (4, 8, 2) (6, 10, 2).
    """
    begin = done = 0
    while done < n_targets:
        end = min(begin + length, n_targets)
        yield Window(begin, end, end - done)
        begin, done = begin + stride, end


def check_protocol(protocol: str, stride: int | None, lengths: list[int]) -> None:
    """Refuse a protocol and stride that do not define windows for all of these lengths.

    Raises:
        UnknownNameError: no such protocol.
        ConfigError: a stride that is missing, useless or longer than the shortest length.
    """
    if protocol not in PROTOCOLS:
        raise UnknownNameError(f"No protocol {protocol!r}: {did_you_mean(protocol, PROTOCOLS)}")
    if protocol == NONOVERLAPPING:
        if stride is not None:
            raise ConfigError(f"stride={stride} means nothing for {NONOVERLAPPING!r}; use protocol={SLIDING!r}.")
        return
    if stride is None:
        raise ConfigError(f"protocol={SLIDING!r} needs stride=, from 1 (slowest, most context) to the length.")
    if isinstance(stride, bool) or not isinstance(stride, int) or not 1 <= stride <= min(lengths):
        raise ConfigError(
            f"stride={stride!r} must be an integer from 1 to the shortest length, {min(lengths)}: "
            "a longer stride would leave targets unscored."
        )


def windows(protocol: str, n_targets: int, length: int, stride: int | None) -> Iterator[Window]:
    """Yield the windows of a checked protocol (`check_protocol`) for one sequence."""
    return sliding(n_targets, length, length if stride is None else stride)
