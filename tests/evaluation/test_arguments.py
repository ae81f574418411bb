"""Bad input is refused before anything is computed."""

from __future__ import annotations

import pytest
from transformers import BertConfig, BertForMaskedLM

from hf_posenc.errors import ConfigError, DataError, UnknownNameError, UnsupportedFamilyError
from hf_posenc.evaluation import perplexity_by_length
from tests.evaluation.models import SMALL, gpt2, random_documents


@pytest.mark.parametrize(
    ("documents", "kwargs", "error", "message"),
    [
        ([], {}, DataError, "no documents"),
        ([[5], []], {}, DataError, "All 2 documents are too short"),
        ([["a"]], {}, DataError, "neither a text nor a row"),
        ([5, 6, 7], {}, DataError, "single one"),
        (["a text"], {}, DataError, "tokenizer="),
        ([[5, 97]], {}, DataError, "token id 97, and the model's vocabulary has 97"),
        ([[5, -1]], {}, DataError, "token id -1"),
        ([[0.5, 1.5]], {}, DataError, "integer token ids"),
        ([[5, 6]], {"lengths": []}, ConfigError, "positive integers"),
        ([[5, 6]], {"lengths": [8, 0]}, ConfigError, "positive integers"),
        ([[5, 6]], {"lengths": [8.0]}, ConfigError, "positive integers"),
        ([[5, 6]], {"batch_size": 0}, ConfigError, "batch_size"),
        ([[5, 6]], {"protocol": "sliding", "stride": 9}, ConfigError, "shortest length holds, 8"),
        ([[5, 6]], {"protocol": "overlapping"}, UnknownNameError, "did you mean 'nonoverlapping'"),
        ([[5, 6]], {"bos_policy": "prepended"}, UnknownNameError, "did you mean 'prepend'"),
    ],
)
def test_bad_input_is_refused_before_any_forward(
    documents: list[list[int]], kwargs: dict[str, object], error: type[Exception], message: str
) -> None:
    model = gpt2()

    def fail(*_: object) -> None:
        raise RuntimeError("a forward pass was started")

    model.register_forward_pre_hook(fail)
    with pytest.raises(error, match=message):
        perplexity_by_length(model, documents, **({"lengths": [8]} | kwargs))  # type: ignore[arg-type]


def test_models_without_perplexity_are_refused() -> None:
    with pytest.raises(UnsupportedFamilyError, match="see later ones"):
        perplexity_by_length(BertForMaskedLM(BertConfig(**SMALL)), random_documents(20), [8])
    with pytest.raises(UnsupportedFamilyError, match="returns no logits"):
        perplexity_by_length(gpt2().transformer, random_documents(20), [8])  # type: ignore[arg-type]
    model = gpt2()
    model.config.bos_token_id = None  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="neither the tokenizer nor the model"):
        perplexity_by_length(model, random_documents(20), [8], bos_policy="prepend")
