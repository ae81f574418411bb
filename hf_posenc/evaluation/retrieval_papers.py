"""Retrieval tasks as token ids: prompts that have, with their answers, exactly the length asked for."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hf_posenc.errors import ConfigError
from hf_posenc.evaluation.retrieval_tasks import Deal, Question, Task
from hf_posenc.evaluation.retrieval_text import Hay, Pieces, insert

_SLACK = 8  # tokens that an answer of several parts may spend on anything else


@dataclass(frozen=True)
class Paper:
    """One trial in token ids: `prompt`, `reply` and `slack` tokens together have the length asked for."""

    length: int
    depth: float | None
    prompt: list[int]
    place: int
    reply: list[int]
    parts: list[list[int]]
    others: list[list[int]]
    expected: tuple[str, ...]
    slack: int

    @property
    def key(self) -> str:
        """SHA-256 of everything that its outcome depends on, apart from the model."""
        facts = (self.length, self.depth, self.prompt, self.reply, self.parts, self.others, self.slack)
        return hashlib.sha256(repr(facts).encode()).hexdigest()


@dataclass(frozen=True)
class Exam:
    """Makes the papers of a task."""

    task: Task
    pieces: Pieces
    hay: Hay
    depths: Sequence[float | None]
    trials: int
    digits: int
    seed: int

    def papers(self, length: int) -> list[Paper]:
        """Return all trials of a length, by depth."""
        return [self._paper(length, depth, index) for depth in self.depths for index in range(self.trials)]

    def _paper(self, length: int, depth: float | None, index: int) -> Paper:
        chance = random.Random(f"{self.seed} {self.task.name} {length} {depth} {index}")
        deal = Deal(chance=chance, pieces=self.pieces, depth=depth or 0.0, digits=self.digits, room=length)
        question = self.task.deal(deal)
        ids, slack = self.pieces.ids, _SLACK if len(question.parts) > 1 else 0
        front = self.pieces.start + (ids(question.intro) if question.intro else [])
        needles = [(at, ids(text)) for at, text in question.needles]
        reply, ask = self.pieces.written(question.reply), ids(question.ask)
        room = length - len(front) - sum(len(needle) for _, needle in needles) - len(ask) - len(reply) - slack
        if room < 0:
            raise ConfigError(
                f"length={length} is too short for task={self.task.name!r}, whose question and answer alone take "
                f"{length - room} tokens here. Give greater lengths."
            )
        text, place = insert(self._supply(question, room).take(room, chance), needles)
        return Paper(
            length=length,
            depth=depth,
            prompt=front + text + ask,
            place=len(front) + place,
            reply=reply,
            parts=[ids(part) for part in question.parts],
            others=[ids(other) for other in question.others],
            expected=tuple(part.strip() for part in question.parts),
            slack=slack,
        )

    def _supply(self, question: Question, room: int) -> Hay:
        return Hay(self.pieces, question.hay, most=room + 1) if question.hay else self.hay
