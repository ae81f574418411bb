"""Models that find everything, or nothing, and a tokenizer whose tokens are characters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

_ROWS = 24  # the last rows of logits that a copier fills; more than any answer takes


def characters(alphabet: str | None = None) -> PreTrainedTokenizerFast:
    """One token for each ASCII character, or for those of `alphabet` and the space; others are unknown."""
    letters = ["Ġ", *(alphabet or map(chr, range(33, 127)))]  # the byte-level alphabet, where a space is written Ġ
    core = Tokenizer(
        models.BPE(vocab={letter: at for at, letter in enumerate([*letters, "?!"])}, merges=[], unk_token="?!")
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?!")


class Copier(nn.Module):
    """Goes on as the text did the last time that it said the same, however far back: an induction head without end."""

    def __init__(self, vocabulary: int, *, rows: int = _ROWS) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, rows

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        """Logits (b, n, vocabulary), all but the last rows zero."""
        logits = torch.zeros(*input_ids.shape, self.vocabulary)
        for row, ids in enumerate(input_ids.tolist()):
            for at in range(max(0, len(ids) - self.rows), len(ids)):
                logits[row, at, self._next(ids[: at + 1])] = 9.0
        return SimpleNamespace(logits=logits)

    @staticmethod
    def _next(ids: list[int]) -> int:
        best, after = 0, ids[-1]
        for end in range(len(ids) - 1):
            size = 0
            while size <= end and ids[end - size] == ids[-1 - size]:
                size += 1
            if size > best:
                best, after = size, ids[end + 1]
        return after


class Forgetful(nn.Module):
    """Sees nothing but the last token: a table of bigrams, drawn at random."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.randn(vocabulary, vocabulary, generator=torch.manual_seed(1)))

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        """Logits (b, n, vocabulary)."""
        return SimpleNamespace(logits=self.table(input_ids))


class Knowing(nn.Module):
    """Writes the answers that it was told, one for each prompt."""

    def __init__(self, vocabulary: int, answers: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__()
        self.vocabulary, self.answers = vocabulary, answers

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        """Logits (b, n, vocabulary); those behind a prompt say its answer."""
        logits = torch.zeros(*input_ids.shape, self.vocabulary)
        for row, ids in enumerate(input_ids.tolist()):
            for prompt, answer in self.answers.items():
                if tuple(ids[: len(prompt)]) == prompt:
                    for at in range(len(prompt) - 1, len(ids)):
                        logits[row, at, answer[min(at + 1 - len(prompt), len(answer) - 1)]] = 9.0
        return SimpleNamespace(logits=logits)
