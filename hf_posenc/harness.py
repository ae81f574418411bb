"""Patched models under lm-evaluation-harness, which stays as it is: its own class for Hugging Face models runs them.

The harness takes windows as long as the config states, so that a model would never be seen past its trained length, and
lets the tokenizer put a second BOS before its own. `harness_model` says otherwise; a command line says the same by

    lm_eval --model hf --model_args pretrained=FOLDER,trust_remote_code=True,max_length=2048,add_bos_token=False
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_posenc.errors import ConfigError, LengthError
from hf_posenc.evaluation.forward import device_of
from hf_posenc.length import max_length as positions_of

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def harness_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, max_length: int, batch_size: int = 1, **settings: Any
) -> HFLM:
    """Return a causal language model, patched or not, as `lm_eval.simple_evaluate(model=...)` takes it.

    Its perplexity of a text is that of `perplexity_by_length(..., protocol="lm_eval_rolling")` at `max_length`.

    Args:
        model, tokenizer: as they are; the model is neither copied nor changed.
        max_length: tokens of the longest window, past the trained length too.
        batch_size: windows in one forward pass.
        settings: further arguments of `HFLM`.

    Raises:
        ConfigError: `max_length` is no positive integer, or the harness is not installed.
        LengthError: the model has no positions for `max_length` tokens.
    """
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
        raise ConfigError(f"max_length must be a positive integer; got {max_length!r}.")
    limit = positions_of(model)
    if limit is not None and max_length > limit:
        raise LengthError(f"max_length={max_length}: the model has {limit} positions. Patch it, or take {limit}.")
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ConfigError(f"lm-evaluation-harness is not installed ({error}): pip install 'lm-eval[hf]'.") from error
    taken: dict[str, Any] = {"backend": "causal", "add_bos_token": False, "device": str(device_of(model))}
    taken |= {"max_length": max_length, "batch_size": batch_size, **settings}
    return HFLM(pretrained=model, tokenizer=tokenizer, **taken)
