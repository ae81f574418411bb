"""Whatever a call is given is heard or refused, never dropped without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import hf_posenc as posenc
from hf_posenc.errors import ConfigError
from tests.families.models import stock
from tests.families.stacked import answers, source
from tests.families.stacked import stock as stacked
from tests.families.test_model_types import spec_for
from tests.models import CORE, SUBJECTS, TRAINED, assert_same, cells, logits, patched, tokens

IDS = tokens(2, 30)
PADDED = torch.ones_like(IDS)
PADDED[0, :6] = 0
WINDOWED = ["cohere2", "gemma2", "gemma3_text", "gpt_oss", "mistral", "olmo3"]
"""Types of which some or all layers see the nearest keys only."""


def pairwise(mask: Tensor, *, causal: bool) -> Tensor:
    """What every query sees under a padding mask, (b, 1, n, n) bool."""
    length = mask.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool)
    return (seen.tril() if causal else seen) & (mask[:, None, None] != 0)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "opt", "llama", "bert"], CORE))
def test_a_mask_of_every_pair_says_what_a_padding_mask_says(subject: str, spec: str, backend: str) -> None:
    """Boolean or added, cached or not; it says nothing of positions, which are then given."""
    model, causal = patched(subject, spec, backend), SUBJECTS[subject].causal
    said = logits(model, IDS, attention_mask=PADDED)[PADDED == 1]
    places = (PADDED.cumsum(-1) - 1).clamp(min=0)
    seen = pairwise(PADDED, causal=causal)
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    stock_adds_booleans = backend == "eager" and not hasattr(model, "posenc_joints")  # the native route
    for mask in (added,) if stock_adds_booleans else (added, seen):
        found = logits(model, IDS, attention_mask=mask, position_ids=places)
        assert_same(found[PADDED == 1], said)
        if causal:
            cache, parts = DynamicCache(config=model.config), []
            for start, end in ((0, 20), (20, 30)):
                cut = {"attention_mask": mask[:, :, start:end, :end], "position_ids": places[:, start:end]}
                parts.append(logits(model, IDS[:, start:end], past_key_values=cache, **cut))
            assert_same(torch.cat(parts, 1)[PADDED == 1], said)


@pytest.mark.parametrize(("subject", "spec"), cells(list(SUBJECTS), ["alibi", "learned-tile", "rope-dynamic"]))
def test_embedded_tokens_are_heard_as_ids_are(subject: str, spec: str) -> None:
    model = patched(subject, spec)
    with torch.no_grad():
        states = model.get_input_embeddings()(IDS)
        said = model(inputs_embeds=states, attention_mask=PADDED).logits
    assert_same(said[PADDED == 1], logits(model, IDS, attention_mask=PADDED)[PADDED == 1])


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        pytest.param(kind, name, marks=() if (kind, name) == ("gemma3_text", "alibi") else pytest.mark.slow)
        for kind in WINDOWED
        for name in ("alibi", "rope", "sinusoidal")
    ],
)
def test_windows_and_a_static_cache_go_together(model_type: str, name: str) -> None:
    """`generate` then makes a mask for every type of layer, in a dict."""
    model, ids = posenc.patch(stock(model_type), spec_for(model_type, name), verify=False), tokens(2, TRAINED - 6)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    how = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    found = model.generate(ids, cache_implementation="static", disable_compile=True, **how)
    assert torch.equal(found, model.generate(ids, use_cache=False, **how))


@pytest.mark.parametrize("name", ["layer_past", "past_key_value"])
@pytest.mark.parametrize("subject", ["gpt2", "llama", "opt"])
def test_a_cache_by_a_name_that_nobody_hears_is_refused(subject: str, name: str) -> None:
    model = patched(subject, "alibi")
    inputs: dict[str, Any] = {name: DynamicCache(config=model.config)}
    with pytest.raises(ConfigError, match=rf"drop {name} .* pass the cache as past_key_values"):
        logits(model, IDS, **inputs)


@pytest.mark.parametrize("model_type", ["bart", "t5"])
def test_what_is_meant_for_the_decoder_is_heard_there_or_refused(model_type: str) -> None:
    model = posenc.patch(stacked(model_type), posenc.Alibi(), verify=False)
    given, places = source(model, tokens(2, 20, seed=1)), torch.arange(30)[None]
    with pytest.raises(ConfigError, match=r"drop decoder_position_ids .* decoder_attention_mask shows"):
        answers(model, given, IDS, decoder_position_ids=places)
    heard = {"encoder_outputs": model.get_encoder()(**given)}
    with pytest.raises(ConfigError, match="drop decoder_position_ids"):
        answers(model, heard, IDS, decoder_position_ids=places)
    for name in ("document_ids", "decoder_document_ids"):
        with pytest.raises(ConfigError, match="an encoder-decoder takes none"):
            answers(model, given, IDS, **{name: torch.zeros_like(IDS)})
