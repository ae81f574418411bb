"""Under autocast, what positions add is computed as exactly as without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_posenc as posenc
from tests.models import SUBJECTS, tokens

GIVERS = {
    "rerope": ("score", posenc.encoding("rerope", window=4)),
    "shaw": ("bias", posenc.encoding("shaw")),
    "transformer_xl": ("bias", posenc.encoding("transformer_xl")),
    "fire": ("bias", posenc.encoding("fire")),
    "fox": ("gate", posenc.encoding("fox")),
}


@pytest.mark.parametrize("name", GIVERS)
def test_hooks_give_float32_under_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hook, config = GIVERS[name]
    model = posenc.patch(SUBJECTS["gpt2"].fresh(), config, verify=False)
    given: list[torch.dtype] = []

    def noting(stock: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            given.append(stock(*args).dtype)
            return stock(*args)

        return called

    monkeypatch.setattr(config.module, hook, noting(getattr(config.module, hook)))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=tokens(1, 12))
    assert set(given) == {torch.float32}
