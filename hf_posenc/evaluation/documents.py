"""Documents as the evaluator wants them: one checked row of token ids each, with the bytes of its text where known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hf_posenc.errors import ConfigError, DataError, UnknownNameError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Documents: TypeAlias = Sequence[str] | Sequence[Sequence[int]] | Sequence[torch.Tensor]

BOS_NONE = "none"
BOS_PREPEND = "prepend"
BOS_POLICIES = (BOS_NONE, BOS_PREPEND)


@dataclass(frozen=True)
class Corpus:
    """`documents` are 1-D int64 CPU tensors of at least two ids, BOS included where it was asked for.

    `n_bytes` counts the UTF-8 bytes of the original texts, None for documents that came as ids. `digest` identifies
    the documents whatever their order.
    """

    documents: list[torch.Tensor]
    n_bytes: int | None
    digest: str
    bos_policy: str

    @property
    def n_targets(self) -> int:
        """Number of tokens that some earlier token predicts."""
        return sum(len(ids) - 1 for ids in self.documents)

    @property
    def longest(self) -> int:
        """Number of targets of the longest document."""
        return max(len(ids) for ids in self.documents) - 1


def prepare(
    documents: Documents,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    bos_policy: str,
    bos_token_id: int | None,
    vocab_size: int | None,
) -> Corpus:
    """Check documents, tokenise texts, put BOS in front where asked, and leave out documents without any target.

    Texts are tokenised without special tokens, so that `bos_policy` alone decides what stands in front. A document
    that already begins with BOS is not given a second one.

    Raises:
        DataError: no documents, texts without a tokenizer, ids outside the vocabulary, or all documents too short.
        ConfigError: BOS is wanted and neither the tokenizer nor the model has one.
        UnknownNameError: no such `bos_policy`.
    """
    prefix = _bos_prefix(bos_policy, tokenizer, bos_token_id)
    if isinstance(documents, (str, torch.Tensor)) or (len(documents) > 0 and isinstance(documents[0], int)):
        raise DataError("documents must be a list of documents, and this is a single one: put it into a list.")
    if len(documents) == 0:
        raise DataError("There are no documents to evaluate on. Give at least one.")
    rows: list[torch.Tensor] = []
    digests: list[bytes] = []
    n_bytes = 0
    for index, document in enumerate(documents):
        ids = _token_ids(document, index, tokenizer)
        if prefix is not None and (len(ids) == 0 or int(ids[0]) != prefix):
            ids = torch.cat([torch.tensor([prefix]), ids])
        if len(ids) < 2:
            continue
        _check_vocabulary(ids, index, vocab_size)
        raw = document.encode("utf-8", "surrogatepass") if isinstance(document, str) else ids.numpy().tobytes()
        n_bytes += len(raw)
        digests.append(hashlib.sha256(raw).digest())
        rows.append(ids)
    if not rows:
        raise DataError(
            f"All {len(documents)} documents are too short: a perplexity needs two tokens (one to predict the other). "
            f"Give longer documents, or bos_policy={BOS_PREPEND!r} for documents of a single token."
        )
    texts = all(isinstance(document, str) for document in documents)
    digest = hashlib.sha256(b"".join(sorted(digests))).hexdigest()
    return Corpus(documents=rows, n_bytes=n_bytes if texts else None, digest=digest, bos_policy=bos_policy)


def _bos_prefix(bos_policy: str, tokenizer: PreTrainedTokenizerBase | None, bos_token_id: int | None) -> int | None:
    if bos_policy not in BOS_POLICIES:
        raise UnknownNameError(f"No bos_policy {bos_policy!r}: {did_you_mean(bos_policy, BOS_POLICIES)}")
    if bos_policy == BOS_NONE:
        return None
    from_tokenizer = getattr(tokenizer, "bos_token_id", None)
    bos = bos_token_id if from_tokenizer is None else from_tokenizer
    if not isinstance(bos, int):
        raise ConfigError(
            f"bos_policy={BOS_PREPEND!r} needs a BOS token, and neither the tokenizer nor the model's config names "
            f"one. Use bos_policy={BOS_NONE!r} or set tokenizer.bos_token."
        )
    return bos


def _token_ids(document: Any, index: int, tokenizer: PreTrainedTokenizerBase | None) -> torch.Tensor:
    if isinstance(document, str):
        if tokenizer is None:
            raise DataError(f"Document {index} is a text: give tokenizer= too, or token ids instead of texts.")
        # verbose=False: that a text is longer than model_max_length is the very point of this evaluation.
        document = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
    try:
        ids = torch.as_tensor(document).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"Document {index} is neither a text nor a row of token ids: {error}") from error
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        if ids.numel() == 0:
            return torch.empty(0, dtype=torch.int64)
        raise DataError(
            f"Document {index} must be one row of integer token ids, and it is a {ids.dtype} tensor of shape "
            f"{tuple(ids.shape)}."
        )
    return ids.to(torch.int64)


def _check_vocabulary(ids: torch.Tensor, index: int, vocab_size: int | None) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        wrong = low if low < 0 else high
        raise DataError(
            f"Document {index} holds the token id {wrong}, and the model's vocabulary has {vocab_size} tokens. "
            "Tokenise with the model's own tokenizer."
        )
