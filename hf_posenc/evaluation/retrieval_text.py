"""Text in exactly so many tokens: pieces that are tokenised apart and joined, so that a key is the same ids anywhere.

A piece is tokenised as what it is in running text, the continuation of a sentence, and only then joined to the others.
So the length of a prompt can be set to the token, and no digit of a key merges with what stands before it.
"""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOISE = (
    " The grass is green.",
    " The sky is blue.",
    " The sun is yellow.",
    " Here we go.",
    " There and back again.",
)
"""What hides a pass key where no other text is given (Mohtashami and Jaggi 2023, section 4.2)."""
_BEFORE = "."  # what a piece is tokenised after
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_TRIES = 1000


class Pieces:
    """Turns pieces of text into token ids, for one tokenizer.

    Attributes:
        start: the ids that the tokenizer puts in front of every text (BOS, or nothing).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._known: dict[str, list[int]] = {}
        self._before = self._plain(_BEFORE)
        framed = list(tokenizer(_BEFORE, verbose=False)["input_ids"])
        plain = next((at for at in range(len(framed)) if framed[at:][: len(self._before)] == self._before), 0)
        self.start: list[int] = framed[:plain]

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text that begins with a space, as they are after another sentence."""
        if text not in self._known:
            whole = self._plain(_BEFORE + text)
            joined = whole[: len(self._before)] != self._before  # the full stop and what follows are one token
            self._known[text] = self._plain(text) if joined else whole[len(self._before) :]
        return self._known[text]

    def written(self, text: str) -> list[int]:
        """Return the ids of an answer.

        Raises:
            ConfigError: the tokenizer has no tokens for it, so that no model could write it.
        """
        ids = self.ids(text)
        if _letters(back := self._tokenizer.decode(ids)) != _letters(text):
            raise ConfigError(
                f"The tokenizer has no tokens for {text.strip()!r} (it makes {back.strip()!r} of it), so that no "
                "answer can be asked for. Digits and English words are needed."
            )
        return ids

    def alike(self, draw: Callable[[], str], count: int) -> list[str]:
        """Return `count` different answers that all take the same number of tokens.

        Raises:
            ConfigError: too few such answers are drawn, or the tokenizer cannot write them.
        """
        by_size: dict[int, dict[str, None]] = {}
        for _ in range(_TRIES):
            text = draw()
            alike = by_size.setdefault(len(self.written(text)), {})
            alike[text] = None
            if len(alike) == count:
                return list(alike)
        raise ConfigError(
            f"Of {_TRIES} answers such as {text.strip()!r}, no {count} take as many tokens as each other."
        )

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _letters(text: str) -> str:
    return "".join(text.split())


class Hay:
    """A supply of sentences as token ids, in the order of the text, from the top again at its end."""

    def __init__(self, pieces: Pieces, sentences: Iterable[str], *, most: int) -> None:
        """Tokenise sentences until there are `most` tokens of them.

        Raises:
            DataError: there is no sentence.
        """
        self._sentences: list[list[int]] = []
        total = 0
        for sentence in sentences:
            ids = pieces.ids(sentence)
            if ids:
                self._sentences.append(ids)
            total += len(ids)
            if total >= most:
                break
        if not self._sentences:
            raise DataError("The haystack holds no sentence. Give texts, or none to hide answers in a simple filler.")

    def take(self, count: int, start: random.Random) -> list[list[int]]:
        """Return sentences of `count` tokens together, from a sentence drawn with `start` on; the first may be cut."""
        first = start.randrange(len(self._sentences))
        taken: list[list[int]] = []
        total = 0
        for index in itertools.count(first):
            if total >= count:
                break
            taken.append(self._sentences[index % len(self._sentences)])
            total += len(taken[-1])
        # Cut at the front, so that the last sentence ends as one does.
        while total > count:
            cut = min(total - count, len(taken[0]))
            taken[0] = taken[0][cut:]
            total -= cut
            if not taken[0]:
                taken.pop(0)
        return taken


def sentences_of(texts: Sequence[str]) -> Iterable[str]:
    """Yield the sentences of texts, white space made plain, each beginning with a space."""
    for text in texts:
        for sentence in _SENTENCE.split(text.strip()):
            if sentence.strip():
                yield " " + " ".join(sentence.split())


def insert(sentences: list[list[int]], needles: Sequence[tuple[float, list[int]]]) -> tuple[list[int], int]:
    """Put needles between sentences, each at the joint nearest to its depth: 0 before all, 1 after all.

    Needles at the same joint keep their order.

    Returns:
        The ids of it all, and at which of them the first needle of the list begins (0 where there is none).
    """
    joints = [0, *itertools.accumulate(len(sentence) for sentence in sentences)]
    at: dict[int, list[int]] = {}
    for index, (depth, _) in enumerate(needles):
        target = depth * joints[-1]
        above = bisect.bisect_left(joints, target)
        nearest = above - 1 if above and target - joints[above - 1] <= joints[above] - target else above
        at.setdefault(nearest, []).append(index)
    ids: list[int] = []
    place = 0
    for joint in range(len(joints)):
        for index in at.get(joint, ()):
            place = len(ids) if index == 0 else place
            ids += needles[index][1]
        ids += sentences[joint] if joint < len(sentences) else []
    return ids, place
