"""Prompts have the length asked for, to the token, and hold what is asked for where they say."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import hf_posenc
from hf_posenc.errors import ConfigError, DataError, UnknownNameError
from hf_posenc.evaluation.retrieval_papers import Exam
from hf_posenc.evaluation.retrieval_tasks import OTHERS, TASKS, task_named
from hf_posenc.evaluation.retrieval_text import NOISE, Hay, Pieces, insert, sentences_of
from tests import checkpoints
from tests.evaluation.retrievers import characters

TINY = AutoTokenizer.from_pretrained(Path(hf_posenc.__file__).parent / "assets" / "tiny-gpt2")


def exam(
    name: str, tokenizer: PreTrainedTokenizerBase, *, depths: tuple[float | None, ...] = (0.5,), seed: int = 0
) -> Exam:
    """Three trials of a task at each depth."""
    pieces = Pieces(tokenizer)
    return Exam(TASKS[name], pieces, Hay(pieces, NOISE, most=4096), depths, 3, 5, seed)


def holds(ids: list[int], part: list[int]) -> bool:
    """Whether `part` stands in `ids`."""
    return any(ids[at : at + len(part)] == part for at in range(len(ids)))


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=10)
@given(length=st.integers(1000, 2000), seed=st.integers(0, 2**31), depth=st.floats(0, 1))
def test_a_prompt_and_its_answer_have_exactly_the_length(name: str, length: int, seed: int, depth: float) -> None:
    for paper in exam(name, TINY, seed=seed, depths=(depth,)).papers(length):
        assert len(paper.prompt) + len(paper.reply) + paper.slack == length
        assert all(holds(paper.prompt, part) for part in paper.parts)
        assert all(holds(paper.reply, part) for part in paper.parts)
        assert {len(other) for other in paper.others} <= {len(paper.reply)}
        assert paper.reply not in paper.others


@pytest.mark.parametrize("name", TASKS)
def test_small_texts_are_enough_for_a_real_vocabulary(name: str) -> None:
    tokenizer = checkpoints.gpt2_tokenizer()
    for paper in exam(name, tokenizer).papers(256):
        assert len(paper.prompt) + len(paper.reply) + paper.slack == 256
        assert tokenizer.decode(paper.reply).startswith(" ")
        assert len(paper.others) == (OTHERS if paper.slack == 0 else 0)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.placed])
def test_the_answer_stands_at_its_depth(name: str, depth: float) -> None:
    tokenizer = characters()
    longest = max(len(sentence) for sentence in NOISE)
    for paper in exam(name, tokenizer, depths=(depth,)).papers(2000):
        text = tokenizer.decode(paper.prompt)
        needle = text[paper.place :].split(".")[0]
        assert needle.endswith(tokenizer.decode(paper.reply))  # a token is a character
        start = text.index("Remember it.") + len("Remember it.")
        above, filler = (
            sum(len(sentence) + 1 for sentence in part.split(".") if f"{sentence}." in NOISE)
            for part in (text[start : paper.place], text[start:])
        )
        assert abs(above - depth * filler) <= longest


def test_what_is_wrong_is_never_in_the_text_but_for_other_keys() -> None:
    for paper in exam("passkey", TINY).papers(400):
        assert not any(holds(paper.prompt, other) for other in paper.others)
        assert holds(paper.prompt[paper.place :], paper.reply)
    for paper in exam("multi_key", TINY).papers(600):
        assert all(holds(paper.prompt, other) for other in paper.others)


def test_the_most_common_words_are_the_most_common_by_far() -> None:
    tokenizer = checkpoints.gpt2_tokenizer()
    for length, paper in ((n, paper) for n in (256, 700, 3000) for paper in exam("common_words", tokenizer).papers(n)):
        words = [word.strip(" ,") for word in tokenizer.decode(paper.prompt).split(",")[1:-1]]
        counts = {word: words.count(word) for word in words}
        most = max(count for word, count in counts.items() if word not in paper.expected)
        assert all(counts[word] >= 9 * most for word in paper.expected), length  # the list's own edges take one or two


def test_trials_differ_and_the_same_seed_gives_the_same_ones() -> None:
    one, same, other = (exam("passkey", TINY, seed=seed).papers(400) for seed in (1, 1, 2))
    assert [paper.key for paper in one] == [paper.key for paper in same]
    assert len({paper.key for paper in [*one, *other]}) == 6


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 90), st.integers(0, 9))
def test_a_haystack_gives_exactly_so_many_tokens_and_ends_with_a_sentence(
    sizes: list[int], count: int, seed: int
) -> None:
    pieces = Pieces(characters())
    hay = Hay(pieces, [" " + "x" * (size - 1) + "." for size in sizes], most=10**6)
    taken = hay.take(count, random.Random(seed))
    assert sum(map(len, taken)) == count
    assert all(taken)
    stop = pieces.ids(".")[0]
    assert all(sentence[-1] == stop for sentence in taken)


@given(st.lists(st.integers(1, 5), max_size=12), st.lists(st.floats(0, 1), max_size=4))
def test_needles_stand_at_the_nearest_joint_and_nothing_is_lost(sizes: list[int], depths: list[float]) -> None:
    sentences = [[0] * size for size in sizes]
    ids, place = insert(sentences, [(depth, [1 + index]) for index, depth in enumerate(depths)])
    assert ids.count(0) == sum(sizes)
    assert sorted(filter(None, ids)) == [*range(1, 1 + len(depths))]
    joints = [0, *itertools.accumulate(sizes)]
    for index, depth in enumerate(depths):
        above = ids[: ids.index(1 + index)].count(0)
        assert above in joints
        assert abs(above - depth * joints[-1]) <= min(abs(joint - depth * joints[-1]) for joint in joints) + 1e-9
    assert not depths or ids[place] == 1


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'passkey'"):
        task_named("pass_key")
    with pytest.raises(ConfigError, match=r"length=40 is too short for task='passkey'.* take \d+ tokens here"):
        exam("passkey", TINY).papers(40)
    letters = characters("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,?:=")
    with pytest.raises(ConfigError, match="has no tokens for"):
        exam("passkey", letters).papers(400)
    with pytest.raises(DataError, match="no sentence"):
        Hay(Pieces(TINY), [], most=10)


def test_sentences_of_texts() -> None:
    assert [*sentences_of(["One.  Two\nlines! ", "", "Three"])] == [" One.", " Two lines!", " Three"]


def test_a_piece_is_what_it_is_in_running_text() -> None:
    pieces = Pieces(checkpoints.gpt2_tokenizer())
    assert pieces.start == []
    assert len(pieces.ids(" The grass is green.")) == 5
