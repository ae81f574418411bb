"""Every error the package raises on purpose.

All of them derive from `PosencError`; each concrete class also derives from the builtin that a caller who has
never heard of this package would catch. Messages say what was asked, what is true, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PosencError(Exception):
    """Root of all errors raised by hf_posenc."""


class UnknownNameError(PosencError, ValueError):
    """A name (encoding, family, config key, protocol, ...) that is not registered."""


class ConfigError(PosencError, ValueError):
    """A value that is wrong by itself or does not fit the model it is meant for."""


class UnsupportedFamilyError(PosencError, NotImplementedError):
    """A model whose attention cannot be patched, with the reason."""


class UnsupportedEncodingError(PosencError, NotImplementedError):
    """An encoding that this model cannot carry correctly, with the reason."""


class BackendError(PosencError, NotImplementedError):
    """An attention backend that cannot carry the encoding in use."""


class PatchStateError(PosencError, RuntimeError):
    """A patch of a patched model, an unpatch of an unpatched one, or a patch at a moment when it cannot hold."""


class VerificationError(PosencError, RuntimeError):
    """A patched model that does not behave as its encoding promises."""


class LengthError(PosencError, IndexError):
    """A position that the model has no encoding for."""


class DataError(PosencError, ValueError):
    """Documents that cannot be used: none, too short, or not what they were said to be."""


class CheckpointError(PosencError, OSError):
    """A checkpoint whose weights or position-encoding spec are missing, unexpected or damaged."""


class ExportError(PosencError, NotImplementedError):
    """A patched model that no stock architecture computes, or an export that did not come back as it went out."""


class PublishError(PosencError, RuntimeError):
    """A model that cannot be published as asked: rights, licence, or a Hub that refuses."""


class TrainingError(PosencError, RuntimeError):
    """A training run that cannot go on, because its loss is no number any more."""


class OutputExistsError(PosencError, FileExistsError):
    """An output folder that already holds a result."""


class OutputError(PosencError, OSError):
    """An output folder that cannot be written to."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the tail of an error message: the closest known name, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."
