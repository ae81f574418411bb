"""Load an export with nothing but transformers and say what it says; run by its path, in a process of its own.

Nothing of this package is imported here: what the export needs to load is what its readers have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor


@torch.no_grad()
def answers(model: Any, asked: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what a model makes of a short and of a long text.

    Args:
        model: a stock or a patched model, in eval mode.
        asked: `short` (2, n) and `long` (1, m) token ids, and `steps` (1,) int64, new tokens after the long text in a
            model that generates.

    Returns:
        `scores` of the short text, (2, n, width) or of a classifier (2, width), and `tokens`: those generated after the
        long text, (steps,), or in a model that does not, the largest score at every place of it, (m,) or (1,).
    """
    short, long = asked["short"], asked["long"]
    both = {"decoder_input_ids": short} if model.config.is_encoder_decoder else {}
    scores = _first(model(input_ids=short, **both))
    if int(asked["steps"]) and model.can_generate():
        settings = {"max_new_tokens": int(asked["steps"]), "min_new_tokens": int(asked["steps"]), "do_sample": False}
        both = {"decoder_input_ids": long} if model.config.is_encoder_decoder else {}
        mask = torch.ones_like(long)
        padding = model.generation_config.pad_token_id or 0
        whole = model.generate(
            input_ids=long, attention_mask=mask, num_beams=1, pad_token_id=padding, **settings, **both
        )
        tokens = whole[0, -int(asked["steps"]) :]
    else:
        both = {"decoder_input_ids": long} if model.config.is_encoder_decoder else {}
        tokens = _first(model(input_ids=long, **both)).argmax(-1).flatten()
    return {"scores": scores.float().cpu(), "tokens": tokens.cpu()}


def _first(output: Any) -> Tensor:
    found: Tensor = output.logits if getattr(output, "logits", None) is not None else output[0]
    return found


def main(folder: str, expected: str) -> dict[str, Any]:
    """Return how an export in `folder` answers what is asked in the safetensors file `expected`.

    Returns:
        `scores`: largest difference; `size`: largest magnitude; `tokens`: how many are equal before the first that is
        not; `of`: how many there are; `missing` and `unexpected` names of weights.
    """
    asked = load_file(expected)
    name = json.loads(Path(folder, "config.json").read_text())["architectures"][0]
    cls = getattr(transformers, name)
    model, info = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    found = answers(model.eval(), asked)
    difference = (found["scores"] - asked["scores"]).abs().max()
    equal = (found["tokens"] == asked["tokens"]).long().cumprod(0)
    return {
        "scores": float(difference.nan_to_num(torch.inf)),
        "size": float(asked["scores"].abs().max()),
        "tokens": int(equal.sum()),
        "of": len(equal),
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "strangers": sorted(name for name in sys.modules if name.partition(".")[0] == "hf_posenc"),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
