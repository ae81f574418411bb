"""Every protocol against its origin, and the laws that hold for all of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_outputs import CausalLMOutput

from hf_posenc.data import load_documents
from hf_posenc.errors import ConfigError, DataError, UnknownNameError
from hf_posenc.evaluation import LengthCurve, perplexity_by_length
from hf_posenc.evaluation.protocols import PROTOCOLS, protocol_named, shown_together
from hf_posenc.quickstart import BASE
from tests.checkpoints import stories260k
from tests.evaluation import origins
from tests.evaluation.models import VOCABULARY, llama, random_documents

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends. "
    "One day she found a big red ball and took it home. Her mom said it was the best ball in the town. "
)


def curve(model: nn.Module, documents: Any, length: int, protocol: str, **options: Any) -> LengthCurve:
    return perplexity_by_length(model, documents, [length], protocol=protocol, **options)


def compare(model: Any, documents: list[list[int]], length: int, stride: int) -> None:
    """Each protocol and its origin agree to six digits on the same model and documents."""
    stream = [token for ids in documents for token in ids]
    bos = model.config.bos_token_id
    for step in (stride, length):
        found = curve(model, documents, length, "hf_docs", stride=step).origin_ppl[length]
        assert found == pytest.approx(origins.hf_docs(model, stream, length, step), rel=1e-5)
    found = curve(model, documents, length, "yarn", stride=stride, batch_size=3).origin_ppl[length]
    assert found == pytest.approx(origins.yarn(model, documents, length, stride, bos), rel=1e-5)
    found = curve(model, documents, length, "longlora", stride=stride, batch_size=3).ppl[length]
    assert found == pytest.approx(origins.longlora(model, stream, length, stride), rel=1e-5)
    found = curve(model, documents, length, "lm_eval_rolling", batch_size=2).nll_sum[length]
    expected = math.fsum(origins.lm_eval_rolling(model, ids, length, bos) for ids in documents)
    assert found == pytest.approx(expected, rel=1e-5)


def test_protocols_reproduce_their_origins() -> None:
    compare(llama(), random_documents(50, 33), 24, 11)


def test_protocols_reproduce_their_origins_on_the_bundled_gpt2() -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(BASE), AutoTokenizer.from_pretrained(BASE)
    texts = [document.text[:500] for document in load_documents("embedded", split="held_out", min_characters=500)[:2]]
    compare(model.eval(), [tokenizer(text)["input_ids"] for text in texts], 64, 40)


def test_protocols_reproduce_their_origins_on_stories260k() -> None:
    model, tokenizer = stories260k()
    texts = [STORY * 3, STORY[60:] * 2]
    compare(model, [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts], 128, 50)


@pytest.mark.slow
def test_lm_evaluation_harness_itself_gives_the_same_nats_and_bits() -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is not installed")
    instance = pytest.importorskip("lm_eval.api.instance")
    model, tokenizer = stories260k()
    texts = [STORY * 6, STORY[60:] * 3]
    harness = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, max_length=256, add_bos_token=False)
    requests = [instance.Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
    nats = -sum(harness.loglikelihood_rolling(requests))
    found = curve(model, texts, 256, "lm_eval_rolling", tokenizer=tokenizer)
    assert found.nll_sum[256] == pytest.approx(nats, rel=1e-5)
    assert found.bits_per_byte is not None
    n_bytes = sum(len(text.encode()) for text in texts)
    assert found.bits_per_byte[256] == pytest.approx(nats / n_bytes / math.log(2), rel=1e-5)


def test_windows_of_means_lean_towards_tails_and_tokens_do_not() -> None:
    """(mean nats, targets) = (2, 1024), (3, 256), (4, 16): 9.2278 over tokens, 20.0855 over windows."""
    model = _Steps()
    documents = [[2] * 1024 + [3] * 256 + [4] * 16]
    found = curve(model, documents, 1025, "yarn", stride=256, bos_policy="every_window")
    assert found.n_tokens[1025] == 1296
    assert found.ppl[1025] == pytest.approx(9.2278141, rel=1e-6)
    assert found.origin_ppl[1025] == pytest.approx(math.exp(3), rel=1e-6)


class _Constructed(nn.Module):
    """A model with no weights to speak of, whose logits are what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 1)
        self.config = type("Config", (), {"bos_token_id": 1, "model_type": "made up", "name_or_path": "made up"})()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def nats(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Loss (b, n, vocabulary) of every token that might follow."""
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, **_: object) -> CausalLMOutput:
        return CausalLMOutput(logits=-self.nats(input_ids))


def _certain(nats: torch.Tensor) -> torch.Tensor:
    """Nats (..., vocabulary) so that some of them are these, the rest of the probability lying on token 0."""
    nats = nats.double().clone()
    left = 1 - (-nats[..., 1:]).exp().sum(-1)
    nats[..., 0] = -left.clamp(min=1e-300).log()
    return nats


class _Steps(_Constructed):
    """Tokens 2, 3 and 4 cost 2, 3 and 4 nats wherever they stand."""

    def nats(self, input_ids: torch.Tensor) -> torch.Tensor:
        costs = torch.full((VOCABULARY,), 60.0)
        costs[2:5] = torch.tensor([2.0, 3.0, 4.0])
        return _certain(costs).expand(*input_ids.shape, -1)


class _ContextOnly(_Constructed):
    """Any token costs 5 + 8 / (number of tokens visible) nats: the loss depends on visible context only."""

    def nats(self, input_ids: torch.Tensor) -> torch.Tensor:
        visible = torch.arange(1, input_ids.shape[1] + 1).double()
        costs = (5 + 8 / visible)[:, None].expand(-1, VOCABULARY)  # (n, vocabulary)
        return _certain(costs).expand(len(input_ids), -1, -1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_losses_that_depend_on_context_only_add_up_by_hand(protocol: str) -> None:
    """9 tokens, windows of 4, stride 2: which target sees how many tokens, written down by hand."""
    seen = {  # tokens visible to each scored target, in order
        "nonoverlapping": [1, 2, 3, 4, 1, 2, 3, 4],
        "sliding": [1, 2, 3, 4, 3, 4, 3, 4],
        "hf_docs": [1, 2, 3, 2, 3, 2, 3, 2],  # tokens 0-3, 2-5, 4-7, 6-8: a window's last token predicts nothing
        "lm_eval_rolling": [1, 2, 3, 4, 1, 2, 3, 4, 4],  # BOS + 9 tokens; the last window reaches back
        "yarn": [1, 2, 3, 2, 3, 2, 3, 2, 3],  # BOS + 3 tokens a window
        "longlora": [1, 2, 3, 1, 2, 3],  # tokens 0-3, 2-5; 4-7 fits too and is dropped
        "fixed_target": [3, 4],
    }[protocol]
    stride = {} if PROTOCOLS[protocol].stride is None else {"stride": 2}
    document = [[5, 6, 7, 8, 9, 10, 11, 12, 13]]
    found = curve(_ContextOnly(), document, 4, protocol, **stride)
    assert found.n_tokens[4] == len(seen)
    assert found.nll_sum[4] == pytest.approx(sum(5 + 8 / visible for visible in seen), rel=1e-9)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("length", "stride"), [(2, 1), (8, 3), (16, 15), (30, 1)])
def test_a_uniform_model_scores_its_vocabulary(protocol: str, length: int, stride: int) -> None:
    model = llama()
    model.lm_head.weight.data.zero_()  # type: ignore[union-attr, operator]
    options = {} if PROTOCOLS[protocol].stride is None else {"stride": stride}
    found = curve(model, random_documents(40, 37), length, protocol, **options)
    assert found.ppl[length] == pytest.approx(VOCABULARY, rel=1e-9)
    assert found.origin_ppl[length] == pytest.approx(VOCABULARY, rel=1e-9)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_batch_size_and_order_change_nothing(protocol: str) -> None:
    model, documents = llama(), random_documents(40, 51, 40, 22)
    stride = {} if PROTOCOLS[protocol].stride is None else {"stride": 5}
    first = curve(model, documents, 16, protocol, **stride)
    others = [curve(model, documents, 16, protocol, batch_size=4, **stride)]
    if not PROTOCOLS[protocol].joined:  # a stream is its order
        others.append(curve(model, documents[::-1], 16, protocol, batch_size=3, **stride))
    for other in others:
        assert other.n_tokens == first.n_tokens
        assert other.text_hash == first.text_hash
        for field in ("nll_sum", "origin_nll"):
            assert getattr(other, field)[16] == pytest.approx(getattr(first, field)[16], rel=1e-6)
        if not PROTOCOLS[protocol].joined:
            assert other.interval[16] == pytest.approx(first.interval[16], rel=1e-6)


def test_a_fixed_target_shows_what_context_brings() -> None:
    found = perplexity_by_length(
        _ContextOnly(), random_documents(65, 80, 10), [8, 16, 64], protocol="fixed_target", stride=2
    )
    assert (found.n_documents, found.n_left_out) == (2, 1)
    assert found.n_tokens == {8: 4, 16: 4, 64: 4}
    assert found.gain[64] == pytest.approx((8 / 7 + 8 / 8 - 8 / 63 - 8 / 64) / 2, rel=1e-9)
    assert found.effective_length is None  # this model says of no length that it was trained for it
    assert dataclasses.replace(found, trained_length=8).effective_length == 64


def test_the_origin_says_which_bos_and_which_length_is_too_short() -> None:
    model, documents = llama(), random_documents(40)
    with pytest.raises(ConfigError, match="would be another protocol"):
        curve(model, documents, 8, "lm_eval_rolling", bos_policy="none")
    with pytest.raises(ConfigError, match="at least 2"):
        curve(model, documents, 1, "yarn", stride=1)
    with pytest.raises(ConfigError, match=r"default stride of 'yarn'.*7, and is 256"):
        curve(model, documents, 8, "yarn")
    with pytest.raises(DataError, match="cuts no window of 40 tokens out of 40"):
        curve(model, documents, 40, "longlora", stride=1)
    model.config.bos_token_id = None  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="names one"):
        curve(model, documents, 8, "yarn", stride=2)


@pytest.mark.parametrize("stride", [0, -1, 9, True, 2.0])
def test_strides_that_skip_targets_are_refused(stride: Any) -> None:
    with pytest.raises(ConfigError, match="from 1 to what the shortest length holds, 8"):
        PROTOCOLS["sliding"].strides([8, 16], stride)


def test_protocol_errors_name_the_remedy() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'sliding'"):
        protocol_named("slidding")
    with pytest.raises(ConfigError, match="means nothing"):
        PROTOCOLS["nonoverlapping"].strides([8], 4)
    assert PROTOCOLS["sliding"].strides([1, 9, 64], None) == {1: 1, 9: 4, 64: 32}


def test_windows_with_and_without_overlap_are_measured_together() -> None:
    assert shown_together(["sliding"]) == shown_together(["nonoverlapping"]) == ["nonoverlapping", "sliding"]
    assert shown_together(["yarn", "sliding", "yarn"]) == ["nonoverlapping", "sliding", "yarn"]
    assert shown_together(["yarn"]) == ["yarn"]
