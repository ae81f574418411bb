"""Which route an export takes, and what is said where none is exact."""

from __future__ import annotations

from collections.abc import Mapping

from hf_posenc.errors import ExportError
from hf_posenc.export.route import ROUTES, Route, Source, ranked

LOOKALIKES: Mapping[str, Mapping[str, str]] = {
    "alibi": {
        "falcon": "it rounds slope times position to bfloat16 and adds that before the scores are scaled down",
        "bloom": "it has a LayerNorm behind its token embedding, and no weights make that the identity",
        "mpt": "its linear layers have no biases, and it ends at the length that its config states",
    }
}
"""Encoding -> model type that has one of that name and does not compute it -> reason, as the end of a sentence."""


def choose(source: Source, name: str | None) -> Route:
    """Return the route to take: the one of that name, or the preferred one that is exact.

    Raises:
        UnknownNameError: no route has that name.
        ExportError: it, or every route, is refused; the message gives each reason.
    """
    alike = {kind: why for kind, why in LOOKALIKES.get(source.encoding.name, {}).items() if kind != source.model_type}
    served = [route.name for route in ranked() if route.serves(source.model_type)]
    reasons = {
        target: alike.get(target) or ROUTES[target].refuses(source)
        for target in ([name] if name else [*served, *alike])
    }
    for target, reason in reasons.items():
        if reason is None:
            return ROUTES[target]
    what = f"{source.stock.__name__} with {source.encoding.name}"
    said = "; ".join(f"{target}: {reason}" for target, reason in reasons.items())
    raise ExportError(
        f"no stock architecture computes {what} exactly ({said or 'there is no route from its type'}). "
        "model.save_pretrained keeps it as it is."
    )
