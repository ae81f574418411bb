"""The module side of the encoding contract: what positions may do to a model, hook by hook.

Knows nothing of transformers, nor of how an encoding is named and configured, which is the business of `config`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_posenc.positions import Positions, working_dtype
from hf_posenc.temperature import Tempering


class Encoding(nn.Module):
    """What positions do to a model: hooks, all neutral here.

    Most encodings need one of the first four (`embed`, `remap`, `rotate`, `bias`); the other hooks are for what those
    cannot say. Derived tables are never kept in buffers: transformers refills non-persistent buffers with garbage after
    `from_pretrained`, and `model.to(bfloat16)` would round them. They are derived from plain numbers when needed.
    """

    rotation_grows_after: int | None = None
    """Length in tokens after which the rotation of a query depends on how far the text has come, or None where it never
    does. Keys are then cached unrotated, and `at_length` gives the static encoding of a query at that length."""

    bias_settles_at: int | None = None
    """Distance in tokens from which on `bias` gives a query one and the same number for every key behind it, or None
    where it goes on changing. It need not be written out for these keys then."""

    tempering: Tempering | None
    """The temperature that the config asked for, beside whatever `temperature` does, or None."""

    visible: tuple[int, int] | None = None
    """How many first, and how many most recent tokens of a text a query sees, its own among the latter, or None where
    it sees all. Whatever a dynamic cache holds beyond these is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.tempering = None

    def forward(self, position_ids: Tensor) -> Tensor | None:
        """Return `embed` of `remap`: (b, n) int64 -> (b, n, hidden_size), or None.

        By this the models call it, so that who keeps weights elsewhere, as accelerate does on disk, can fetch them.
        """
        return self.embed(self.remap(position_ids))

    def embed(self, position_ids: Tensor) -> Tensor | None:
        """Return what is added to the token embedding: (b, n) int64 -> (b, n, hidden_size), or None."""
        return None

    def remap(self, positions: Tensor) -> Tensor:
        """Return the integers that the other hooks see: (b, n) int64 -> (b, n) int64."""
        return positions

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate queries or keys: (b, h, n, d), (b, n) -> (b, h, n, d), dtype kept."""
        return states

    def bias(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor | None:
        """Return what is added to the scaled scores before softmax: (1|b, 1|h, q, k) float32, or None.

        Args:
            query: (b, h, q, d), rotated and scaled, so that its product with a key is a score; not tempered.
            key: (b, h, k, d) or, with grouped heads, (b, h_kv, k, d), rotated.
            positions: of these queries and these keys.
        """
        return self._bias_by_distance(positions, working_dtype(query)) if self.overrides("distance_bias") else None

    def distance_bias(self, distance: Tensor) -> Tensor | None:
        """Return the bias of a distance, where it depends on nothing else: (n,) -> (h, n), or None where it does.

        `bias` follows from it. What says so is not asked for more than one row of numbers, where a call has plain
        positions, and its gradients come from that row.

        Args:
            distance: query minus key position, whole numbers in the dtype of the result, float32 or float64.
        """
        return None

    def separable_slopes(self) -> Tensor | None:
        """Return the slope of every query head, (heads,) float32, where the bias is minus slope times distance.

        None where it is anything else, or where queries see keys ahead. Softmax does not see what all keys of a query
        share, so that the position of a key, times the slope, says all that such a bias does: a product of one number
        of the query and one of the key, which kernels compute that take no bias.
        """
        return None

    def only_adds(self) -> bool:
        """Tell whether all that is done to scores, beside turning queries and keys for good, is adding a bias."""
        own = any(self.overrides(hook) for hook in ("score", "output_bias"))
        return not own and self.rotation_grows_after is None

    def _bias_by_distance(self, positions: Positions, dtype: torch.dtype) -> Tensor | None:
        """Return (1|b, h, q, k), looked up in the numbers of all distances that there are."""
        distance = positions.distance()
        if torch.compiler.is_compiling():  # a graph cannot look at the numbers; it fuses what is asked of every pair
            each = self.distance_bias(distance.flatten().to(dtype))  # (h, b q k)
            return None if each is None else each.unflatten(1, distance.shape).transpose(0, 1)
        lowest, highest = (int(end) for end in distance.aminmax())
        if highest - lowest < 4 * sum(distance.shape[1:]):
            known, index = torch.arange(lowest, highest + 1, device=distance.device), distance - lowest
        else:  # positions with gaps
            known, index = distance.unique(return_inverse=True)
        table = self.distance_bias(known.to(dtype))  # (h, n)
        # contiguous: kernels are slow where neighbouring keys do not lie side by side
        return None if table is None else nn.functional.embedding(index, table.T).permute(0, 3, 1, 2).contiguous()

    def rotate_key(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate keys, where they turn otherwise than queries: (b, h_kv, n, d), (b, n) -> (b, h_kv, n, d)."""
        return self.rotate(states, position_ids)

    def temperature(self, position_ids: Tensor) -> Tensor | None:
        """Return the factor on the scores of every query, bias included: (b, n) -> (1|b, 1|h, n) float32, or None."""
        return None

    def factor(self, position_ids: Tensor) -> Tensor | None:
        """Return `temperature`, times the one that the config asked for: (b, n) -> (1|b, 1|h, n) float32, or None."""
        own = self.temperature(position_ids)
        if self.tempering is None:
            return own
        asked: Tensor = self.tempering(position_ids)
        return asked if own is None else own * asked

    def gate(self, hidden_states: Tensor) -> Tensor | None:
        """Return what is remembered of every key beside the key: (b, n, hidden_size) -> (b, h, n) float32, or None.

        It comes back as `positions.gates`, (b, h, k), for all cached keys and the new ones.
        """
        return None

    def score(self, query: Tensor, key: Tensor, positions: Positions) -> Tensor | None:
        """Return the scaled scores themselves, (b, h, q, k) float32, where no rotation gives them; None elsewhere.

        Queries come scaled and tempered, keys as projected; `rotate` is not called, `bias` still is. Arguments as in
        `bias`.
        """
        return None

    def output_bias(self, weights: Tensor, positions: Positions) -> Tensor | None:
        """Return what is added to the output of every head: weights (b, h, q, k) -> (b, h, q, d), or None.

        Stock attention functions hand no weights over: where this is overridden, none of them is called.
        """
        return None

    def adopt(self, table: Tensor | None) -> None:
        """Take over what can be taken from the position table that is being replaced, (rows, hidden_size) or None."""

    def adopt_bias(self, tables: Sequence[Tensor]) -> None:
        """Take over what can be taken from the bias that is being replaced.

        Args:
            tables: (num_buckets, num_attention_heads) each, one for all layers or one for every layer.
        """

    def at_length(self, length: int) -> Encoding:
        """Return the static encoding in force for a query at position `length - 1`."""
        return self

    def max_positions(self) -> int | None:
        """Return the number of positions this encoding can express, or None where it has no end."""
        return None

    def overrides(self, hook: str) -> bool:
        """Tell whether this encoding gives `hook` a meaning of its own."""
        if hook == "temperature" and self.tempering is not None:
            return True
        own = getattr(type(self), hook) is not getattr(Encoding, hook)
        return own or (hook == "bias" and self.overrides("distance_bias"))


class Layers(Encoding):
    """An encoding for every layer.

    Attention modules take the hooks of their own layer; what is added to the token embedding comes from the first one
    that adds anything.

    Args:
        layers: one encoding a layer, in order.
    """

    def __init__(self, layers: Sequence[Encoding]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        grown = [layer.rotation_grows_after for layer in layers if layer.rotation_grows_after is not None]
        self.rotation_grows_after = min(grown, default=None)
        visible = [layer.visible for layer in layers]
        if None not in visible:
            self.visible = max(v[0] for v in visible if v), max(v[1] for v in visible if v)

    def of(self, index: int) -> Encoding:
        """Return the encoding of one layer."""
        layer: Encoding = self.layers[index]  # type: ignore[assignment]
        return layer

    def overrides(self, hook: str) -> bool:
        """Tell whether any layer gives `hook` a meaning of its own."""
        return any(self.of(index).overrides(hook) for index in range(len(self.layers)))

    def embed(self, position_ids: Tensor) -> Tensor | None:
        """Return what the first layer that adds to the token embedding adds: (b, n) -> (b, n, hidden_size) or None."""
        found = (self.of(index).embed(position_ids) for index in range(len(self.layers)))
        return next((added for added in found if added is not None), None)

    def adopt(self, table: Tensor | None) -> None:
        """Let every layer take over what it can from the table being replaced, (rows, hidden_size) or None."""
        for index in range(len(self.layers)):
            self.of(index).adopt(table)

    def adopt_bias(self, tables: Sequence[Tensor]) -> None:
        """Let every layer take over what it can from the bias of that layer."""
        for index in range(len(self.layers)):
            self.of(index).adopt_bias([tables[index % len(tables)]])

    def max_positions(self) -> int | None:
        """Return the smallest number of positions that a layer can express, or None where none has an end."""
        found = (self.of(index).max_positions() for index in range(len(self.layers)))
        return min((rows for rows in found if rows is not None), default=None)
