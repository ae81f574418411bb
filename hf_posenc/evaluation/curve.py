"""What an evaluation returns: sums first, every other number derived from them, and all that makes them comparable."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hf_posenc.errors import DataError

_NORMAL_95 = 1.959963984540054  # half-width of the two-sided 95 % interval, in standard errors


def versions() -> dict[str, str]:
    """Return the versions a number depends on: python, torch, transformers and this package."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "hf-posenc"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree
            found[package] = "not installed"
    return found


@dataclass(frozen=True, kw_only=True)
class LengthCurve:
    """Perplexity of one model by window length. Mappings are keyed by length and lack the lengths in `refused`.

    Attributes:
        name: the model's name.
        lengths: every length asked for, ascending.
        nll_sum: sum of negative log-likelihoods over all targets, in nats.
        n_tokens: number of targets scored.
        stderr: standard error over documents of the mean nats per token (ratio estimator), None for one document.
        window: the longest window really used: the length, or the longest document where that is shorter.
        refused: why a length has no value.
        trained_length: the length the model's config states it was trained for, None where it states none.
        protocol, stride, bos_policy: how windows were cut (`evaluation.windows`, `evaluation.documents`).
        n_documents: number of documents with at least one target.
        n_bytes: UTF-8 bytes of the original texts, None where documents came as token ids. With bos_policy "none" it
            includes the first token of each document, which nothing predicts, so bits per byte are slightly low.
        text_hash: SHA-256 over the documents, whatever their order.
        dtype: dtype of the model's weights.
        versions: see `versions`.
    """

    name: str
    lengths: tuple[int, ...]
    nll_sum: Mapping[int, float]
    n_tokens: Mapping[int, int]
    stderr: Mapping[int, float | None]
    window: Mapping[int, int]
    refused: Mapping[int, str]
    trained_length: int | None
    protocol: str
    stride: int | None
    bos_policy: str
    n_documents: int
    n_bytes: int | None
    text_hash: str
    dtype: str
    versions: Mapping[str, str]

    @property
    def nll(self) -> dict[int, float]:
        """Mean negative log-likelihood per token, in nats, every token weighing the same."""
        return {length: total / self.n_tokens[length] for length, total in self.nll_sum.items()}

    @property
    def ppl(self) -> dict[int, float]:
        """Perplexity: e to the mean nats per token."""
        return {length: _exp(nats) for length, nats in self.nll.items()}

    @property
    def ppl_interval(self) -> dict[int, tuple[float, float] | None]:
        """The 95 % interval of the perplexity over documents, None where a single document allows none."""
        intervals: dict[int, tuple[float, float] | None] = {}
        for length, nats in self.nll.items():
            error = self.stderr[length]
            spread = None if error is None else _NORMAL_95 * error
            intervals[length] = None if spread is None else (_exp(nats - spread), _exp(nats + spread))
        return intervals

    @property
    def bits_per_byte(self) -> dict[int, float] | None:
        """Bits per UTF-8 byte of the text, comparable across tokenizers; None where the texts are not known."""
        if self.n_bytes is None:
            return None
        scale = math.log(2) * self.n_bytes
        return {length: total / scale for length, total in self.nll_sum.items()}

    @property
    def reference_length(self) -> int | None:
        """The in-range length `ratio` divides by: the largest measured one within `trained_length`, else the first."""
        measured = sorted(self.nll_sum)
        within = [length for length in measured if self.trained_length is not None and length <= self.trained_length]
        return within[-1] if within else next(iter(measured), None)

    @property
    def ratio(self) -> dict[int, float]:
        """Perplexity divided by the perplexity at `reference_length`."""
        reference = self.reference_length
        if reference is None:
            return {}
        base = self.nll[reference]
        return {length: _exp(nats - base) for length, nats in self.nll.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data: the fields, and the derived numbers for whoever reads the file without this class."""
        derived = ("ppl", "ppl_interval", "bits_per_byte", "ratio")
        data = asdict(self) | {name: getattr(self, name) for name in derived}
        return {key: _json_ready(value) for key, value in data.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LengthCurve:
        """Rebuild a curve from `to_dict` or its JSON; derived numbers are computed again, not read.

        Raises:
            DataError: a field is missing.
        """
        missing = sorted(field.name for field in fields(cls) if field.name not in data)
        if missing:
            raise DataError(f"This is no length curve: {', '.join(missing)} missing. Evaluate the model again.")
        values = {field.name: data[field.name] for field in fields(cls)}
        for name in ("nll_sum", "n_tokens", "stderr", "window", "refused"):
            values[name] = {int(length): value for length, value in values[name].items()}
        return cls(**(values | {"lengths": tuple(values["lengths"])}))


def _json_ready(value: Any) -> Any:
    """Return `value` as JSON knows it: string keys, lists, null for an infinite perplexity."""
    if isinstance(value, dict):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_json_ready(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _exp(nats: float) -> float:
    """e to `nats`, infinite where a double cannot hold it (a model that is sure and always wrong)."""
    return math.exp(nats) if nats < 709.0 else math.inf
