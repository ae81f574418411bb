"""Attention scores of any model, read back from the attention probabilities that it reports.

Softmax drops what all scores of a row share, so the logarithm of a probability is the score up to a constant of its
row, and a score less the mean of its row is exactly what softmax works with. Nothing has to be known of a family: not
the names of its projections, not its rotation, not where it adds a bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import ConfigError, UnsupportedFamilyError

_LEAST = 1e-300
LEAST_SHARE = 0.01
"""Share of the variance that positions must explain before it is said how much of that is distance."""


@dataclass(frozen=True, kw_only=True)
class LayerEffect:
    """What positions do to the scores of one layer, head by head.

    All variances are of scores less the mean of their row, over all pairs of a query and another token it sees.

    Attributes:
        variance: (h,) float64, over pairs and sequences, in squared score units (nats).
        position: (h,) float64, the part of it that the pair of positions explains, whatever the tokens.
        distance: (h,) float64, the part of it that the distance alone explains.
        distances: (m,) int64, query minus key position, ascending.
        profile: (h, m) float64, the function of the distance that explains most; its mean is zero.
    """

    variance: Tensor
    position: Tensor
    distance: Tensor
    distances: Tensor
    profile: Tensor

    @property
    def position_share(self) -> list[float]:
        """Share of the variance that positions explain, for every head: 0 (words decide) to 1 (places decide)."""
        return _shares(self.position, self.variance)

    @property
    def toeplitz_r2(self) -> list[float | None]:
        """Share of the position-dependent variance that distance alone explains, for every head.

        None where positions explain less than `LEAST_SHARE` of the variance, so that nothing is there to divide.
        """
        found = zip(self.position_share, _shares(self.distance, self.position), strict=True)
        return [ratio if share >= LEAST_SHARE else None for share, ratio in found]


def _shares(part: Tensor, whole: Tensor) -> list[float]:
    shares: list[float] = (part / whole.clamp(min=_LEAST)).clamp(0, 1).tolist()
    return shares


@contextmanager
def reporting_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, attention runs on the backend that reports its probabilities; the model's own comes back."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def check_precision(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model in half precision, whose probabilities say too little of its scores."""
    if model.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"the model is in {str(model.dtype).removeprefix('torch.')}, in which probabilities are too coarse to read "
            "scores from; load it with dtype=torch.float32."
        )


def position_effects(model: PreTrainedModel, rows: Tensor, *, batch_size: int = 8) -> list[LayerEffect]:
    """Measure, for every layer, how much of its scores is explained by positions, and by distance alone.

    The rows must hold tokens in random order: then nothing but positions can make the scores of one pair of places
    differ from those of another on average, and what remains is not grammar. Even and odd rows are averaged apart and
    the averages multiplied, so that chance, which the two do not share, counts for nothing.

    Args:
        model: in eval mode, without gradients, within `reporting_attention`. Of an encoder-decoder, the encoder.
        rows: (N, n) token ids, N >= 2 even, n >= 3.
        batch_size: rows in one forward pass; a pass holds (layers, batch_size, heads, n, n) probabilities.

    Raises:
        UnsupportedFamilyError: the model reports no attention probabilities.
    """
    totals: list[_Totals] = []
    for batch in rows.to(model.device).split(batch_size + batch_size % 2):
        reported = attention_of(model, batch)
        totals = totals or [_Totals(layer) for layer in reported]
        for total, layer in zip(totals, reported, strict=True):
            total.add(layer)
    return [total.effect() for total in totals]


def attention_of(model: PreTrainedModel, rows: Tensor) -> tuple[Tensor, ...]:
    """Return the attention probabilities of every layer, (b, h, n, n); of an encoder-decoder, those of its encoder."""
    body = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    output = body(input_ids=rows, output_attentions=True)
    reported = getattr(output, "attentions", None)
    if not reported or any(layer is None for layer in reported):
        raise UnsupportedFamilyError(f"{type(model).__name__} reports no attention probabilities to read scores from.")
    return tuple(reported)


def centred_scores(probabilities: Tensor, visible: Tensor) -> Tensor:
    """Return scores less the mean of their row over `visible` keys, zero elsewhere: (..., n, n) -> the same, float64.

    Probabilities too small for the model's dtype count as the smallest one it has.
    """
    least = torch.finfo(probabilities.dtype).smallest_normal
    scores = probabilities.clamp(min=least).log().double() * visible
    counts = visible.sum(-1, keepdim=True).clamp(min=1)
    return (scores - scores.sum(-1, keepdim=True) / counts) * visible


class _Totals:
    """Sums over the sequences of one layer: even rows and odd rows apart."""

    def __init__(self, first: Tensor) -> None:
        size = first.shape[-1]
        seen = (first > 0).any(0).any(0)
        # What a token thinks of itself is content: query and key come from the same word wherever it stands.
        self.visible = seen & ~torch.eye(size, dtype=torch.bool, device=first.device)
        self.halves = torch.zeros(2, *first.shape[1:], dtype=torch.float64, device=first.device)
        self.squares = torch.zeros(first.shape[1], dtype=torch.float64, device=first.device)
        self.rows = 0

    def add(self, probabilities: Tensor) -> None:
        """Take in the probabilities of an even number of sequences, (b, h, n, n)."""
        scores = centred_scores(probabilities, self.visible)
        self.halves += torch.stack([scores[0::2].sum(0), scores[1::2].sum(0)])
        self.squares += scores.square().sum((0, 2, 3))
        self.rows += len(scores)

    def effect(self) -> LayerEffect:
        """Return what the sums say."""
        pairs = int(self.visible.sum())
        even, odd = self.halves / (self.rows / 2)  # (h, n, n) each
        distances = Distances(self.visible)
        profile = distances.fit((even + odd) / 2)
        explained = (distances.fit(even) * distances.sums(odd)).sum(-1)
        return LayerEffect(
            variance=(self.squares / (pairs * self.rows)).cpu(),
            position=((even * odd).sum((1, 2)) / pairs).cpu(),
            distance=(explained / pairs).cpu(),
            distances=distances.values.cpu(),
            profile=(profile - profile.mean(-1, keepdim=True)).cpu(),
        )


class Distances:
    """Least squares of centred scores on the distance, every row with a constant of its own, as softmax has it.

    With D the indicators of distances over the visible pairs and D' the same less the mean of their row, the best
    profile is (D'^T D')^+ D^T s, and the sum of squares it explains is s^T D (D'^T D')^+ D^T s.

    Args:
        visible: (n, n) bool, the pairs that count.

    Attributes:
        values: (m,) int64, query minus key position, ascending.
        gram: (m, m) float64, D'^T D'.
    """

    def __init__(self, visible: Tensor) -> None:
        size = len(visible)
        places = torch.arange(size, device=visible.device)
        columns = places[:, None] - places + size - 1  # (n, n), 0 .. 2n - 2
        met = torch.zeros(size, 2 * size - 1, dtype=torch.float64, device=visible.device)
        met.scatter_(1, columns, visible.double())  # (n, 2n - 1): the distances that a row sees
        self._columns, self._kept = columns.flatten(), met.any(0)
        self.values = (torch.arange(2 * size - 1, device=visible.device) - size + 1)[self._kept]
        met = met[:, self._kept]
        self.gram = torch.diag(met.sum(0)) - met.T @ (met / met.sum(1, keepdim=True).clamp(min=1))
        self._inverse = torch.linalg.pinv(self.gram, hermitian=True)  # (m, m)

    def sums(self, scores: Tensor) -> Tensor:
        """Return sums over the pairs at each distance: (h, n, n) -> (h, m)."""
        into = scores.new_zeros(len(scores), len(self._kept))
        return into.index_add_(1, self._columns, scores.flatten(1))[:, self._kept]

    def fit(self, scores: Tensor) -> Tensor:
        """Return the profile that explains most of centred scores: (h, n, n) -> (h, m)."""
        profile: Tensor = self.sums(scores) @ self._inverse
        return profile
