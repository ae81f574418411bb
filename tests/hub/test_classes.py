"""The classes of patched models do what stock classes do: heads, keywords, and sizes that the user lets differ."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

import hf_posenc as posenc
from tests.models import tokens


@pytest.fixture
def classifier() -> LlamaForSequenceClassification:
    """Return a patched model whose class has its base made by AutoModel."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=61, pad_token_id=60, num_labels=3, **shape)).eval()
    return posenc.patch(model, posenc.Alibi())


def test_a_class_whose_base_is_made_by_auto_model_loads(
    classifier: LlamaForSequenceClassification, tmp_path: Path
) -> None:
    ids = tokens(2, 9).clamp(max=59)
    expected = classifier(ids).logits
    classifier.save_pretrained(tmp_path)
    for loaded in (
        posenc.from_pretrained(tmp_path),
        AutoModelForSequenceClassification.from_pretrained(pretrained_model_name_or_path=tmp_path),
        copy.deepcopy(classifier),
    ):
        assert torch.equal(loaded.eval()(ids).logits, expected)
        assert posenc.is_patched(loaded)


def test_a_class_builds_a_patched_model_from_a_patched_config(classifier: LlamaForSequenceClassification) -> None:
    built = type(classifier)(classifier.config)
    assert type(built.model.layers[0].self_attn).__name__ == "AlibiLlamaAttention"
    assert not hasattr(built.model, "posenc_record"), "one model, one record"
    posenc.verify(built)


def test_a_head_may_differ_where_the_user_says_so(classifier: LlamaForSequenceClassification, tmp_path: Path) -> None:
    classifier.save_pretrained(tmp_path)
    loaded = type(classifier).from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert loaded.score.weight.shape[0] == 5
    assert torch.equal(loaded.model.embed_tokens.weight, classifier.model.embed_tokens.weight)


def test_an_unknown_backend_is_unknown_to_transformers_too(classifier: LlamaForSequenceClassification) -> None:
    with pytest.raises(ValueError, match="foo"):
        classifier.set_attn_implementation("foo")


def test_the_attentions_that_are_returned_are_those_attended_with(classifier: LlamaForSequenceClassification) -> None:
    classifier.set_attn_implementation("eager")
    output = classifier(tokens(1, 9).clamp(max=59), output_attentions=True)
    output.attentions[0].retain_grad()
    output.logits.sum().backward()
    assert output.attentions[0].grad is not None
