"""What the attention modules of one patched model share: the way to its encoding."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hf_posenc.config import Encoding

_running = threading.local()


class Joint:
    """The way to the encoding of one patched body.

    The encoding is looked up at every call, in the body that owns it: PEFT may have put a trainable copy there, and
    DataParallel runs shallow copies of all modules, each on its own device and in its own thread.
    """

    def __init__(self, body: nn.Module) -> None:
        self.body = body
        self.override: Encoding | None = None

    @property
    def encoding(self) -> Encoding:
        """The encoding in force."""
        if self.override is not None:
            return self.override
        # replicas are not compiled, and a compiler would not look into a thread's own state
        bodies = {} if torch.compiler.is_compiling() else getattr(_running, "bodies", {})
        found: Encoding = bodies.get(id(self), self.body).posenc
        return found

    def of(self, module: nn.Module) -> Encoding:
        """Return the encoding of one attention module: that of its layer, where layers have their own."""
        encoding = self.encoding
        layers = getattr(encoding, "layers", None)
        return encoding if layers is None else layers[module.posenc_layer]

    @contextmanager
    def running(self, body: nn.Module) -> Iterator[None]:
        """Look the encoding up in `body`, the one this joint was made for or a replica of it, in this thread."""
        if body is self.body:
            yield
            return
        before = getattr(_running, "bodies", {})
        _running.bodies = {**before, id(self): body}
        try:
            yield
        finally:
            _running.bodies = before
