"""A start from what the original does: the encoding's own parameters are fitted to the scores that the model lost.

Both models read the same rows. What the scores of the original have and those of the converted model have not, averaged
over the rows, is what its positions did; by least squares, the bias of the new encoding is made to do the same. T5's
table becomes the mean of every bucket, a slope the best line, KERPLE and FIRE the closest curves of their kind. The fit
is of what softmax sees: scores less the mean of their row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.config import Encoding, Layers
from hf_posenc.encodings.alibi import AlibiEncoding
from hf_posenc.encodings.fire import FIREEncoding
from hf_posenc.evaluation.attention_record import Distances, attention_of, centred_scores, reporting_attention
from hf_posenc.evaluation.scoring import evaluation_mode
from hf_posenc.positions import Geometry, Positions

ROUNDS = 2
"""What a layer hears of positions changes when the layers below it get theirs, so the fit is made more than once."""
HEAD_ROWS = 8
"""Rows on which the attention of heads is compared."""
_EVALUATIONS = 200
_LEAST = 1e-300


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How well the new encoding can say what the positions of the original did, for every layer and head.

    Attributes:
        lost: mean square of the scores that were lost, averaged over the rows, in squared score units (nats).
        toeplitz_r2: share of it that distance alone explains: what the best bias of the distance could give back.
        explained: share of it that the fitted bias gives back.
        divergence: of the attention from that of the original (`attention_divergence`), `before` the fit and `after`.
    """

    lost: list[list[float]]
    toeplitz_r2: list[list[float]]
    explained: list[list[float]]
    divergence: dict[str, list[list[float]]]


def can_calibrate(encoding: Encoding) -> bool:
    """Tell whether an encoding, or that of any layer, has parameters in a bias that looks at positions alone.

    One that hides keys from some heads (`Alibi(sides="split")`) is none to fit: what was lost there cannot come back.
    """
    if isinstance(encoding, Layers):
        return any(can_calibrate(encoding.of(layer)) for layer in range(len(encoding.layers)))
    if isinstance(encoding, AlibiEncoding) and encoding.split:
        return False
    alone = encoding.overrides("distance_bias") or isinstance(encoding, FIREEncoding)
    return alone and next(encoding.parameters(), None) is not None


def calibrate(
    model: PreTrainedModel, original: PreTrainedModel, rows: Tensor, geometry: Geometry, *, batch_size: int = 8
) -> Calibration:
    """Fit the parameters of the encoding of a patched model, in place.

    Args:
        model: patched, with an encoding for which `can_calibrate` is true.
        original: the same model before the patch.
        rows: (N, n) token ids.
        geometry: of the model.
        batch_size: rows in one forward pass, which holds (layers, batch_size, heads, n, n) probabilities of each model.

    Raises:
        UnsupportedFamilyError: the model reports no attention probabilities.
    """
    encoding = next(m for path, m in model.named_modules() if path.rpartition(".")[2] == "posenc")
    size = rows.shape[1]
    visible = torch.ones(size, size, dtype=torch.bool, device=model.device)
    visible = visible.tril() if geometry.causal else visible
    before = attention_divergence(model, original, rows[:HEAD_ROWS])
    with evaluation_mode(model), evaluation_mode(original):
        goal = mean_scores(original, rows, visible, batch_size)
        for _ in range(ROUNDS):
            now = mean_scores(model, rows, visible, batch_size)
            own = [_centred_bias(module, geometry, visible) for module in _served(encoding, len(goal))]
            targets = [wanted - found + bias for wanted, found, bias in zip(goal, now, own, strict=True)]
            for module, layers in _modules(encoding, len(targets)):
                fit(module, torch.stack([targets[layer] for layer in layers]).mean(0), geometry, visible)
        fitted = [_centred_bias(module, geometry, visible) for module in _served(encoding, len(goal))]
    lost = [target.square().mean((1, 2)) for target in targets]
    left = [(target - bias).square().mean((1, 2)) for target, bias in zip(targets, fitted, strict=True)]
    distances, pairs = Distances(visible), visible.numel()
    best = [(distances.fit(target) * distances.sums(target)).sum(-1) / pairs for target in targets]
    return Calibration(
        lost=[whole.tolist() for whole in lost],
        toeplitz_r2=[(part / whole.clamp(min=_LEAST)).tolist() for part, whole in zip(best, lost, strict=True)],
        explained=[(1 - rest / whole.clamp(min=_LEAST)).tolist() for rest, whole in zip(left, lost, strict=True)],
        divergence={"before": before, "after": attention_divergence(model, original, rows[:HEAD_ROWS])},
    )


def attention_divergence(model: PreTrainedModel, original: PreTrainedModel, rows: Tensor) -> list[list[float]]:
    """Return for every layer and head how far attention is from the original's: mean KL divergence in nats a query.

    Args:
        model, original: two models of the same layers and heads.
        rows: (b, n) token ids, read in one forward pass.

    Raises:
        UnsupportedFamilyError: a model reports no attention probabilities.
    """
    reported = []
    for each in (original, model):
        with evaluation_mode(each), reporting_attention(each):
            reported.append(attention_of(each, rows.to(each.device)))
    found = []
    for wanted, given in zip(*reported, strict=True):
        least = torch.finfo(given.dtype).smallest_normal
        ratio = wanted.clamp(min=least).log() - given.clamp(min=least).log()
        found.append((wanted * ratio).sum(-1).mean((0, 2)).tolist())
    return found


def mean_scores(model: PreTrainedModel, rows: Tensor, visible: Tensor, batch_size: int) -> list[Tensor]:
    """Return for every layer the mean over rows of the scores less the mean of their row, (h, n, n) float64."""
    sums: list[Tensor] = []
    with reporting_attention(model):
        for batch in rows.to(model.device).split(batch_size):
            scores = [centred_scores(layer, visible).sum(0) for layer in attention_of(model, batch)]
            sums = [total + new for total, new in zip(sums, scores, strict=True)] if sums else scores
    return [total / len(rows) for total in sums]


def fit(encoding: Encoding, target: Tensor, geometry: Geometry, visible: Tensor) -> None:
    """Bring the bias of one encoding as close as it gets, in least squares, to centred scores (h, n, n) float64."""
    twin = copy.deepcopy(encoding).double()  # least squares in the precision of the target
    parameters = list(twin.parameters())
    search = torch.optim.LBFGS(parameters, max_iter=_EVALUATIONS, history_size=20, line_search_fn="strong_wolfe")
    by_distance = encoding.overrides("distance_bias")
    missed = _missed_by_distance(twin, target, visible) if by_distance else _missed(twin, target, geometry, visible)

    def closure() -> Tensor:
        search.zero_grad()
        loss = missed() / len(target)
        loss.backward()
        return loss

    with torch.enable_grad():
        search.step(closure)
    with torch.no_grad():
        for own, found in zip(encoding.parameters(), parameters, strict=True):
            own.copy_(found)
        if isinstance(encoding, AlibiEncoding):
            torch.as_tensor(encoding.slopes).clamp_(min=0)  # one that grows with the distance has no end


def _missed(encoding: Encoding, target: Tensor, geometry: Geometry, visible: Tensor) -> Callable[[], Tensor]:
    """Return what computes the squared error of a bias, summed over pairs and averaged over heads."""
    return lambda: (_centred_bias(encoding, geometry, visible) - target).square().sum((1, 2)).mean()


def _missed_by_distance(encoding: Encoding, target: Tensor, visible: Tensor) -> Callable[[], Tensor]:
    """Return the same for a bias that knows the distance alone, by its numbers for n distances in place of n x n."""
    distances = Distances(visible)
    sums, whole = distances.sums(target), target.square().sum((1, 2))

    def missed() -> Tensor:
        bias = encoding.distance_bias(distances.values.double())
        if bias is None:
            return whole.mean()
        return ((bias @ distances.gram * bias).sum(-1) - 2 * (bias * sums).sum(-1) + whole).mean()

    return missed


def _centred_bias(encoding: Encoding, geometry: Geometry, visible: Tensor) -> Tensor:
    """Return the bias of one encoding over the visible pairs, less the mean of its row, (h, n, n) float64."""
    places = torch.arange(len(visible), device=visible.device)[None]
    heads, dim = geometry.num_attention_heads, geometry.head_dim
    nothing = torch.zeros(1, heads, len(visible), dim, dtype=torch.float64, device=visible.device)
    bias = encoding.bias(nothing, nothing, Positions(query=places, key=places))
    if bias is None:
        return nothing.new_zeros(heads, *visible.shape)
    bias = bias[0].expand(heads, *visible.shape).double() * visible
    return (bias - bias.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)) * visible


def _served(encoding: Encoding, layers: int) -> list[Encoding]:
    """Return the encoding of every layer; layers in a row may share attention, and so an encoding (ALBERT)."""
    if not isinstance(encoding, Layers):
        return [encoding] * layers
    return [encoding.of(layer * len(encoding.layers) // layers) for layer in range(layers)]


def _modules(encoding: Encoding, layers: int) -> list[tuple[Encoding, list[int]]]:
    """Return every module that can be fitted, with the layers that it serves."""
    served = _served(encoding, layers)
    return [
        (module, [layer for layer in range(layers) if served[layer] is module])
        for module in dict.fromkeys(served)
        if can_calibrate(module)
    ]
