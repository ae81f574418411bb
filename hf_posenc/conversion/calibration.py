"""A start from what the original does: the encoding's own parameters are fitted to the scores that the model lost.

Both models read the same rows. What the scores of the original have and those of the converted model have not, averaged
over the rows, is what its positions did; by least squares, the bias of the new encoding is made to do the same. T5's
table becomes the mean of every bucket, a slope the best line, KERPLE and FIRE the closest curves of their kind. The fit
is of what softmax sees: scores less the mean of their row.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.config import Encoding, Layers
from hf_posenc.encodings.alibi import AlibiEncoding
from hf_posenc.encodings.fire import FIREEncoding
from hf_posenc.evaluation.attention_record import attention_of, centred_scores, reporting_attention
from hf_posenc.evaluation.scoring import evaluation_mode
from hf_posenc.positions import Geometry, Positions

ROUNDS = 2
"""What a layer hears of positions changes when the layers below it get theirs, so the fit is made more than once."""
_EVALUATIONS = 200


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How well the new encoding can say what the positions of the original did.

    Attributes:
        lost: for every layer, (h,): mean square of the scores that were lost, in squared score units (nats).
        explained: for every layer, (h,): share of it that the fitted bias gives back.
    """

    lost: list[list[float]]
    explained: list[list[float]]


def can_calibrate(encoding: Encoding) -> bool:
    """Tell whether an encoding, or that of any layer, has parameters in a bias that looks at positions alone."""
    if isinstance(encoding, Layers):
        return any(can_calibrate(encoding.of(layer)) for layer in range(len(encoding.layers)))
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
    with evaluation_mode(model), evaluation_mode(original):
        goal = mean_scores(original, rows, visible, batch_size)
        for _ in range(ROUNDS):
            now = mean_scores(model, rows, visible, batch_size)
            own = [_centred_bias(_of(encoding, layer), geometry, visible) for layer in range(len(goal))]
            targets = [wanted - found + bias for wanted, found, bias in zip(goal, now, own, strict=True)]
            for module, layers in _modules(encoding, len(targets)):
                fit(module, torch.stack([targets[layer] for layer in layers]).mean(0), geometry, visible)
        fitted = [_centred_bias(_of(encoding, layer), geometry, visible) for layer in range(len(goal))]
    lost = [target.square().mean((1, 2)) for target in targets]
    left = [(target - bias).square().mean((1, 2)) for target, bias in zip(targets, fitted, strict=True)]
    shares = [(1 - rest / whole.clamp(min=1e-300)).tolist() for rest, whole in zip(left, lost, strict=True)]
    return Calibration(lost=[whole.tolist() for whole in lost], explained=shares)


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

    def missed() -> Tensor:
        search.zero_grad()
        loss = (_centred_bias(twin, geometry, visible) - target).square().sum((1, 2)).mean() / len(target)
        loss.backward()
        return loss

    with torch.enable_grad():
        search.step(missed)
    with torch.no_grad():
        for own, found in zip(encoding.parameters(), parameters, strict=True):
            own.copy_(found)
        if isinstance(encoding, AlibiEncoding):
            torch.as_tensor(encoding.slopes).clamp_(min=0)  # one that grows with the distance has no end


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


def _of(encoding: Encoding, layer: int) -> Encoding:
    return encoding.of(layer) if isinstance(encoding, Layers) else encoding


def _modules(encoding: Encoding, layers: int) -> Sequence[tuple[Encoding, list[int]]]:
    """Return every module that can be fitted, with the layers that it serves."""
    if not isinstance(encoding, Layers):
        return [(encoding, list(range(layers)))]
    return [(encoding.of(layer), [layer]) for layer in range(layers) if can_calibrate(encoding.of(layer))]
