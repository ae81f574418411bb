"""Retrieval by length and depth: whether a model finds what a text holds, which perplexity does not show."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posenc.errors import ConfigError, DataError, LengthError
from hf_posenc.evaluation.measure import NOT_FINITE
from hf_posenc.evaluation.partial import PartialScores
from hf_posenc.evaluation.reading import Reading
from hf_posenc.evaluation.retrieval_grid import RetrievalGrid, Trial
from hf_posenc.evaluation.retrieval_papers import Exam, Paper
from hf_posenc.evaluation.retrieval_tasks import OTHERS, task_named
from hf_posenc.evaluation.retrieval_text import NOISE, Hay, Pieces, sentences_of
from hf_posenc.evaluation.scoring import Scorer, evaluation_mode
from hf_posenc.evaluation.sharing import gathered, own_share, progress
from hf_posenc.evaluation.subject import (
    check_batch_size,
    check_lengths,
    facts_of,
    model_name,
    position_refusal,
    vocab_size,
)

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import PreTrainedTokenizerBase

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def retrieval_by_length(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    *,
    task: str = "passkey",
    depths: Sequence[float] = DEPTHS,
    trials: int = 10,
    digits: int = 5,
    haystack: Sequence[str] | None = None,
    seed: int = 0,
    batch_size: int = 1,
    name: str | None = None,
    processes: PartialState | None = None,
    partial: Path | str | None = None,
) -> RetrievalGrid:
    """Measure how often a causal language model, patched or not, finds what texts of each of these lengths hold.

    Prompt and answer together have exactly `length` tokens. The answer counts as found if it is what the model writes,
    taking the most probable token each time. Models with the same tokenizer get the same prompts.

    Args:
        lengths: tokens of prompt and answer; sorted, duplicates dropped.
        task: a name in `retrieval_tasks.TASKS`, such as "passkey", "multi_key", "variable_tracking".
        depths: where in the text the answer is to stand, 0 to 1; tasks without one place do not use them.
        trials, digits: prompts at each length and depth; digits of each number, whatever tokens they take.
        haystack: texts that hide the answers, in place of a simple filler.
        seed, batch_size: of keys, words and filler; prompts in one forward pass, which changes only rounding.
        name, processes, partial: as in `perplexity_by_length`.

    Raises:
        UnknownNameError, ConfigError, DataError: arguments that cannot be used, a length too short for the task, or a
            tokenizer without digits or words, before any computation.
        UnsupportedFamilyError: the model is not a causal language model.
        OutputError: `partial` cannot be written to.
    """
    check_settings(depths, trials, digits, seed)
    check_batch_size(batch_size)
    ordered, chosen = check_lengths(lengths), task_named(task)
    places = sorted(set(map(float, depths))) if chosen.placed else []
    pieces, texts = Pieces(tokenizer), NOISE if haystack is None else _sentences(haystack)
    exam = Exam(chosen, pieces, Hay(pieces, texts, most=ordered[-1]), places or [None], trials, digits, seed)
    _check_vocabulary(exam.papers(ordered[0]), model)
    facts = facts_of(model, tokenizer)
    run = {"model": facts["model_hash"] or model_name(model), "protocol": task}
    kept = PartialScores(partial, run, processes=processes)
    found, refused = _Desk(model, tokenizer, batch_size, processes, kept).sit(exam, ordered)
    return RetrievalGrid(
        name=name or model_name(model),
        task=task,
        lengths=tuple(ordered),
        depths=tuple(places),
        trials=tuple(found),
        refused=refused,
        n_others=OTHERS,
        digits=digits,
        seed=seed,
        text_hash=None if haystack is None else hashlib.sha256("".join(texts).encode()).hexdigest(),
        **facts,
    )


def check_settings(depths: Sequence[float], trials: int, digits: int, seed: int) -> None:
    """Raise `ConfigError` for a value that is none; the arguments are those of `retrieval_by_length`."""
    if not depths or any(isinstance(depth, bool) or not 0 <= depth <= 1 for depth in depths):
        raise ConfigError(f"depths must be numbers from 0 (start of the text) to 1 (its end); got {list(depths)!r}.")
    for field, value, least in (("trials", trials, 1), ("digits", digits, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{field} must be an integer of at least {least}; got {value!r}.")


def _sentences(haystack: Sequence[str]) -> tuple[str, ...]:
    if isinstance(haystack, str) or not all(isinstance(text, str) for text in haystack):
        raise DataError("haystack must be a list of texts; put a single text into a list.")
    return tuple(sentences_of(haystack))


def _check_vocabulary(papers: list[Paper], model: nn.Module) -> None:
    most, size = max(max(paper.prompt + paper.reply) for paper in papers), vocab_size(model)
    if size is not None and most >= size:
        raise DataError(
            f"The tokenizer makes token {most}, and the model knows {size}. Give the model's own tokenizer."
        )


@dataclass(frozen=True)
class _Desk:
    """Gives papers to a model, and marks what it writes."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    processes: PartialState | None
    kept: PartialScores

    def sit(self, exam: Exam, lengths: Sequence[int]) -> tuple[list[Trial], dict[int, str]]:
        """Return all trials, and why lengths have none."""
        found: list[Trial] = []
        refused: dict[int, str] = {}
        with evaluation_mode(self.model):
            for length in lengths:
                if why := position_refusal(self.model, length):
                    refused[length] = why
                    continue
                outcome = self._length(exam.papers(length))
                if isinstance(outcome, str):
                    refused[length] = outcome
                else:
                    found += outcome
        return found, refused

    def _length(self, papers: list[Paper]) -> list[Trial] | str:
        keys = [paper.key for paper in papers]
        own = own_share([paper.length for paper in papers], keys, self.processes)
        marked: list[tuple[int, Trial] | str]
        try:
            Scorer(self.model, torch.tensor(papers[0].prompt))  # refuses what is no causal language model
            marked = [*self._own(papers, keys, own)]
        except LengthError as error:
            marked = [str(error)]
        marked = gathered(marked, self.processes)
        reasons = [item for item in marked if isinstance(item, str)]
        trials = sorted((item for item in marked if not isinstance(item, str)), key=lambda item: item[0])
        return reasons[0] if reasons else [trial for _, trial in trials]

    def _own(self, papers: list[Paper], keys: list[str], own: list[int]) -> Iterator[tuple[int, Trial] | str]:
        cut = (papers[0].length,)
        with progress(len(own), f"{cut[0]:,} tokens", "prompt", self.processes) as bar:
            waiting: dict[tuple[int, int], list[int]] = {}  # what can be read in one batch
            for index in sorted(own):
                if known := self.kept.known(cut, keys[index]):
                    yield index, Trial(**(known | {"expected": papers[index].expected}))
                    bar.update()
                else:
                    waiting.setdefault((len(papers[index].prompt), len(papers[index].reply)), []).append(index)
            for indices in waiting.values():
                for first in range(0, len(indices), self.batch_size):
                    batch = indices[first : first + self.batch_size]
                    trials = self._marked([papers[index] for index in batch])
                    if not all(math.isfinite(trial.nll + (trial.margin or 0.0)) for trial in trials):
                        yield NOT_FINITE
                        return
                    rows = zip(batch, trials, strict=True)
                    self.kept.keep(cut, [(keys[index], asdict(trial)) for index, trial in rows])
                    yield from zip(batch, trials, strict=True)
                    bar.update(len(batch))

    def _marked(self, papers: list[Paper]) -> list[Trial]:
        """Return the trials of papers whose prompts and replies agree in length."""
        reading = Reading(self.model, torch.tensor([paper.prompt for paper in papers]))
        written = reading.greedy(len(papers[0].reply) + papers[0].slack).tolist()
        right = reading.nll(torch.tensor([paper.reply for paper in papers])).tolist()
        wrong = [reading.nll(torch.tensor(group)).tolist() for group in zip(*(p.others for p in papers), strict=True)]
        trials = []
        for row, (paper, answer) in enumerate(zip(papers, written, strict=True)):
            text: Any = self.tokenizer.decode(answer)
            trials.append(
                Trial(
                    length=paper.length,
                    depth=paper.depth,
                    place=paper.place,
                    expected=paper.expected,
                    answer=text,
                    found=sum(_holds(answer, part) for part in paper.parts) / len(paper.parts),
                    nll=right[row],
                    margin=min(nats[row] for nats in wrong) - right[row] if wrong else None,
                )
            )
        return trials


def _holds(ids: list[int], part: list[int]) -> bool:
    """Whether `part` stands anywhere in `ids`, in one piece."""
    return any(ids[at : at + len(part)] == part for at in range(len(ids) - len(part) + 1))
