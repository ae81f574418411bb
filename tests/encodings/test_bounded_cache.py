"""Caches cut to what later queries can see: constant in length, and equal to the masked pass over everything."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache

import hf_posenc as posenc
from hf_posenc.caching import BoundedLayer, evicted, note
from hf_posenc.errors import UnsupportedEncodingError
from tests.models import SUBJECTS, assert_same, cache_of, in_steps, logits, padding_of, tokens

FIRST, RECENT = 3, 21
SPECS: dict[str, posenc.EncodingConfig] = {
    "sinks": posenc.encoding("sinks", first=FIRST, recent=RECENT),
    "lm_infinite": posenc.encoding("lm_infinite", first=FIRST, window=RECENT),
    "sinkless": posenc.encoding("sinks", first=0, recent=FIRST + RECENT),
}
BOTH = pytest.mark.parametrize("spec", ["sinks", "lm_infinite"])


@functools.cache
def patched(subject: str, spec: str) -> PreTrainedModel:
    return posenc.patch(SUBJECTS[subject].fresh(), SPECS[spec], verify=False)


def dynamic(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def held(cache: Any) -> set[int]:
    """How many tokens the layers of a cache hold."""
    return {part.shape[-2] for layer in cache.layers for part in (layer.keys, layer.values)}


@pytest.mark.parametrize(("subject", "spec"), [*(("llama", spec) for spec in SPECS), ("gpt2", "sinks")])
def test_chunks_and_steps_equal_the_pass_over_everything(subject: str, spec: str) -> None:
    """Chunks shorter and longer than the cache, before and after it is full."""
    model, ids = patched(subject, spec), tokens(2, 200)
    cache = dynamic(model)
    stepped = in_steps(model, ids, [5, 1, 15, 1, 1, 1, 1, 1, 40, 1, 1, 9, 1, 23, 24, 25, 1, 49], cache)
    assert_same(stepped, logits(model, ids))
    assert held(cache) == {FIRST + RECENT}
    assert (cache.get_seq_length(), evicted(cache)) == (200, 200 - FIRST - RECENT)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["sinks", "lm_infinite"])
def test_thousands_of_tokens_in_constant_memory(spec: str) -> None:
    model, ids = patched("llama", spec), tokens(1, 2400)
    whole, cache = logits(model, ids), dynamic(model)
    said, lengths, start = [logits(model, ids[:, :1600], past_key_values=cache)], set(), 1600
    while start < 2400:
        size = 1 if start % 20 < 8 else 4
        said.append(logits(model, ids[:, start : start + size], past_key_values=cache))
        lengths |= held(cache) | {cache.posenc_positions.shape[-1]}
        start += size
    assert lengths == {FIRST + RECENT}
    assert_same(torch.cat(said, dim=1), whole)


@pytest.mark.parametrize(
    ("subject", "spec"), [("llama", "sinks"), ("llama", "lm_infinite"), ("roberta-decoder", "sinks")]
)
def test_padded_rows_keep_their_own_first_tokens(subject: str, spec: str) -> None:
    """One row is full at once, one a little later, one much later; each is as if it were alone."""
    model, pads = patched(subject, spec), (0, 9, 70)
    rows, padding = [tokens(1, 120 - pad, seed=pad) for pad in pads], padding_of(model)
    ids = torch.cat([nn.functional.pad(row, (pad, 0), value=padding) for row, pad in zip(rows, pads, strict=True)])
    mask = (ids != padding).long()
    cache = dynamic(model)
    stepped = in_steps(model, ids, [40, *[1] * 35, 7, 1, 35, 1, 1], cache, attention_mask=mask)
    for row, alone, pad in zip(stepped, rows, pads, strict=True):
        assert_same(row[None, pad:], logits(model, alone))
    assert held(cache) == {FIRST + RECENT}


def generated(model: PreTrainedModel, ids: Tensor, mask: Tensor, **how: Any) -> Any:
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=30, min_new_tokens=30, return_dict_in_generate=True, **how
    )


@BOTH
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_bounds_its_cache_by_itself(spec: str, beams: int) -> None:
    """Rows of a padded batch, and beams that are reordered: the tokens are those of full passes without a cache."""
    model = patched("llama", spec)
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[1, :13], ids[1, :13] = 0, padding_of(model)
    found = generated(model, ids, mask, num_beams=beams, do_sample=False)
    expected = generated(model, ids, mask, num_beams=beams, do_sample=False, use_cache=False)
    assert torch.equal(found.sequences, expected.sequences)
    assert held(cache_of(found)) == {FIRST + RECENT}


@BOTH
@pytest.mark.parametrize("pickled", [True, False])
def test_a_cut_cache_copied_repeated_and_selected_goes_on(spec: str, pickled: bool) -> None:
    model, pads = patched("llama", spec), (0, 40)
    rows = [tokens(1, 60 - pad, seed=pad) for pad in pads]
    ids = torch.cat([nn.functional.pad(row, (pad, 0)) for row, pad in zip(rows, pads, strict=True)])
    mask = (ids != 0).long()
    cache = dynamic(model)
    logits(model, ids, attention_mask=mask, past_key_values=cache)
    cache = pickle.loads(pickle.dumps(cache)) if pickled else copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    cache.batch_select_indices(torch.tensor([0, 3]))
    new = tokens(2, 4, seed=2)
    said = logits(model, new, attention_mask=torch.cat([mask.flip(0), torch.ones_like(new)], 1), past_key_values=cache)
    for answer, start, more in zip(said, rows[::-1], new, strict=True):
        assert_same(answer[None], logits(model, torch.cat([start, more[None]], dim=1))[:, -4:])


def test_a_batch_that_grows_out_of_one_row_goes_on() -> None:
    model, ids, cache = patched("llama", "sinks"), tokens(1, 60), dynamic(patched("llama", "sinks"))
    logits(model, ids, past_key_values=cache)
    cache.batch_repeat_interleave(3)
    new = tokens(3, 5, seed=1)
    whole = logits(model, torch.cat([ids.expand(3, -1), new], dim=1))
    assert_same(logits(model, new, past_key_values=cache), whole[:, -5:])


def test_what_cannot_come_back_is_refused() -> None:
    model, cache = patched("llama", "sinks"), dynamic(patched("llama", "sinks"))
    logits(model, tokens(1, 10), past_key_values=cache)
    cache.crop(-2)
    logits(model, tokens(1, 40), past_key_values=cache)
    with pytest.raises(UnsupportedEncodingError, match="24 tokens have left this cache, so it cannot be cut back"):
        cache.crop(-2)
    with pytest.raises(UnsupportedEncodingError, match="pass a padding mask over the whole text"):
        logits(model, tokens(1, 1), past_key_values=cache, attention_mask=torch.zeros(1, 1, 1, 49))


def test_a_cache_is_cut_where_every_layer_allows_it_and_no_earlier() -> None:
    sinks, window = SPECS["sinks"].to_dict(), {"name": "lm_infinite", "first": 5, "window": 9}
    ids = tokens(1, 90)
    for other, expected in ((window, 5 + RECENT), ({"name": "nope"}, 90)):
        config = posenc.encoding("layered", pattern=[sinks, other])
        model = posenc.patch(SUBJECTS["llama"].fresh(), config, verify=False)
        cache = dynamic(model)
        assert_same(in_steps(model, ids, [50, *[1] * 40], cache), logits(model, ids))
        assert held(cache) == {expected}


def test_other_caches_and_positions_with_repeats_are_left_whole() -> None:
    model, ids = patched("llama", "sinks"), tokens(1, 60)
    fixed = StaticCache(config=model.config, max_cache_len=80)
    assert_same(in_steps(model, ids, [40, *[1] * 20], fixed), logits(model, ids))
    cache, places = dynamic(model), torch.arange(30).repeat_interleave(2)[None]
    stepped = in_steps(model, ids, [50, *[1] * 10], cache, position_ids=places)
    assert_same(stepped, logits(model, ids, position_ids=places))
    assert not isinstance(cache.layers[0], BoundedLayer)
    note(cache, places)
    assert evicted(cache) == 0
