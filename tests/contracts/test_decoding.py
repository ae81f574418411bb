"""What a model says does not depend on how its text is cut into calls, nor on the cache that holds the past."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import hf_posenc as posenc
from tests.models import (
    ATTENDING,
    CAUSAL,
    CORE,
    SUBJECTS,
    TRAINED,
    VARIANTS,
    VOCABULARY,
    Subject,
    assert_same,
    cells,
    in_steps,
    logits,
    padding_of,
    patched,
    reach,
    tokens,
)

PAD = 5


def dynamic(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def static(model: PreTrainedModel) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=3 * TRAINED + PAD + 3)


CACHES = [pytest.param(dynamic, id="dynamic"), pytest.param(static, id="static")]


def schedule(total: int) -> list[int]:
    """Sizes of calls: a prefill, chunks and single steps, on both sides of the trained length."""
    sizes, rest = [7, 1, 1, 13, 1, 1], total
    while sum(sizes) < total:
        sizes += [min(40, rest - sum(sizes)), 1, 1]
    while sum(sizes) > total:
        sizes[-1] -= 1
        sizes = sizes if sizes[-1] else sizes[:-1]
    return sizes


def left_padded(model: PreTrainedModel, ids: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """The ids behind `pad` padding tokens, and the mask that says so."""
    pads = torch.full_like(ids[:, :pad], padding_of(model))
    return torch.cat([pads, ids], dim=1), torch.cat([torch.zeros_like(pads), torch.ones_like(ids)], dim=1)


@pytest.mark.parametrize(
    ("backend", "cache"), [("eager", dynamic), ("sdpa", static)], ids=["eager-dynamic", "sdpa-static"]
)
@pytest.mark.parametrize(("subject", "spec"), cells(CAUSAL, CORE))
def test_chunks_and_steps_equal_the_full_forward(subject, spec, backend, cache) -> None:  # type: ignore[no-untyped-def]
    model = patched(subject, spec, backend)
    ids = tokens(2, reach(spec, 3 * TRAINED))
    stepped = in_steps(model, ids, schedule(ids.shape[1]), cache(model))
    assert_same(stepped, logits(model, ids))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "opt", "llama", "roberta-decoder"], CORE))
def test_padded_rows_decode_as_if_they_were_alone(subject, spec, cache) -> None:  # type: ignore[no-untyped-def]
    model = patched(subject, spec)
    long, short = tokens(1, reach(spec, 2 * TRAINED)), tokens(1, reach(spec, 2 * TRAINED) - PAD, seed=1)
    padded, hidden = left_padded(model, short, PAD)
    ids, mask = torch.cat([long, padded]), torch.cat([torch.ones_like(long), hidden])
    stepped = in_steps(model, ids, schedule(ids.shape[1]), cache(model), attention_mask=mask)
    assert_same(stepped[:1], logits(model, long))
    assert_same(stepped[1:, PAD:], logits(model, short))


@pytest.mark.parametrize("variant", [name for name, subject in VARIANTS.items() if subject.causal])
@pytest.mark.parametrize("spec", ["alibi", "rope-dynamic", "rope-yarn"])
def test_variants_decode_alike(variant: str, spec: str) -> None:
    model = patched(variant, spec, "eager")
    model = getattr(model, "transformer", model) if "classifier" in variant else model
    ids = tokens(2, 2 * TRAINED)
    assert_same(in_steps(model, ids, schedule(ids.shape[1]), dynamic(model)), logits(model, ids))


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama"], ATTENDING))
def test_every_single_step_equals_the_full_forward(subject: str, spec: str) -> None:
    model = patched(subject, spec)
    ids = tokens(1, 3 * TRAINED)
    assert_same(in_steps(model, ids, [1] * ids.shape[1], dynamic(model)), logits(model, ids))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["fox", "cope"])
def test_what_counts_keys_heeds_that_a_sliding_layer_forgets_them(name, cache) -> None:  # type: ignore[no-untyped-def]
    """Calls of one token and of several, by encodings that have to find a query's own key among those that are left."""
    fields = {**SUBJECTS["llama"].fields, "sliding_window": 12}
    model = Subject("MistralForCausalLM", "MistralConfig", fields).fresh()
    posenc.patch(model, posenc.encoding(name), verify=False)
    ids = tokens(2, 40)
    assert_same(in_steps(model, ids, [20, 1, 1, 13, 1, 4], cache(model)), logits(model, ids))


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama", "roberta-decoder"], ATTENDING))
def test_a_cache_cut_back_goes_on_from_there(subject: str, spec: str) -> None:
    model, cache = patched(subject, spec), None
    ids, other = tokens(1, 60), tokens(1, 60, seed=1)
    cache = dynamic(model)
    in_steps(model, ids, [50], cache)
    cache.crop(-30)
    joined = torch.cat([ids[:, :20], other[:, :30]], dim=1)
    again = logits(model, other[:, :30], past_key_values=cache, attention_mask=torch.ones_like(joined))
    assert_same(again, logits(model, joined)[:, 20:])


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama", "roberta-decoder"], ATTENDING))
def test_a_reset_static_cache_remembers_nothing(subject: str, spec: str) -> None:
    model = patched(subject, spec)
    cache = static(model)
    in_steps(model, tokens(2, 40, seed=1), [30, 5, 5], cache)
    cache.reset()
    ids = tokens(2, 50)
    assert_same(in_steps(model, ids, schedule(50), cache), logits(model, ids))


@pytest.mark.parametrize("pickled", [True, False])
@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama", "roberta-decoder"], ATTENDING))
def test_a_cache_copied_repeated_and_selected_keeps_its_positions(subject: str, spec: str, pickled: bool) -> None:
    """What prefix caching, beams and best-of-n sampling do to a cache between two calls."""
    model = patched(subject, spec)
    short, long = tokens(1, 20), tokens(1, 23, seed=1)
    padded, hidden = left_padded(model, short, 3)
    ids, mask = torch.cat([padded, long]), torch.cat([hidden, torch.ones_like(long)])
    cache = dynamic(model)
    logits(model, ids, attention_mask=mask, past_key_values=cache)
    cache = pickle.loads(pickle.dumps(cache)) if pickled else copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert isinstance(cache, DynamicCache)
    new = tokens(2, 4, seed=2)
    longer = torch.cat([mask.flip(0), torch.ones_like(new)], dim=1)
    said = logits(model, new, attention_mask=longer, past_key_values=cache)
    assert_same(said[:1], logits(model, torch.cat([long, new[:1]], dim=1))[:, -4:])
    assert_same(said[1:], logits(model, torch.cat([short, new[1:]], dim=1))[:, -4:])


def generated(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, **how: object) -> Tensor:
    """New tokens, greedy unless told otherwise."""
    mask = torch.ones_like(ids) if mask is None else mask
    found = model.generate(ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False, **how)
    # transformers 5.5 appends one token too many where it looks prompts up
    return found[:, ids.shape[1] : ids.shape[1] + 12]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("subject", "spec"), cells(CAUSAL, [*ATTENDING, "sinusoidal", "learned-tile"]))
def test_generate_takes_the_tokens_that_full_forwards_take(subject: str, spec: str) -> None:
    model = patched(subject, spec)
    ids = tokens(1, TRAINED - 6)
    full = ids
    for _ in range(12):
        full = torch.cat([full, logits(model, full)[:, -1:].argmax(-1)], dim=1)
    expected = full[:, ids.shape[1] :]
    assert torch.equal(generated(model, ids), expected)
    assert torch.equal(generated(model, ids, cache_implementation="static"), expected)
    assert torch.equal(generated(model, ids, use_cache=False), expected)
    assert torch.equal(generated(model, ids, prompt_lookup_num_tokens=3, eos_token_id=VOCABULARY), expected)


@pytest.mark.parametrize(("subject", "spec"), cells(CAUSAL, [*ATTENDING, "sinusoidal", "learned-tile"]))
def test_beams_in_a_padded_batch_equal_rows_alone(subject: str, spec: str) -> None:
    model = patched(subject, spec)
    long, short = tokens(1, TRAINED - 6), tokens(1, TRAINED - 16, seed=1)
    padded, hidden = left_padded(model, short, 10)
    together = generated(model, torch.cat([long, padded]), torch.cat([torch.ones_like(long), hidden]), num_beams=3)
    assert torch.equal(together[:1], generated(model, long, num_beams=3))
    assert torch.equal(together[1:], generated(model, short, num_beams=3))
