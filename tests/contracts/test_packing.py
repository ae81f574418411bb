"""Texts packed into one row under `document_ids` say what each says alone, and learn what each would teach alone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import hf_posenc as posenc
from hf_posenc import forms
from hf_posenc.errors import BackendError, ConfigError
from hf_posenc.positions import within_documents
from tests.contracts.test_encodings_matrix import CAN, trained
from tests.families.models import MODEL_TYPES, stock
from tests.families.stacked import stock as stacked
from tests.families.test_model_types import spec_for
from tests.models import CORE, SUBJECTS, assert_same, cells, logits, padding_of, patched, tokens

PARTS = (tokens(2, 5), tokens(2, 7, seed=1))
PACKED = torch.cat(PARTS, 1)
DOCUMENTS = torch.tensor([[4] * 5 + [9] * 7, [1] * 5 + [0] * 7])
"""Any numbers will do, in any order."""
NEAR = ["biogpt", "bloom", "gemma2", "gpt_neo", "mistral", "mobilebert", "mpnet", "openai-gpt", "xglm"]
"""Types that differ in how their masks are made."""


def assert_kept_apart(model: PreTrainedModel, tolerance: float = 1e-5) -> None:
    said = logits(model, PACKED, document_ids=DOCUMENTS)
    assert_same(said, torch.cat([logits(model, part) for part in PARTS], 1), tolerance)


def packing(model: PreTrainedModel) -> bool:
    """Whether the class of the model is one of ours; models whose rotation transformers computes stay as they were."""
    return hasattr(model, "posenc_joints")


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("subject", "spec"), [cell for cell in cells(list(SUBJECTS), CORE) if packing(patched(*cell.values))]
)
def test_packed_texts_say_what_they_say_alone(subject: str, spec: str, backend: str) -> None:
    assert_kept_apart(patched(subject, spec, backend))


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "name"), [cell for cell in CAN if cell != ("llama", "rope")])
def test_every_encoding_keeps_packed_texts_apart(subject: str, name: str) -> None:
    assert_kept_apart(trained(subject, name))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        pytest.param(kind, name, marks=() if kind in NEAR and name == "alibi" else pytest.mark.slow)
        for kind in MODEL_TYPES
        for name in ("alibi", "nope")
    ],
)
def test_every_model_type_keeps_packed_texts_apart(model_type: str, name: str) -> None:
    model = posenc.patch(stock(model_type), spec_for(model_type, name), verify=False)
    if model_type == "mobilebert":
        with pytest.raises(ConfigError, match="mixes neighbouring tokens"):
            logits(model, PACKED, document_ids=DOCUMENTS)
        return
    assert_kept_apart(model)


def loss_of(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    return model(input_ids=ids, **inputs).logits.log_softmax(-1).gather(-1, ids[..., None]).sum()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("subject", "spec"), [("gpt2", "alibi"), ("gpt2", "learned-tile"), ("llama", "rope-dynamic"), ("bert", "rope")]
)
def test_packed_texts_teach_what_they_teach_alone(subject: str, spec: str, checkpointed: bool) -> None:
    model = patched(subject, spec, own=True).train()
    for part in PARTS:
        loss_of(model, part).backward()
    alone = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss_of(model, PACKED, document_ids=DOCUMENTS).backward()
    for name, weight in model.named_parameters():
        if name in alone:
            assert weight.grad is not None
            assert_same(weight.grad, alone[name])


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "opt", "bert", "roberta"], ["alibi", "learned-tile"]))
def test_padding_between_and_around_texts_changes_nothing(subject: str, spec: str) -> None:
    model, pad = patched(subject, spec), padding_of(patched(subject, spec))
    gap = torch.full((2, 3), pad)
    ids = torch.cat([gap, PARTS[0], gap, PARTS[1], gap], 1)
    sizes = torch.tensor([3, 5, 3, 7, 3])
    mask = torch.tensor([0, 1, 0, 1, 0]).repeat_interleave(sizes).expand(2, -1)
    for numbers in ([1, 1, 1, 2, 2], [0, 1, 0, 2, 0]):  # padding as part of the texts, and as a text of its own
        said = logits(
            model, ids, attention_mask=mask, document_ids=torch.tensor(numbers).repeat_interleave(sizes).expand(2, -1)
        )
        assert said.isfinite().all()
        assert_same(said[:, mask[0] == 1], torch.cat([logits(model, part) for part in PARTS], 1))


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "bert"], ["alibi", "rope", "learned-tile"]))
def test_texts_may_be_interleaved(subject: str, spec: str) -> None:
    model, order = patched(subject, spec), torch.tensor([0, 5, 6, 1, 7, 8, 2, 3, 9, 10, 4, 11])
    said = logits(model, PACKED[:, order], document_ids=DOCUMENTS[:, order])
    assert_same(said, logits(model, PACKED, document_ids=DOCUMENTS)[:, order])


@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama"], ["alibi", "rope-dynamic", "sinusoidal"]))
def test_explicit_positions_win_and_documents_still_hide(subject: str, spec: str) -> None:
    model, positions = patched(subject, spec), 3 * torch.arange(12).expand(2, -1)
    said = logits(model, PACKED, document_ids=DOCUMENTS, position_ids=positions)
    assert_same(said[:, 5:], logits(model, PARTS[1], position_ids=positions[:, 5:]))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(("subject", "spec"), cells(["gpt2", "llama", "opt"], ["alibi", "learned-tile"]))
def test_a_cache_is_filled_by_packed_rows_but_never_followed_by_any(subject: str, spec: str, kind: str) -> None:
    model = patched(subject, spec)
    static = StaticCache(config=model.config, max_cache_len=20)
    cache = static if kind == "static" else DynamicCache(config=model.config)
    said = logits(model, PACKED, document_ids=DOCUMENTS, past_key_values=cache)
    assert_same(said, logits(model, PACKED, document_ids=DOCUMENTS))
    with pytest.raises(ConfigError, match="a cache that holds tokens already"):
        model(input_ids=PACKED[:, :1], document_ids=DOCUMENTS[:, :1], past_key_values=cache)
    output = model(input_ids=PACKED, document_ids=DOCUMENTS)
    assert not [name for name in ("cache", "past_key_values") if output.get(name) is not None]


@pytest.mark.parametrize("name", ["kerple", "fox"])
def test_packed_texts_take_the_fast_form_each_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows packed alike and differently, padded and not, down to texts of one token; interleaved ones cannot."""
    taken, fast = [], forms.attend_along

    def noted(*states: Any) -> Tensor | None:
        output = fast(*states)
        taken.append(output is not None)
        return output

    monkeypatch.setattr(forms, "attend_along", noted)
    model = posenc.patch(SUBJECTS["gpt2"].fresh(), posenc.encoding(name), verify=False)
    ids, mask, places = tokens(2, 40), torch.ones(2, 40, dtype=torch.long), torch.arange(40)
    mask[1, :9] = 0
    alike, apart = places[None].expand(2, -1) // 13, torch.stack([places // 13, places // 21])
    cases = [{"document_ids": alike}, {"document_ids": apart}, {"document_ids": apart, "attention_mask": mask}]

    def learned(**inputs: Tensor) -> list[Tensor]:
        said = model(ids, **inputs).logits[mask.bool()]
        return [said.detach(), *torch.autograd.grad(said.square().mean(), list(model.parameters()))]

    ours = [learned(**inputs) for inputs in cases]
    assert taken == [True] * 6
    learned(document_ids=places[None].expand(2, -1) % 3)
    assert taken[6:] == [False] * 2
    monkeypatch.setattr(forms, "attend_along", lambda *_: None)
    for inputs, found in zip(cases, ours, strict=True):
        for one, other in zip(found, learned(**inputs), strict=True):
            assert_same(one, other)


def test_what_document_ids_cannot_do_is_refused() -> None:
    model = patched("gpt2", "alibi")
    for wrong in (DOCUMENTS[:, :-1], DOCUMENTS.float(), DOCUMENTS[0]):
        with pytest.raises(ConfigError, match=r"one a token, \(2, 12\)"):
            model(input_ids=PACKED, document_ids=wrong)
    flash = patched("gpt2", "learned-tile", own=True)
    flash.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(BackendError, match="no way to carry document_ids"):
        flash(input_ids=PACKED, document_ids=DOCUMENTS)
    pair = posenc.patch(stacked("bart"), posenc.Alibi(), verify=False)
    with pytest.raises(ConfigError, match="an encoder-decoder takes none"):
        pair(input_ids=PACKED, decoder_input_ids=PACKED, document_ids=DOCUMENTS)
    encoder = pair.get_encoder()
    assert_same(
        encoder(input_ids=PACKED, document_ids=DOCUMENTS).last_hidden_state,
        torch.cat([encoder(input_ids=part).last_hidden_state for part in PARTS], 1),
    )


def test_trainer_keeps_the_column() -> None:
    model = patched("gpt2", "alibi")
    assert inspect.signature(model.forward).parameters["document_ids"].default is None
    assert list(inspect.signature(model.forward).parameters)[-1] != "document_ids", "further keywords come last"


@pytest.mark.parametrize("seed", range(20))
def test_positions_count_the_shown_tokens_of_their_text(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    documents = torch.randint(-2, 3, (3, 17), generator=generator)
    mask = torch.randint(0, 2, (3, 17), generator=generator)
    for shown in (mask, None):
        found = within_documents(documents, shown)
        for row in range(3):
            counts: dict[int, int] = {}
            for slot, document in enumerate(documents[row].tolist()):
                counts[document] = counts.get(document, 0) + (1 if shown is None else int(shown[row, slot]))
                assert found[row, slot] == max(0, counts[document] - 1)
