"""What may stand on one axis: curves of the same texts, measured in the same way; everything else stands apart."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hf_posenc.errors import DataError
from hf_posenc.evaluation import LengthCurve
from hf_posenc.evaluation.protocols import PROTOCOLS


@dataclass(frozen=True)
class Panel:
    """Curves that share an axis.

    Attributes:
        curves: at least one.
        reason: why they do not stand with those of the first panel, None for the first one.
    """

    curves: tuple[LengthCurve, ...]
    reason: str | None = None


def panels(curves: Sequence[LengthCurve]) -> list[Panel]:
    """Return the curves in as few panels as their measurements allow, each curve in the first that takes it.

    Raises:
        DataError: there are no curves, or two that would share a panel share a name.
    """
    if not curves:
        raise DataError("There are no curves to show. Evaluate at least one model.")
    groups: list[list[LengthCurve]] = []
    for curve in curves:
        group = next((group for group in groups if difference([*group, curve]) is None), None)
        if group is None:
            groups.append([curve])
        else:
            group.append(curve)
    found = [Panel(tuple(groups[0]))]
    for group in groups[1:]:
        found.append(Panel(tuple(group), f"measured apart from the first: {difference([*groups[0], *group])} differ"))
    for panel in found:
        check_comparable(panel.curves)
    return found


def check_comparable(curves: Sequence[LengthCurve]) -> None:
    """Refuse to show side by side what was not measured alike.

    Raises:
        DataError: there are no curves, two of one protocol or two models share a name, or texts, stride, BOS policy or,
            where only the last tokens of a text count, tokenizers differ.
    """
    if not curves:
        raise DataError("There are no curves to show. Evaluate at least one model.")
    for group in by_protocol(curves).values():
        names = [curve.name for curve in group]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"Several curves are called {', '.join(repeated)}: give each model a name of its own.")
    for name in dict.fromkeys(curve.name for curve in curves):
        if len({curve.model_hash for curve in curves if curve.name == name} - {None}) > 1:
            raise DataError(f"Several models are called {name}: give each a name of its own.")
    if found := difference(curves):
        raise DataError(
            f"These curves differ in {found}, so their numbers cannot stand side by side. "
            "Evaluate all models in one run."
        )


def difference(curves: Sequence[LengthCurve]) -> str | None:
    """Return in what the measurements of curves differ that forbids one axis, with the values; None for nothing."""
    groups = by_protocol(curves).values()
    for group in groups:
        for length in sorted({length for curve in group for length in curve.stride}):
            if found := _values("stride", {curve.stride[length] for curve in group if length in curve.stride}):
                return found
        if found := _values("bos_policy", {curve.bos_policy for curve in group}):
            return found
        cut = {curve.tokenizer_hash for curve in group if _scores_the_end(curve.protocol)} - {None}
        if found := _values("tokenizer_hash", cut):
            return found
    plain = [curve for curve in curves if not _reshapes(curve.protocol)]
    for group in (plain, *groups):
        if found := _values("text_hash", {curve.text_hash for curve in group}):
            return found
    return None


def _values(field: str, found: Collection[str | int | None]) -> str | None:
    """Return the field with its values, hashes cut short, where there are several."""
    return f"{field} ({', '.join(str(value)[:12] for value in sorted(found, key=str))})" if len(found) > 1 else None


def _reshapes(protocol: str) -> bool:
    """Whether a protocol measures other documents than it was given: joined, or only the long ones."""
    known = PROTOCOLS.get(protocol)
    return known is not None and (known.joined or known.fills)


def _scores_the_end(protocol: str) -> bool:
    """Whether a protocol scores only the last tokens of a text, which another tokenizer would take for other words."""
    known = PROTOCOLS.get(protocol)
    return known is not None and known.fills


def by_protocol(curves: Sequence[LengthCurve]) -> dict[str, list[LengthCurve]]:
    """Return the curves of each protocol, in the order of first appearance."""
    groups: dict[str, list[LengthCurve]] = {}
    for curve in curves:
        groups.setdefault(curve.protocol, []).append(curve)
    return groups


def tokenizers_differ(curves: Sequence[LengthCurve]) -> bool:
    """Whether the same texts were cut into different numbers of tokens, so that perplexities do not compare.

    Bits per byte of the text do.
    """
    return any(
        len({curve.n_tokens[length] for curve in group if length in curve.n_tokens}) > 1
        for group in by_protocol(curves).values()
        for length in {length for curve in group for length in curve.n_tokens}
    )
