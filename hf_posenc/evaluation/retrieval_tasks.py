"""Retrieval tasks by name: what is hidden in a text, what is asked at its end, and what is right and wrong.

The tasks of RULER (Hsieh et al. 2024) that models of a billion parameters and less can do at all, sized for texts from
256 tokens up; the pass key (Mohtashami and Jaggi 2023); and the first sentence (Xiong et al. 2023, section 4.1). All
prompts end where a base model has nothing to do but to go on: none follows instructions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from hf_posenc.errors import UnknownNameError, did_you_mean
from hf_posenc.evaluation.retrieval_text import Pieces

OTHERS = 3
"""Wrong answers that are held against the right one: by chance it is the most probable in one of four trials."""
_NEEDLES = 4  # in tasks with several, as in RULER
_HOPS = 4
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_COMMON = 5  # words to be found among the others
_RATIO = 10  # how much more often they occur, as in RULER
_NOUNS = """
apple arm bag ball bank bell bird boat body book bottle box boy bread bridge brother bus cake camp car cat chair city
clock cloud coat corn cow cup day desk dog door dress ear egg engine eye face farm field finger fire fish floor flower
foot forest friend game garden gate girl glass gold hand hat head heart hill horse hotel hour house ice island king
kitchen knife lake lamp leaf leg letter lion map market milk mind moon morning mountain mouth music name neck night
nose ocean office oil paper park party pen picture pig plane plant queen rain ring river road rock roof room rose salt
sand school sea ship shirt shoe shop silver sister snow song star stone street sugar summer table tail tea teacher
tiger town train tree uncle village wall water week wheel wind window winter wood yard year
"""
_WORDS = _NOUNS.split()


@dataclass(frozen=True, kw_only=True)
class Question:
    """One trial of a task, in words. All pieces begin with a space.

    Attributes:
        intro: what stands before the text.
        needles: (depth, sentence) pairs to hide in the text, depth 0 to 1; the first one holds what is asked for.
        ask: what stands behind the text, to be continued with `reply`.
        reply: the right answer.
        parts: the pieces of it that count, each once, wherever they stand in what the model writes.
        others: wrong answers of as many tokens as `reply`; empty where the answer has several parts.
        hay: sentences to hide the needles in, where the task has its own.
    """

    intro: str
    needles: tuple[tuple[float, str], ...]
    ask: str
    reply: str
    parts: tuple[str, ...]
    others: tuple[str, ...] = ()
    hay: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Deal:
    """What a trial is made from.

    Attributes:
        chance: the trial's own random numbers.
        pieces: the tokenizer.
        depth: where what is asked for is to stand, 0 to 1.
        digits: digits of each number.
        room: tokens of the whole prompt.
    """

    chance: random.Random
    pieces: Pieces
    depth: float
    digits: int
    room: int

    def numbers(self, count: int) -> list[str]:
        """Return different numbers of `digits` digits, each after a space, all of as many tokens."""
        return self.pieces.alike(lambda: f" {self.chance.randrange(10 ** (self.digits - 1), 10**self.digits)}", count)

    def words(self, count: int) -> list[str]:
        """Return different words, each after a space."""
        return [f" {word}" for word in self.chance.sample(_WORDS, count)]

    def depths(self, count: int) -> list[float]:
        """Return random depths, ascending."""
        return sorted(self.chance.random() for _ in range(count))


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kind of question.

    Attributes:
        name: what it is called.
        says: what it does, in words for tables.
        deal: makes a trial.
        placed: whether what is asked for stands at one place, so that its depth means something.
    """

    name: str
    says: str
    deal: Callable[[Deal], Question]
    placed: bool = True


_HIDDEN = " The following text hides what will be asked for at its end. Remember it."


def _passkey(deal: Deal) -> Question:
    key, *others = deal.numbers(1 + OTHERS)
    needle = f" The pass key is{key}. Remember it.{key} is the pass key."
    return Question(
        intro=_HIDDEN,
        needles=((deal.depth, needle),),
        ask=" What is the pass key? The pass key is",
        reply=key,
        parts=(key,),
        others=tuple(others),
    )


def _needle(word: str, number: str) -> str:
    return f" The special number of the{word} is{number}."


def _keys(deal: Deal, count: int) -> Question:
    """One number for each of `count` words; the first is asked for."""
    words, (number, *others) = deal.words(count), deal.numbers(1 + OTHERS)
    depths = [deal.depth, *deal.depths(count - 1)]
    needles = [_needle(*pair) for pair in zip(words, [number, *others], strict=False)]
    return Question(
        intro=_HIDDEN,
        needles=tuple(zip(depths, needles, strict=True)),
        ask=f" What is the special number of the{words[0]}? The special number of the{words[0]} is",
        reply=number,
        parts=(number,),
        others=tuple(others),
    )


def _values(deal: Deal) -> Question:
    (word,), numbers = deal.words(1), deal.numbers(_NEEDLES)
    needles = [_needle(word, number) for number in numbers]
    return Question(
        intro=_HIDDEN,
        needles=tuple(zip(deal.depths(_NEEDLES), needles, strict=True)),
        ask=f" What are all the special numbers of the{word}? The special numbers of the{word} are",
        reply=",".join(numbers),
        parts=tuple(numbers),
    )


def _variables(deal: Deal) -> Question:
    (number,) = deal.numbers(1)
    columns = [deal.chance.sample(_LETTERS, 1 + _HOPS) for _ in range(3)]
    names = [" " + "".join(letters) for letters in zip(*columns, strict=True)]
    given = [number, *(f" VAR{name}" for name in names)]
    needles = [f" VAR{name} ={value}." for name, value in zip(names, given, strict=False)]
    return Question(
        intro=" Variables are set in the following text. Keep track of them.",
        needles=tuple(zip(deal.depths(1 + _HOPS), needles, strict=True)),
        ask=f" Which variables have the value{number}, directly or through others? The variables are",
        reply=",".join(names),
        parts=tuple(names),
    )


def _common(deal: Deal) -> Question:
    """Some words occur `_RATIO` times as often as each of the others, however long the list."""
    words = deal.words(len(_WORDS))
    common, others = words[:_COMMON], words[_COMMON:]
    sizes = [len(deal.pieces.ids(f"{word},")) for word in words]
    count = deal.room * len(words) // sum(sizes)  # words in the list, roughly
    rounds = -(-count // (_COMMON * _RATIO + len(others)))
    needles = [f"{word}," for word in common for _ in range(rounds * _RATIO)]
    return Question(
        intro=f" In the following list of words, {_COMMON} occur much more often than the others.",
        needles=tuple((deal.chance.random(), needle) for needle in needles),
        ask=f" The {_COMMON} words that occur most often in the list are",
        reply=",".join(common),
        parts=tuple(common),
        hay=tuple(f"{word}," for word in others),
    )


def _first(deal: Deal) -> Question:
    def draw() -> str:
        one, other, thing, place = deal.words(4)
        return f" The{one} and the{other} waited for the{thing} behind the{place}."

    sentence, *others = deal.pieces.alike(draw, 1 + OTHERS)
    return Question(
        intro="",
        needles=((0.0, sentence),),
        ask=" What is the first sentence of this text? The first sentence is:",
        reply=sentence,
        parts=(sentence,),
        others=tuple(others),
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(name="passkey", says="one number, said twice, in text", deal=_passkey),
        Task(name="single_needle", says="the number of one word", deal=lambda deal: _keys(deal, 1)),
        Task(name="multi_key", says=f"one of the numbers of {_NEEDLES} words", deal=lambda deal: _keys(deal, _NEEDLES)),
        Task(name="multi_value", says=f"all {_NEEDLES} numbers of one word", deal=_values, placed=False),
        Task(
            name="variable_tracking",
            says=f"{1 + _HOPS} variables, each set to the one before",
            deal=_variables,
            placed=False,
        ),
        Task(
            name="common_words",
            says=f"the {_COMMON} words of a list that occur {_RATIO} times as often as the others",
            deal=_common,
            placed=False,
        ),
        Task(name="first_sentence", says="the sentence that the text begins with", deal=_first, placed=False),
    )
}


def task_named(name: str) -> Task:
    """Return the task of this name.

    Raises:
        UnknownNameError: there is none, with the closest name.
    """
    if name not in TASKS:
        raise UnknownNameError(f"No retrieval task {name!r}: {did_you_mean(name, TASKS)}")
    return TASKS[name]
