"""Old positions that fade while new ones come in, inside one encoding.

With w falling from 1 to 0: what was added to the embedding counts w times, biases w (old) and 1 - w (new) times, and
rotations turn by the positions w p (old) and (1 - w) p (new), which leads from one rotation, or none, to the other
through all that lies between.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.anatomy import by_layer_type, own_rope
from hf_posenc.config import Encoding, Layers
from hf_posenc.conversion.absorption import position_rows
from hf_posenc.encodings.rope import RoPE
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from hf_posenc.planning import PatchPlan
from hf_posenc.positions import Positions

HOOKS = ("embed", "rotate", "bias")
OTHERS = ("rotate_key", "temperature", "gate", "score", "output_bias")


class Fade:
    """How much of the old positions is left: `weight`, from 1 to 0, shared by all layers of a model."""

    weight = 1.0


class Annealed(Encoding):
    """The encoding `new` as far as the old one, `old`, has faded.

    Only `new` is a submodule: what is old is neither trained nor saved.

    Raises:
        UnsupportedEncodingError: one of them does something that cannot be faded.
    """

    new: Encoding
    old: Encoding
    fade: Fade

    def __init__(self, old: Encoding, new: Encoding, *, fade: Fade) -> None:
        super().__init__()
        for encoding in (old, new):
            other = [hook for hook in OTHERS if encoding.overrides(hook)]
            if other or encoding.rotation_grows_after is not None:
                what = other[0] if other else "rotation by length"
                raise UnsupportedEncodingError(
                    f"{type(encoding).__name__} cannot be faded: its {what} has no half. Leave anneal out."
                )
        self.new = new
        self.__dict__.update(old=old, fade=fade)  # not submodules

    def overrides(self, hook: str) -> bool:
        """Tell whether either encoding gives `hook` a meaning; a bias of the old one takes the general form."""
        if hook == "distance_bias":
            return self.new.overrides(hook) and not self.old.overrides("bias")
        return hook in HOOKS and (self.old.overrides(hook) or self.new.overrides(hook))

    def embed(self, position_ids: Tensor) -> Tensor | None:
        """Return the sum of both, (b, n, hidden_size), or None."""
        weight, old, new = self.fade.weight, self.old.embed(position_ids), self.new.embed(position_ids)
        parts = [share * part for share, part in ((weight, old), (1 - weight, new)) if part is not None]
        return torch.stack(parts).sum(0) if parts else None

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate by both, each at its share of the position."""
        weight = self.fade.weight
        for share, encoding in ((weight, self.old), (1 - weight, self.new)):
            if share and encoding.overrides("rotate"):
                states = encoding.rotate(states, position_ids.double() * share if share != 1 else position_ids)
        return states

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor | None:
        """Return the sum of both, (1|b, 1|h, q, k), or None."""
        weight = self.fade.weight
        biases = ((weight, self.old.bias(query, key, positions)), (1 - weight, self.new.bias(query, key, positions)))
        parts = [share * bias for share, bias in biases if bias is not None]
        return parts[0] if len(parts) == 1 else sum(parts[1:], parts[0]) if parts else None

    def distance_bias(self, distance: Tensor) -> Tensor | None:
        """Return the share of the new bias, (n,) -> (h, n); asked only where the old one has none."""
        bias = self.new.distance_bias(distance)
        return None if bias is None else (1 - self.fade.weight) * bias


def annealed(old: Encoding, new: Encoding, fade: Fade) -> Encoding:
    """Return `new` behind `old`, layer by layer where layers differ."""
    if not isinstance(new, Layers):
        return Annealed(old, new, fade=fade)
    return Layers([Annealed(old, new.of(layer), fade=fade) for layer in range(len(new.layers))])


class Rows(Encoding):
    """What a table adds at every position, as the old part of `Annealed`.

    Args:
        rows: (positions, width), of the positions from 0 on.
    """

    rows: Tensor

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.__dict__["rows"] = rows

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return the rows of these positions, (b, n) -> (b, n, width)."""
        return self.rows.to(position_ids.device)[position_ids]


def old_positions(model: PreTrainedModel, plan: PatchPlan) -> Encoding:
    """Return what an unpatched model has, as an encoding that can fade while the planned one comes in.

    Raises:
        ConfigError: the model has nothing that can fade, or transformers itself computes what comes.
        UnsupportedEncodingError: the planned encoding has no half.
    """
    name, rows = type(model).__name__, position_rows(model)
    if plan.route == "native":
        raise ConfigError(
            f"transformers itself computes {plan.config.label} in {name}, where nothing can fade; leave anneal out."
        )
    rope = own_rope(model, plan.family, plan.geometry)
    if rows is not None:
        old: Encoding = Rows(rows)
    elif rope is None or by_layer_type(rope):
        raise ConfigError(f"{name} has no positions that can fade; leave anneal out.")
    else:
        pairing = "interleaved" if plan.family.interleaved else "half_split"
        old = RoPE().for_model(plan.geometry, {**rope, "pairing": pairing}).build(plan.geometry)
    annealed(old, plan.config.build_layers(plan.geometry, len(plan.attention)), Fade())
    return old
