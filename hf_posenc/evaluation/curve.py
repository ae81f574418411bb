"""What an evaluation returns: sums first, every other number derived from them, and all that makes them comparable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_posenc.errors import DataError
from hf_posenc.evaluation.protocols import PROTOCOLS
from hf_posenc.evaluation.result import Result, json_ready, perplexity

_TOLERANCE = 0.01  # of the loss at the trained length, within which a longer context still counts as good
_BY_LENGTH = ("nll_sum", "n_tokens", "n_correct", "origin_nll", "stderr", "interval", "window", "stride", "refused")


@dataclass(frozen=True, kw_only=True)
class LengthCurve(Result):
    """Perplexity of one model by window length. Mappings are keyed by length and lack the lengths in `refused`.

    Attributes:
        lengths: every length asked for, ascending.
        nll_sum: sum of negative log-likelihoods over all scored targets, in nats.
        n_tokens: number of scored targets; one that a protocol scores twice counts twice.
        n_correct: how many of them the model would have chosen itself; empty where that was not asked.
        origin_nll: mean nats as the protocol's origin averages; `nll` where there every token weighs the same.
        stderr: standard error over documents of `nll` (`intervals.standard_error`), None for one document.
        interval: 95 % bootstrap interval of `nll` over documents (`intervals.bootstrap`), None for one document.
        window: the longest window really used, in positions: some protocols count a token that predicts nothing, and
            the longest document may be shorter than the length.
        stride: tokens by which windows advance (`protocols.Protocol.stride`).
        refused: why a length has no value.
        protocol, bos_policy: how windows were cut and averaged (`protocols`), and what stood before them (`documents`).
        n_documents: number of documents with at least one target.
        n_left_out: documents that were too short.
        n_bytes: UTF-8 bytes of the original texts, None where documents came as token ids. With bos_policy "none" it
            includes the first token of each document, which nothing predicts, so bits per byte are slightly low.
        text_hash: SHA-256 over the documents, whatever their order.
    """

    lengths: tuple[int, ...]
    nll_sum: Mapping[int, float]
    n_tokens: Mapping[int, int]
    n_correct: Mapping[int, int]
    origin_nll: Mapping[int, float]
    stderr: Mapping[int, float | None]
    interval: Mapping[int, tuple[float, float] | None]
    window: Mapping[int, int]
    stride: Mapping[int, int]
    refused: Mapping[int, str]
    protocol: str
    bos_policy: str
    n_documents: int
    n_left_out: int
    n_bytes: int | None
    text_hash: str

    @property
    def nll(self) -> dict[int, float]:
        """Mean negative log-likelihood per token, in nats, every token weighing the same."""
        return {length: total / self.n_tokens[length] for length, total in self.nll_sum.items()}

    @property
    def ppl(self) -> dict[int, float]:
        """Perplexity: e to the mean nats per token."""
        return {length: perplexity(nats) for length, nats in self.nll.items()}

    @property
    def origin_ppl(self) -> dict[int, float]:
        """Perplexity as the protocol's origin reports it, equal to `ppl` where there every token weighs the same."""
        return {length: perplexity(nats) for length, nats in self.origin_nll.items()}

    @property
    def accuracy(self) -> dict[int, float]:
        """Share of targets that the model would have chosen itself; empty where that was not asked."""
        return {length: correct / self.n_tokens[length] for length, correct in self.n_correct.items()}

    @property
    def ppl_interval(self) -> dict[int, tuple[float, float] | None]:
        """The 95 % bootstrap interval of the perplexity, None where a single document allows none."""
        return {
            length: None if nats is None else (perplexity(nats[0]), perplexity(nats[1]))
            for length, nats in self.interval.items()
        }

    @property
    def bits_per_byte(self) -> dict[int, float] | None:
        """Bits per UTF-8 byte of the text, comparable across tokenizers.

        None where the texts are not known, or where the protocol does not score every target exactly once.
        """
        known = PROTOCOLS.get(self.protocol)
        if self.n_bytes is None or known is None or not known.once:
            return None
        scale = math.log(2) * self.n_bytes
        return {length: total / scale for length, total in self.nll_sum.items()}

    @property
    def in_range_length(self) -> int | None:
        """The largest measured length within `trained_length`, None where there is none or that is not known."""
        return max((length for length in self.nll_sum if length <= (self.trained_length or 0)), default=None)

    @property
    def reference_length(self) -> int | None:
        """The length `ratio` divides by: `in_range_length`, or the shortest measured one where there is none."""
        return self.in_range_length or min(self.nll_sum, default=None)

    @property
    def ratio(self) -> dict[int, float]:
        """Perplexity divided by the perplexity at `reference_length`."""
        reference = self.reference_length
        if reference is None:
            return {}
        base = self.nll[reference]
        return {length: perplexity(nats - base) for length, nats in self.nll.items()}

    @property
    def gain(self) -> dict[int, float]:
        """What context brings: nats per token saved at each length against the shortest one, negative for a loss."""
        nll = self.nll
        return {length: nll[min(nll)] - nats for length, nats in nll.items()}

    @property
    def effective_length(self) -> int | None:
        """The length up to which context does no harm: the last one before the loss first rises over its tolerance.

        From `in_range_length` on, every length up to it has at most 1.01 times the loss there. Measured with protocol
        "fixed_target", where all lengths score the same targets, this is the effective context length; None where no
        length was measured that the model is known to be trained for.
        """
        nll, reference = self.nll, self.in_range_length
        if reference is None:
            return None
        found = reference
        for length in sorted(length for length in nll if length > reference):
            if nll[length] > (1 + _TOLERANCE) * nll[reference]:
                break
            found = length
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data: the fields, and the derived numbers for whoever reads the file without this class."""
        derived = (
            "ppl",
            "ppl_interval",
            "origin_ppl",
            "accuracy",
            "bits_per_byte",
            "ratio",
            "gain",
            "effective_length",
        )
        data = asdict(self) | {name: getattr(self, name) for name in derived}
        ready: dict[str, Any] = json_ready(data)
        return ready

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LengthCurve:
        """Rebuild a curve from `to_dict` or its JSON; derived numbers are computed again, not read.

        Raises:
            DataError: a field is missing, or a sum or a count is no number that could be measured.
        """
        values = cls._fields_of(data, called="length curve")
        for name in _BY_LENGTH:
            values[name] = {int(length): _from_json(value) for length, value in values[name].items()}
        for length, total in values["nll_sum"].items():
            count = values["n_tokens"].get(length)
            if not (isinstance(total, (int, float)) and math.isfinite(total) and isinstance(count, int) and count > 0):
                raise DataError(
                    f"The curve of {values['name']} has {total} nats for {count} tokens at {length}: damaged."
                )
        return cls(**(values | {"lengths": tuple(values["lengths"])}))


def _from_json(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
