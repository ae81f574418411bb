"""How a long sequence is cut into windows, as pure functions on lengths.

A sequence of `n + 1` tokens has `n` targets: input `i` predicts token `i + 1`. Windows count *inputs*, so a window of
length L uses exactly the positions 0 .. L-1 and has up to L targets, the last of which lies one token past its inputs.
Therefore `sliding`, `nonoverlapping` and `rolling` score every target exactly once for every length and stride, also
across the borders of windows, and the token count is the same for all of them. The first token of a sequence is never a
target; a BOS token prepended to a document makes its first token one.

`hf_docs` and `longlora` count *tokens*, as their origins do: a window of length L has L - 1 inputs that predict
something. `evaluation.protocols` says which protocol uses which cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Window(NamedTuple):
    """Inputs `begin .. end-1` go through the model; the targets of the last `scored` of them count.

    `weight` is what the window's mean loss counts in the mean that the origin of the cut reports: `scored` where every
    token weighs the same.
    """

    begin: int
    end: int
    scored: int
    weight: int


def nonoverlapping(n_targets: int, length: int, stride: int = 0) -> Iterator[Window]:
    """Yield disjoint windows of `length` inputs, each without any context from before it; `stride` is not read.

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
        yield Window(begin, end, end - done, end - done)
        begin, done = begin + stride, end


def rolling(n_targets: int, length: int, stride: int = 0) -> Iterator[Window]:
    """Yield disjoint windows, the last one moved back so that it has its full length; `stride` is not read.

    lm-evaluation-harness, `get_rolling_token_windows` with one token of context. For 10 targets and length 4:
    (0, 4, 4) (4, 8, 4) (6, 10, 2).
    """
    for done in range(0, n_targets, length):
        end = min(done + length, n_targets)
        yield Window(max(0, end - length), end, end - done, end - done)


def hf_docs(n_targets: int, length: int, stride: int) -> Iterator[Window]:
    """Yield the windows of transformers' guide "Perplexity of fixed-length models", `length` counting tokens.

    The guide counts a window's targets as the tokens no earlier window held, takes the mean loss over those that
    something in the window predicts, and weighs it by one less than the count. So every window after the first weighs
    one token too little, and without overlap the first token of each window is never scored.
    """
    n_tokens = n_targets + 1
    begin = done = 0
    while done < n_tokens:
        end = min(begin + length, n_tokens)
        fresh = end - done
        scored = min(fresh, end - begin - 1)
        if scored:
            yield Window(begin, end - 1, scored, fresh - 1)
        begin, done = begin + stride, end


def window_means(n_targets: int, length: int, stride: int) -> Iterator[Window]:
    """Yield the windows of `sliding` whose means all weigh the same (YaRN, `eval/perplexity.py`).

    The first window has `length` targets and later ones `stride`, yet each counts once: the mean leans towards the
    tail of documents, the more so the longer the window. `length` counts the tokens of a window, BOS included, the last
    of which predicts nothing.
    """
    for window in sliding(n_targets, length - 1, stride):
        yield window._replace(weight=1)


def longlora(n_targets: int, length: int, stride: int) -> Iterator[Window]:
    """Yield overlapping windows of `length` tokens that score all they can (LongLoRA, `eval.py`).

    A target is scored once in every window that holds it, and most of them see it early, with little context. The last
    window that fits is left out, and so is what follows it.
    """
    for begin in range(0, n_targets + 1 - length, stride)[:-1]:
        yield Window(begin, begin + length - 1, length - 1, length - 1)


def fixed_target(n_targets: int, length: int, stride: int) -> Iterator[Window]:
    """Yield one window: the last `length` inputs of the sequence, scoring the last `stride` targets.

    The targets are the same for every length; only the context before them grows (Kazemnejad et al. 2023, appendix F).
    """
    begin = max(0, n_targets - length)
    scored = min(stride, n_targets - begin)
    yield Window(begin, n_targets, scored, scored)
