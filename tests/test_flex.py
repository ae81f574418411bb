"""flex_attention gives what eager gives, where a bias is one of distances, and is refused elsewhere.

Neither score nor mask goes through torch's compiler here, but in the last test, as for users.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import hf_posenc as posenc
from hf_posenc.errors import BackendError
from hf_posenc.flex import FLEX, attend_flex
from hf_posenc.positions import Positions
from hf_posenc.scores import Scores
from tests.checkpoints import stories260k
from tests.models import SUBJECTS, TRAINED, assert_same, in_steps, logits, tokens

CASES = [("llama", "alibi"), ("llama", "t5"), ("gpt_neox", "kerple"), ("bert", "alibi"), ("bert", "sandwich")]
LENGTH = TRAINED + 9


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def both(subject: str, config: posenc.EncodingConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """One patched model on flex_attention and its twin on eager."""
    model = SUBJECTS[subject].fresh(attn_implementation="eager")
    eager = posenc.patch(model, config, verify=False)
    with torch.no_grad():
        for parameter in eager.base_model.posenc.parameters():  # some start at zero and would say nothing
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    flex = copy.deepcopy(eager)
    flex.set_attn_implementation(FLEX)
    return flex, eager


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask of two rows, one of which is padded."""
    ids = tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, slice(0, 11) if side == "left" else slice(-11, None)] = 0
    return ids, mask


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("subject", "name"), CASES)
def test_equals_eager_under_padding(subject: str, name: str) -> None:
    flex, eager = both(subject, posenc.encoding(name))
    for ids, mask in [padded("left"), padded("right")]:
        found, expected = (logits(model, ids, attention_mask=mask) for model in (flex, eager))
        assert_same(found[mask > 0], expected[mask > 0])
    assert_same(logits(flex, ids), logits(eager, ids))


@pytest.mark.usefixtures("uncompiled")
def test_decodes_from_a_cache() -> None:
    flex, eager = both("llama", posenc.Alibi())
    ids, mask = padded("left")
    found = in_steps(flex, ids, [40, 1, LENGTH - 42, 1], DynamicCache(), attention_mask=mask)
    assert_same(found[mask > 0], logits(eager, ids, attention_mask=mask)[mask > 0])


@pytest.mark.parametrize("config", [posenc.Alibi(), posenc.RoPE(theta=500.0)], ids=["alibi", "rope"])
def test_a_static_cache_is_refused(config: posenc.EncodingConfig) -> None:
    """The mask that transformers makes reads the length of such a cache while layers add to it."""
    model = SUBJECTS["opt"].fresh(attn_implementation=FLEX)
    posenc.patch(model, config, verify=False)
    with pytest.raises(BackendError, match="use a DynamicCache"):
        logits(model, tokens(1, 5), past_key_values=StaticCache(config=model.config, max_cache_len=9), use_cache=True)


@pytest.mark.usefixtures("uncompiled")
def test_positions_and_not_slots_make_the_distance() -> None:
    flex, eager = both("llama", posenc.encoding("t5"))
    ids, packed = tokens(2, 20), torch.cat([torch.arange(12), torch.arange(8)])[None]
    assert_same(logits(flex, ids, position_ids=packed), logits(eager, ids, position_ids=packed))
    apart, everything = torch.stack([torch.arange(0, 60, 3), torch.arange(20)]), torch.ones(2, 1, 20, 20).tril().bool()
    given = {"position_ids": apart, "attention_mask": everything}
    assert_same(logits(flex, ids, **given), logits(eager, ids, **given))
    assert float((logits(flex, ids, **given) - logits(flex, ids)).abs().max()) > 0.1


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("subject", "name"), [("llama", "t5"), ("bert", "alibi"), ("llama", "nope"), ("llama", "xpos")]
)
def test_packed_texts_see_only_themselves(subject: str, name: str) -> None:
    """With a bias and without one, in rows that are packed and padded differently."""
    flex, eager = both(subject, posenc.encoding(name))
    ids, mask = padded("left")
    documents = torch.stack([torch.arange(LENGTH) // 30, torch.arange(LENGTH) // 50])
    given = {"attention_mask": mask, "document_ids": documents}
    assert_same(logits(flex, ids, **given)[mask > 0], logits(eager, ids, **given)[mask > 0])
    alone = torch.cat([logits(flex, part) for part in ids[:1].split(30, 1)], 1)
    assert_same(logits(flex, ids, document_ids=documents)[:1], alone)


@pytest.mark.usefixtures("uncompiled")
def test_a_temperature_is_on_the_bias_too() -> None:
    flex, eager = both("llama", posenc.Alibi(temperature={"kind": "log_n"}))
    ids = tokens(1, LENGTH)
    assert_same(logits(flex, ids), logits(eager, ids))
    assert float((logits(flex, ids) - logits(both("llama", posenc.Alibi())[0], ids)).abs().max()) > 1e-3


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_without_a_mask_and_with_capped_scores(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 9, 8, generator=generator, dtype=torch.float64).unbind()
    query, key, value = query[:, :, 4:], key[:, ::2], value[:, ::2]  # five queries behind four keys; grouped heads
    positions = Positions(query=torch.arange(4, 9)[None], key=torch.arange(9)[None])
    encoding = posenc.Alibi().build(geometry(causal))
    scores = Scores(encoding, positions, mask=None, causal=causal, dtype=query.dtype, scaling=0.7)
    wide = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
    exact = 2 * (query @ wide[0].mT * 0.7 / 2).tanh() + encoding.bias(query, key, positions)
    exact = exact.masked_fill(torch.ones(5, 9).triu(5).bool(), -torch.inf) if causal else exact
    with torch.no_grad():
        found, _ = attend_flex(scores, query, key, value, softcap=2.0)
    assert_same(found, (exact.softmax(-1) @ wide[1]).transpose(1, 2), 1e-12)


def geometry(causal: bool) -> posenc.Geometry:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return posenc.Geometry(**sizes, max_position_embeddings=TRAINED, causal=causal)


@pytest.mark.usefixtures("uncompiled")
def test_is_verified_and_named() -> None:
    model = SUBJECTS["llama"].fresh(attn_implementation=FLEX)
    form = "a bias by distance, looked up by flex_attention"
    assert posenc.plan(model, posenc.Alibi()).form == form
    posenc.patch(model, posenc.Alibi(), verify=False)
    assert posenc.verify(model).findings["attends by"] == form
    posenc.unpatch(model)
    assert model.config._attn_implementation == FLEX


@pytest.mark.parametrize("name", ["fire", "shaw", "fox", "rerope"])
def test_what_depends_on_more_than_distance_is_refused(name: str) -> None:
    model = SUBJECTS["llama"].fresh(attn_implementation=FLEX)
    with pytest.raises(BackendError, match=r"'flex_attention' has no way to carry the scores of .*'sdpa'"):
        posenc.patch(model, posenc.encoding(name))
    assert not posenc.is_patched(model)


@pytest.mark.parametrize(
    ("given", "message"), [({}, "no backward pass on a CPU"), ({"dropout": 0.1}, "dropout"), ({"s_aux": 0}, "sinks")]
)
def test_what_the_kernel_cannot_do_is_refused(given: dict[str, Any], message: str) -> None:
    states = torch.zeros(3, 1, 4, 2, 8, requires_grad=not given)
    positions = Positions(query=torch.arange(2)[None], key=torch.arange(2)[None])
    encoding = posenc.Alibi().build(geometry(True))
    scores = Scores(encoding, positions, mask=None, causal=True, dtype=states.dtype, scaling=1.0)
    with pytest.raises(BackendError, match=message):
        attend_flex(scores, *states, **given)


@pytest.mark.slow  # transformers compiles the mask
@pytest.mark.parametrize("name", ["alibi", "kerple"])
def test_a_trained_model_says_the_same(name: str) -> None:
    model, tokenizer = stories260k()
    posenc.patch(model, posenc.encoding(name), verify=False)
    ids = torch.tensor([tokenizer("Once upon a time there was a girl who had a red ball.").input_ids * 20])
    said = logits(model, ids)
    model.set_attn_implementation(FLEX)
    assert_same(logits(model, ids), said)
    posenc.verify(model)  # at many lengths
