"""A rotation has no parameters to fit; its base and its share of the head are chosen by what the model says at once.

That is for weights that must stay. Where queries and keys can be fitted to a rotation (`attention_fit`), there is
nothing to choose by: any base comes as close to the original.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_posenc.anatomy import own_rope
from hf_posenc.config import EncodingConfig
from hf_posenc.encodings.rope import RoPE
from hf_posenc.planning import PatchPlan

BASES = (100.0, 300.0, 1_000.0, 3_000.0, 10_000.0, 100_000.0)
SHARES = (0.5, 1.0)


def rotations(model: PreTrainedModel, encoding: EncodingConfig, plan: PatchPlan) -> list[RoPE]:
    """Return the rotations to choose from: every base and share that `encoding` leaves open, and the usual one first.

    Args:
        model: not patched.
        encoding: as it was asked for, not filled in.
        plan: of the patch with it.

    Returns:
        Nothing where there is nothing to choose: another encoding, none left open, or a model that has a rotation.
    """
    if not isinstance(encoding, RoPE) or own_rope(model, plan.family, plan.geometry) is not None:
        return []
    usual: Any = plan.config
    bases = BASES if encoding.theta is None else (encoding.theta,)
    shares = SHARES if encoding.partial_rotary_factor is None else (encoding.partial_rotary_factor,)
    fitting = [share for share in shares if plan.geometry.head_dim * share % 2 == 0]
    found = [usual] + [
        dataclasses.replace(usual, theta=base, partial_rotary_factor=share) for share in fitting for base in bases
    ]
    different = [candidate for number, candidate in enumerate(found) if candidate not in found[:number]]
    return different if len(different) > 1 else []


def best_rotation(body: Any, candidates: Sequence[RoPE], plan: PatchPlan, loss: Callable[[], float]) -> RoPE:
    """Return the candidate under which `loss` is lowest, the first of equals.

    Args:
        body: of the patched model, whose rotation is put back at the end.
        candidates: to choose from.
        plan: of the patch.
        loss: measures the patched model.
    """
    own, losses = body.posenc, []
    for candidate in candidates:
        body.posenc = candidate.build(plan.geometry)
        losses.append(loss())
    body.posenc = own
    return candidates[losses.index(min(losses))]
