"""Prompts that a model has read once, to be continued in several ways."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation.forward import device_of, forward
from hf_posenc.evaluation.scoring import token_nll


class Reading:
    """Prompts of one length after the model has read them. Use it inside `evaluation_mode(model)`.

    The model reads the prompts once and goes on from its cache, as it does in `generate`. A model that gives no cache
    reads them again for every continuation: the same numbers, for more work.

    Args:
        model: a causal language model whose forward takes `input_ids`.
        prompts: (b, n) token ids, n >= 1, no padding.

    Raises:
        UnsupportedFamilyError: the model returns no logits.
    """

    def __init__(self, model: nn.Module, prompts: Tensor) -> None:
        self._model = model
        self._prompts = prompts.to(device_of(model))
        logits, self._cache = self._run(self._prompts, None, keep=1)
        self._first = logits[:, -1:]  # (b, 1, vocabulary)

    def greedy(self, count: int) -> Tensor:
        """Return the `count` most probable next tokens, each given those before it: (b, count) on the CPU."""
        logits, cache = self._first, copy.deepcopy(self._cache)
        written = self._prompts[:, :0]
        while True:
            written = torch.cat([written, logits[:, -1:].argmax(-1)], dim=1)
            if written.shape[1] == count:
                return written.cpu()
            if cache is None:
                logits, _ = self._run(torch.cat([self._prompts, written], dim=1), None, keep=1)
            else:
                logits, cache = self._run(written[:, -1:], cache, keep=1)

    def nll(self, continuations: Tensor) -> Tensor:
        """Return the nats of one continuation of each prompt, summed over its tokens: (b, a) ids -> (b,) float64."""
        continuations = continuations.to(self._prompts.device)
        given, logits = continuations[:, :-1], self._first
        if given.shape[1]:
            inputs = given if self._cache is not None else torch.cat([self._prompts, given], dim=1)
            further, _ = self._run(inputs, copy.deepcopy(self._cache), keep=given.shape[1])
            logits = torch.cat([logits, further[:, -given.shape[1] :]], dim=1)
        return token_nll(logits.flatten(0, 1), continuations.flatten()).view(continuations.shape).sum(dim=1)

    def _run(self, ids: Tensor, cache: Any, *, keep: int) -> tuple[Tensor, Any]:
        """Return the last logits, at least `keep` of them, and the cache, None where the model gives none."""
        name = "cache" if _takes(self._model, "cache") else "past_key_values"  # transformers' new and old word for it
        options: dict[str, Any] = {} if cache is None else {name: cache}
        if _takes(self._model, "logits_to_keep"):  # the logits of a long prompt take more memory than the model
            options["logits_to_keep"] = keep
        output = forward(self._model, input_ids=ids, use_cache=True, **options)
        return output.logits, getattr(output, name, None)


def _takes(model: nn.Module, argument: str) -> bool:
    unwrap = getattr(model, "get_base_model", None)  # a PEFT wrapper takes anything and passes it on
    inner = model if unwrap is None else unwrap()
    return argument in inspect.signature(inner.forward).parameters
