"""Which form the attention of one call takes, where there is a faster one than writing the bias out.

Where slots stand for positions, a bias of the distance alone needs one number a distance, and any other is written out
for a few queries at a time: where every query sees one stretch of keys, and positions count on along it, as under
padding, in a cache, in plain texts and in each of those packed into a row. Whatever is otherwise goes through the
general form, in `scores`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.blocks import Blocks, attend_biased
from hf_posenc.config import Encoding
from hf_posenc.errors import UnsupportedEncodingError
from hf_posenc.flash import attend_flash, is_flash
from hf_posenc.flex import FLEX, attend_flex
from hf_posenc.operators import attend_compiled
from hf_posenc.positions import Positions
from hf_posenc.reach import attend_once, bias_by_distance
from hf_posenc.scores import Attend, Output, Scores, attend_by_length, attend_in_blocks, exactly, own_attention
from hf_posenc.stretches import Seen, seen_keys, texts, within_reach
from hf_posenc.toeplitz import Band, attend, trusted

FEWEST = 1024
"""Keys from which on it pays to find out what a single query sees."""


def form_of(encoding: Encoding, model: PreTrainedModel, *, causal: bool) -> str:
    """Say in which form a model attends plain texts with an encoding, in words; layers that differ are all named.

    Args:
        encoding: of the model, or of all its layers.
        model: whose backend, device and dtype decide, too; attention dropout in training keeps the fast forms away.
        causal: whether it decodes, one query at a time.
    """
    layers = getattr(encoding, "layers", None)
    if layers is not None:
        return ", ".join(dict.fromkeys(form_of(layer, model, causal=causal) for layer in layers))
    if encoding.overrides("score"):
        return "scores of its own, in blocks of queries"
    if encoding.rotation_grows_after is not None:
        return "each length by itself past the original one"
    if not encoding.overrides("bias"):
        return "the stock attention function"
    if model.config._attn_implementation == FLEX:
        return "a bias by distance, looked up by flex_attention"
    if is_flash(model.config._attn_implementation):
        return "a bias by distance, in extra head dimensions"
    fast = model.config._attn_implementation == "sdpa" and model.device.type == "cpu" and trusted(model.dtype)
    fast = fast and getattr(model.config, "attn_logit_softcapping", None) is None
    if fast and not encoding.overrides("temperature"):
        if encoding.overrides("distance_bias"):
            once = "; one query at a time over the keys that it can reach" if causal else ""
            return f"a row of biases by distance{once}"
        if encoding.bias_settles_at is not None:
            return "a bias of near keys, in blocks of queries"
    return "a bias written out, in blocks of queries"


def attend_in_form(
    scores: Scores, attend: Attend, query: Tensor, key: Tensor, value: Tensor, *, backend: str, **given: Any
) -> Output:
    """Attend in the fastest form that gives what the encoding says.

    Args:
        scores: of the call.
        attend: the attention function of the model.
        query: (b, h, q, d), rotated unless keys are cached bare, not scaled.
        key: (b, h_kv, k, d).
        value: (b, h_kv, k, d).
        backend: name of the attention function.
        **given: what else it is given; `dropout`, `softcap` and temperatures keep the fast forms away.

    Returns:
        Output (b, q, h, d), and the attention weights (b, h, q, k) where the backend gives them.
    """
    encoding, dropout = scores.encoding, given.get("dropout") or 0.0
    if backend == FLEX:
        return attend_flex(scores, query, key, value, **given)
    if is_flash(backend):
        return attend_flash(scores, attend, query, key, value, **given)
    if encoding.overrides("score") or encoding.overrides("output_bias"):
        return attend_in_blocks(
            scores, own_attention(scores, dropout=dropout, maps=backend == "eager"), query, key, value
        )
    if encoding.rotation_grows_after is not None:
        return attend_by_length(scores, attend, query, key, value)
    plain = scores.factor is None and not dropout and given.get("softcap") is None
    if backend == "sdpa" and encoding.overrides("bias") and plain:
        output = attend_along(scores, query, key, value)
        if output is not None:
            return output, None
    return attend_in_blocks(scores, attend, query, key, value)


def attend_along(scores: Scores, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """Attend where every query sees one stretch of keys; None where the general form has to do it.

    Args:
        scores: of the call.
        query: (b, h, q, d), rotated, not scaled.
        key: (b, h_kv, k, d), rotated.
        value: (b, h_kv, k, d).

    Returns:
        (b, q, h, d), zero for queries that see no key.
    """
    if query.device.type != "cpu" or {key.dtype, value.dtype} != {query.dtype} or value.shape[-1] != query.shape[-1]:
        return None
    groups = query.shape[1] // key.shape[1]
    if torch.compiler.is_compiling():
        return attend_compiled(scores, query, *_repeated(groups, key, value))
    if (once := query.shape[2] == 1) and (key.shape[2] < FEWEST or torch.is_grad_enabled()):
        return None
    if not trusted(query.dtype):
        return None
    if scores.positions.documents is not None:
        return _attend_texts(scores, (query, *_repeated(groups, key, value)))
    mask, known = scores.mask, scores.positions.known
    asked = id(mask), key.shape[2]
    if asked not in known:  # the mask stays in there, so that no other one can take its id
        known[asked] = mask, seen_keys(scores.positions, mask, causal=scores.triangle)
    seen: Seen | None = known[asked][1]
    if seen is None:
        return None
    if once:
        return _attend_once(scores, query, key, value, seen)
    return _attend_stretches(scores, (query, *_repeated(groups, key, value)), seen)


def _repeated(groups: int, *states: Tensor) -> Iterator[Tensor]:
    """Yield keys and values, (b, h_kv, k, d), once for every query head, (b, h, k, d)."""
    return (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in states)


def _attend_once(scores: Scores, query: Tensor, key: Tensor, value: Tensor, seen: Seen) -> Tensor | None:
    """Attend with one query a row, (b, 1, h, d); None where rows do not see their own keys, or for other biases."""
    firsts, ends = zip(*seen.stretches, strict=True)
    if {*ends} != {seen.start + 1} or max(firsts) > seen.start or not scores.encoding.overrides("distance_bias"):
        return None
    return attend_once(scores, query, key, value, slot=seen.start, firsts=list(firsts))


def _attend_texts(scores: Scores, states: tuple[Tensor, ...]) -> Tensor | None:
    """Attend within every text of packed rows by itself, (b, q, h, d); None where texts are no stretches."""
    known, asked = scores.positions.known, ("texts", id(scores.mask))
    if asked not in known:
        known[asked] = scores.mask, _texts_seen(scores)
    found: list[list[tuple[slice, Seen]]] | None = known[asked][1]
    if found is None:
        return None
    outputs = []
    for index, row in enumerate(found):
        together = len(found) == 1  # the rows of the batch, where they are packed alike
        own = scores if together else scores.row(index)
        sizes = [part.stop - part.start for part, _ in row]
        split = [(x if together else x[index : index + 1]).split(sizes, dim=2) for x in states]
        parts = [
            _attend_stretches(_text(own, part), tuple(part_states), seen)
            for (part, seen), *part_states in zip(row, *split, strict=True)
        ]
        outputs.append(torch.cat(parts, dim=1))
    return torch.cat(outputs)


def _texts_seen(scores: Scores) -> list[list[tuple[slice, Seen]]] | None:
    """Return where the texts of every row stand, and what each sees; None where that is not one stretch for each."""
    documents = scores.positions.documents
    rows = None if documents is None or scores.past else texts(documents)
    if rows is None:
        return None
    found = []
    for index, parts in enumerate(rows):
        own = scores.row(index) if len(rows) > 1 else scores
        alone = [_text(own, part) for part in parts]
        seen = [seen_keys(text.positions, text.mask, causal=text.triangle) for text in alone]
        if None in seen:
            return None
        found.append([(part, one) for part, one in zip(parts, seen, strict=True) if one is not None])
    return found


def _text(scores: Scores, part: slice) -> Scores:
    """Return the scores of one text of a row, as if there were no other."""
    mask = scores.mask
    if mask is not None:
        mask = mask[:, :, part if mask.shape[2] > 1 else slice(None), part]
    how: dict[str, Any] = {"causal": scores.triangle, "dtype": scores.dtype, "scaling": scores.scaling}
    return Scores(scores.encoding, scores.positions.part(part, part), mask=mask, **how)


def _attend_stretches(scores: Scores, states: tuple[Tensor, ...], seen: Seen) -> Tensor:
    """Attend over the stretch of keys that each row sees; (b, q, h, d)."""
    if len(seen.stretches) == 1:
        return _attend_stretch(scores, states, seen, seen.stretches[0])
    outputs = []
    for index, stretch in enumerate(seen.stretches):
        row = tuple(x[index : index + 1] for x in states)
        outputs.append(_attend_stretch(scores.row(index), row, seen, stretch))
    return torch.cat(outputs)


def _attend_stretch(scores: Scores, states: tuple[Tensor, ...], seen: Seen, stretch: tuple[int, int]) -> Tensor:
    """Attend over one stretch of keys; (b, q, h, d)."""
    query, key, value = states
    blind, band = seen.band(stretch, query)
    if not band.keys:
        return torch.zeros_like(query).transpose(1, 2)
    keys = slice(*stretch)
    query, key, value = query[:, :, blind:], key[:, :, keys], value[:, :, keys]
    if scores.encoding.overrides("distance_bias"):
        output = _by_distance(scores, (query, key, value), band)
    else:
        output = _by_blocks(scores, (query, key, value), scores.positions.part(slice(blind, None), keys), band)
    return nn.functional.pad(output.transpose(1, 2), (0, 0, 0, 0, blind, 0)) if blind else output.transpose(1, 2)


class _Bias(nn.Module):
    """The bias of an encoding as what a module does, so that it can be asked with other weights."""

    def __init__(self, encoding: Encoding) -> None:
        super().__init__()
        self.encoding = encoding

    def forward(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor | None:
        """Return what the encoding gives, (1|b, 1|h, q, k), or None."""
        return self.encoding.bias(query, key, positions)


def _by_blocks(scores: Scores, states: tuple[Tensor, ...], at: Positions, band: Band) -> Tensor:
    """Attend with a bias that is written out for a block of queries at a time; (b, h, q, d)."""
    encoding = scores.encoding
    # for gradients it is asked again, when `functional_call` may have put other weights back into its place
    weights: dict[str, Tensor] = {f"encoding.{name}": weight for name, weight in encoding.named_parameters()}

    def bias(query: Tensor, key: Tensor, gates: Tensor | None, rows: slice, keys: slice) -> Tensor:
        asked = query * scores.scaling, key, dataclasses.replace(at.part(rows, keys), gates=gates)
        with exactly(query.device):
            found: Tensor | None = torch.func.functional_call(_Bias(encoding), weights, asked)
        if found is None:
            raise UnsupportedEncodingError(f"{type(encoding).__name__} was to give a bias, not None.")
        return found.to(scores.dtype)

    return attend_biased(
        *states,
        gates=at.gates,
        bias=bias,
        parameters=[weight for weight in weights.values() if weight.requires_grad],
        blocks=Blocks(
            queries=band.queries,
            keys=band.keys,
            first=band.first,
            causal=band.causal,
            settled=encoding.bias_settles_at,
        ),
        scale=scores.scaling,
    )


def _by_distance(scores: Scores, states: tuple[Tensor, ...], band: Band) -> Tensor:
    """Attend with a bias that is given by its distances alone; (b, h, q, d)."""
    query, key, value = states
    signed = band.distances(query.device)
    table = bias_by_distance(scores, signed.clamp(min=0) if band.causal else signed).expand(query.shape[1], -1)
    table, bands = within_reach(table, query, key, band, scores.scaling)
    return attend(query, key, value, table, bands=bands, scale=scores.scaling)
