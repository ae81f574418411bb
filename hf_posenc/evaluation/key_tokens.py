"""Perplexity of the tokens that need a long context: those that it makes likely and a short one does not.

Fang et al. 2025, "What is Wrong with Perplexity for Long-context Language Modeling?" (LongPPL, equations 5 to 7). Most
tokens of a long text can be told from the last sentence, so that plain perplexity hardly moves when a model loses the
rest. Here an evaluator names the key tokens, and the model is measured on these alone. The paper's short context of
4,096 tokens is scaled to the length here, and such a number is named a variant: it does not compare with the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hf_posenc.errors import ConfigError, DataError, LengthError
from hf_posenc.evaluation.documents import BOS_NONE, Documents
from hf_posenc.evaluation.first_windows import FirstWindows, finite
from hf_posenc.evaluation.intervals import bootstrap
from hf_posenc.evaluation.partial import PartialScores
from hf_posenc.evaluation.protocols import KEY_TOKENS
from hf_posenc.evaluation.result import Result, json_ready, perplexity
from hf_posenc.evaluation.scoring import Scorer, evaluation_mode
from hf_posenc.evaluation.subject import (
    check_batch_size,
    check_lengths,
    facts_of,
    model_hash,
    model_name,
    position_refusal,
    prepare_for,
    published_name,
    vocab_size,
)
from hf_posenc.evaluation.windows import Window, sliding

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import PreTrainedTokenizerBase

LEAST_GAIN = 2.0
"""Nats that the long context must save for a token to be a key (alpha of the paper)."""
MOST_LOSS = 2.0
"""Nats below which its loss under the long context must lie (beta of the paper, there of the log-probability)."""
_PAPER = (4096, 1024)  # short context, and tokens between the windows that give it
_SCALE = 8  # the paper's texts have 32,768 tokens


@dataclass(frozen=True, kw_only=True)
class KeyTokenPerplexity(Result):
    """Perplexity of one model on the key tokens of texts.

    Attributes:
        length: inputs in the long window, the first of each document.
        short, stride: inputs in a short window, and tokens by which short windows advance.
        evaluator: name of the model that chose the key tokens; None where the model chose its own.
        n_keys, n_tokens: key tokens, and all tokens of the windows.
        key_nll_sum, nll_sum: the model's nats over the key tokens and over all tokens, with the long context.
        interval: 95 % bootstrap interval of the mean nats of a key token, over documents; None for a single one.
        n_documents: documents long enough to fill the window.
        bos_policy, text_hash: as in `LengthCurve`.
    """

    length: int
    short: int
    stride: int
    evaluator: str | None
    n_keys: int
    n_tokens: int
    key_nll_sum: float
    nll_sum: float
    interval: tuple[float, float] | None
    n_documents: int
    bos_policy: str
    text_hash: str

    @property
    def ppl(self) -> float | None:
        """Perplexity on the key tokens, each weighing the same; None where no token is one."""
        return perplexity(self.key_nll_sum / self.n_keys) if self.n_keys else None

    @property
    def plain_ppl(self) -> float:
        """Perplexity on all tokens."""
        return perplexity(self.nll_sum / self.n_tokens)

    @property
    def variant(self) -> str:
        """What this number is: "LongPPL" as the paper has it, or by what it differs."""
        differs = [f"short context {self.short:,} by {self.stride:,}"] * ((self.short, self.stride) != _PAPER)
        differs += ["keys chosen by the model itself"] * (self.evaluator is None)
        return f"LongPPL variant: {', '.join(differs)}" if differs else "LongPPL"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data: the fields, and the derived numbers."""
        derived = {"ppl": self.ppl, "plain_ppl": self.plain_ppl, "variant": self.variant}
        ready: dict[str, Any] = json_ready(asdict(self) | derived)
        return ready

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KeyTokenPerplexity:
        """Rebuild a result from `to_dict` or its JSON; derived numbers are computed again, not read.

        Raises:
            DataError: a field is missing.
        """
        values = cls._fields_of(data, called="perplexity of key tokens")
        return cls(**(values | {"interval": None if values["interval"] is None else tuple(values["interval"])}))


def key_tokens(long: np.ndarray, short: np.ndarray) -> np.ndarray:
    """Return which tokens are keys, by their nats under a long and a short context: (n,) float64 both -> (n,) bool."""
    keys: np.ndarray = (short - long > LEAST_GAIN) & (long < MOST_LOSS)
    return keys


def key_token_perplexity(
    model: nn.Module,
    documents: Documents,
    length: int,
    *,
    evaluator: nn.Module | None = None,
    short: int | None = None,
    stride: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 1,
    bos_policy: str = BOS_NONE,
    name: str | None = None,
    processes: PartialState | None = None,
    partial: Path | str | None = None,
) -> KeyTokenPerplexity:
    """Measure the perplexity of a causal language model, patched or not, on the tokens that need the long context.

    Args:
        documents, tokenizer, batch_size, bos_policy, name, processes, partial: as in `perplexity_by_length`.
        length: inputs in the long window; a document needs `length + 1` tokens, and its first so many are taken.
        evaluator: a better model with the same tokenizer, which chooses the key tokens; the model itself otherwise.
        short: inputs in a short window, fewer than `length`; by default an eighth of it, as in the paper.
        stride: tokens by which short windows advance; by default a quarter of `short`, as in the paper.

    Raises:
        ConfigError, DataError: arguments that cannot be used, or no document that is long enough.
        LengthError: a model has no position encoding for `length` positions, or its logits are not finite there.
        UnsupportedFamilyError: a model is not a causal language model.
        OutputError: `partial` cannot be written to.
    """
    check_lengths([length])
    check_batch_size(batch_size)
    short, stride = _short_windows(length, short, stride)
    corpus = prepare_for(model, documents, tokenizer=tokenizer, bos_policy=bos_policy).filling(length)
    rows = [ids[: length + 1] for ids in corpus.documents]
    judge = model if evaluator is None else evaluator
    _check_models(rows, length, model, judge)
    facts = facts_of(model, tokenizer)
    run = {"model": facts["model_hash"] or model_name(model), "protocol": KEY_TOKENS, "bos_policy": bos_policy}
    run["evaluator"] = run["model"] if evaluator is None else model_hash(evaluator) or model_name(evaluator)
    kept = PartialScores(partial, run, processes=processes)
    with evaluation_mode(judge), evaluation_mode(model):
        judging = Scorer(judge, rows[0])
        scorer = judging if evaluator is None else Scorer(model, rows[0])
        keys = _Keys(judging, scorer, short, stride, batch_size)
        sums = keys.windows(rows, corpus.id_digests).sums(kept, processes)
    return KeyTokenPerplexity(
        name=name or model_name(model),
        length=length,
        short=short,
        stride=stride,
        evaluator=None if evaluator is None else published_name(evaluator),
        bos_policy=bos_policy,
        text_hash=corpus.digest,
        **_totals(sums, length),
        **facts,
    )


def _totals(sums: np.ndarray, length: int) -> dict[str, Any]:
    """Return the fields that come from the sums of documents, (documents, 3)."""
    counts, key_nll, nll = sums.T  # (documents,) each
    ends = bootstrap(key_nll, counts) if counts.all() else None  # a draw of documents without any key has no mean
    return {
        "n_keys": int(counts.sum()),
        "n_tokens": len(sums) * length,
        "key_nll_sum": math.fsum(key_nll),
        "nll_sum": math.fsum(nll),
        "interval": None if ends is None else (float(ends[0]), float(ends[1])),
        "n_documents": len(sums),
    }


def _short_windows(length: int, short: int | None, stride: int | None) -> tuple[int, int]:
    """Return the length and the stride of short windows: what was asked for, or the paper's shares of `length`."""
    short = max(1, length // _SCALE) if short is None else short
    stride = max(1, short // 4) if stride is None else stride
    for value, field, most in ((short, "short", length - 1), (stride, "stride", short)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(f"{field} must be an integer from 1 to {most} for length={length}; got {value!r}.")
    return short, stride


def _check_models(rows: Sequence[torch.Tensor], length: int, model: nn.Module, judge: nn.Module) -> None:
    for one in (model, judge):
        if reason := position_refusal(one, length):
            raise LengthError(f"length={length}: {reason}.")
    most, size = max(int(row.max()) for row in rows), vocab_size(judge)
    if size is not None and most >= size:
        raise DataError(f"The evaluator knows {size} tokens, and the texts hold token {most}: it needs this tokenizer.")


@dataclass(frozen=True)
class _Keys:
    """Chooses the key tokens of windows and scores them: `judge` says which they are, `scorer` measures the model."""

    judge: Scorer
    scorer: Scorer
    short: int
    stride: int
    batch_size: int

    def windows(self, rows: list[torch.Tensor], keys: list[str]) -> FirstWindows:
        """Return the windows to score, one a document."""
        cut = (len(rows[0]) - 1, self.short, self.stride)
        return FirstWindows(
            windows=rows, keys=keys, cut=cut, score=self.sums, batch_size=self.batch_size, called="key tokens"
        )

    def sums(self, windows: torch.Tensor) -> np.ndarray:
        """Return (keys, nats of the keys, nats of all tokens) of each window: (b, n + 1) ids -> (b, 3) float64."""
        length = windows.shape[1] - 1
        long = finite(self.judge.nll(windows, length))  # (b, n)
        keys = key_tokens(long, np.stack([self._short(row) for row in windows]))
        if self.scorer is not self.judge:
            long = finite(self.scorer.nll(windows, length))
        return np.stack([keys.sum(axis=1), (long * keys).sum(axis=1), long.sum(axis=1)], axis=1)

    def _short(self, row: torch.Tensor) -> np.ndarray:
        """Return the nats of all targets of a row (n + 1,), each seeing at most `short` tokens: (n,) float64."""
        found = torch.empty(len(row) - 1, dtype=torch.float64)
        by_shape: dict[tuple[int, int], list[Window]] = {}
        for window in sliding(len(found), self.short, self.stride):
            by_shape.setdefault((window.end - window.begin, window.scored), []).append(window)
        for (_, scored), windows in by_shape.items():
            for first in range(0, len(windows), self.batch_size):
                batch = windows[first : first + self.batch_size]
                nats = self.judge.nll(torch.stack([row[window.begin : window.end + 1] for window in batch]), scored)
                for window, values in zip(batch, nats, strict=True):
                    found[window.end - scored : window.end] = values
        return finite(found)
