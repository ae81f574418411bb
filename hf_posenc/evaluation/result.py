"""What every result says of the model it was measured on, and how results come back from JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from hf_posenc.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Result:
    """A measurement of one model; the fields that all of them share.

    Attributes:
        name: the model's name.
        trained_length: the length the model's config states it was trained for, None where it states none.
        model_hash: SHA-256 over weights and position encoding (`subject.model_hash`), None for weights out of reach.
        tokenizer: name of the tokenizer, None where documents came as token ids, or for a file older than this field.
        tokenizer_hash: SHA-256 over what it makes of texts (`subject.tokenizer_hash`), None as `tokenizer` is.
        dtype: dtype of the model's weights; losses are computed in float32 and summed in float64 whatever it is.
        versions: see `provenance.versions`.
    """

    name: str
    trained_length: int | None
    model_hash: str | None
    tokenizer: str | None = None
    tokenizer_hash: str | None = None
    dtype: str
    versions: Mapping[str, str]

    @classmethod
    def _fields_of(cls, data: Mapping[str, Any], *, called: str) -> dict[str, Any]:
        """Return the fields out of plain data; one that older files lack is left to its default.

        Raises:
            DataError: a field is missing.
        """
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        if missing := sorted(name for name in needed if name not in data):
            raise DataError(f"This is no {called}: {', '.join(missing)} missing. Evaluate the model again.")
        return {field.name: data[field.name] for field in fields(cls) if field.name in data}


def perplexity(nats: float) -> float:
    """Return e to nats per token, infinite where a double cannot hold it: a model that is sure and always wrong."""
    return math.exp(nats) if nats < 709.0 else math.inf


def json_ready(value: Any) -> Any:
    """Return `value` as JSON knows it: string keys, lists, null for a number that is none or infinite."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [json_ready(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_alike(results: Sequence[Result], alike: Sequence[str], *, apart: Sequence[str] = ("name",)) -> None:
    """Refuse results whose numbers cannot stand side by side.

    Args:
        results: what is to be shown together.
        alike: fields in which they must not differ.
        apart: fields that tell them apart, the name first.

    Raises:
        DataError: there are none, two share a name, or which field differs, with its values, hashes cut short.
    """
    if not results:
        raise DataError("There are no results to show. Measure at least one model.")
    if len({tuple(getattr(result, name) for name in apart) for result in results}) < len(results):
        raise DataError(f"Each model needs a name of its own; got {', '.join(result.name for result in results)}.")
    for name in alike:
        found = sorted({str(getattr(result, name))[:12] for result in results})
        if len(found) > 1:
            raise DataError(
                f"These results differ in {name} ({', '.join(found)}), so they cannot stand side by side. "
                "Measure all models in one run."
            )
