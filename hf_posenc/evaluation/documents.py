"""Documents as the evaluator wants them: one checked row of token ids each, with the bytes of its text where known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hf_posenc.errors import ConfigError, DataError, UnknownNameError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Documents: TypeAlias = (
    Iterable[str] | Iterable[Sequence[int]] | Iterable[torch.Tensor] | Iterable[Mapping[str, Any]]  # rows of `datasets`
)

BOS_NONE = "none"
BOS_PREPEND = "prepend"
BOS_EVERY_WINDOW = "every_window"
BOS_POLICIES = (BOS_NONE, BOS_PREPEND, BOS_EVERY_WINDOW)
JOINT = "\n\n"  # what joins texts into one stream, as in transformers' guide on perplexity

_SINGLE = "documents must be a list of documents, and this is a single one: put it into a list."


@dataclass(frozen=True)
class Corpus:
    """Documents ready to be measured.

    Attributes:
        documents: 1-D int64 CPU tensors of at least two ids, BOS included where it was asked for.
        digests: SHA-256 of each.
        n_bytes: UTF-8 bytes of the original texts, None for documents that came as ids.
        n_sources: number of original documents, more than `documents` where they were joined.
        n_left_out: documents that were too short to have a target.
        bos_policy: which tokens stand before which targets.
        bos: the BOS token's id where the policy needs one.
    """

    documents: list[torch.Tensor]
    digests: list[str]
    n_bytes: int | None
    n_sources: int
    n_left_out: int
    bos_policy: str
    bos: int | None

    @property
    def digest(self) -> str:
        """SHA-256 over the documents, whatever their order."""
        return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in sorted(self.digests))).hexdigest()

    @property
    def id_digests(self) -> list[str]:
        """SHA-256 of each document's token ids, which depend on the tokenizer as `digests` of texts do not."""
        return [hashlib.sha256(ids.numpy().tobytes()).hexdigest() for ids in self.documents]

    @property
    def sizes(self) -> list[int]:
        """Number of targets of each document: tokens that some earlier token predicts."""
        return [len(ids) - 1 for ids in self.documents]

    @property
    def longest(self) -> int:
        """Number of targets of the longest document."""
        return max(self.sizes)

    @property
    def probe(self) -> torch.Tensor:
        """The longest document, on which it shows best whether a model can be run in pieces."""
        return max(self.documents, key=len)

    def filling(self, length: int) -> Corpus:
        """Return the documents with at least `length` targets.

        Raises:
            DataError: there are none.
        """
        kept = [index for index, size in enumerate(self.sizes) if size >= length]
        if not kept:
            raise DataError(
                f"No document has {length + 1} tokens (the longest has {self.longest + 1}), which length {length} "
                "needs. Give longer documents or a smaller length."
            )
        return replace(
            self,
            documents=[self.documents[index] for index in kept],
            digests=[self.digests[index] for index in kept],
            n_bytes=None,
            n_sources=len(kept),
            n_left_out=self.n_left_out + len(self.documents) - len(kept),
        )


def prepare(
    documents: Documents,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    bos_policy: str,
    bos_token_id: int | None,
    vocab_size: int | None,
    joined: bool = False,
) -> Corpus:
    """Check documents, tokenise texts, put BOS in front where asked, and leave out documents without any target.

    Texts are tokenised without special tokens, so that `bos_policy` alone decides what stands in front. A document
    that already begins with BOS is not given a second one. A stream of documents is read once; only ids are kept.
    Joined documents become one: texts with an empty line between them, token ids without anything.

    Raises:
        DataError: no documents, texts without a tokenizer, ids outside the vocabulary, or all documents too short.
        ConfigError: BOS is wanted and neither the tokenizer nor the model has one.
        UnknownNameError: no such `bos_policy`.
    """
    prefix = _bos_prefix(bos_policy, tokenizer, bos_token_id)
    contents: list[Any] | Iterator[Any] = contents_of(documents)
    n_sources = 1
    if joined:
        contents, n_sources = _joined(list(contents))
    rows: list[torch.Tensor] = []
    digests: list[str] = []
    n_bytes = index = 0
    texts = True
    for index, document in enumerate(contents, start=1):
        ids = token_ids(document, index - 1, tokenizer)
        if prefix is not None and (len(ids) == 0 or int(ids[0]) != prefix):
            ids = torch.cat([torch.tensor([prefix]), ids])
        if len(ids) < 2:
            continue
        check_vocabulary(ids, index - 1, vocab_size)
        raw = document.encode("utf-8", "surrogatepass") if isinstance(document, str) else ids.numpy().tobytes()
        texts = texts and isinstance(document, str)
        n_bytes += len(raw)
        digests.append(hashlib.sha256(raw).hexdigest())
        rows.append(ids)
    if index == 0:
        raise DataError("There are no documents to evaluate on. Give at least one.")
    if not rows:
        raise DataError(
            f"All {index} documents are too short: a perplexity needs two tokens (one to predict the other). "
            f"Give longer documents, or bos_policy={BOS_PREPEND!r} for documents of a single token."
        )
    return Corpus(
        documents=rows,
        digests=digests,
        n_bytes=n_bytes if texts else None,
        n_sources=n_sources if joined else len(rows),
        n_left_out=index - len(rows),
        bos_policy=bos_policy,
        bos=prefix,
    )


def contents_of(documents: Documents) -> Iterator[Any]:
    """Return the text or the token ids of every document.

    Raises:
        DataError: a single document, or a row that holds neither, when its turn comes.
    """
    if isinstance(documents, (str, torch.Tensor, Mapping)):
        raise DataError(_SINGLE)
    if not isinstance(documents, Iterable):
        raise DataError(f"documents must be a list of documents, and this is a {type(documents).__name__}.")
    return map(_content, documents)


def _content(document: Any) -> Any:
    """Return what a document holds: itself, or the text or ids of a row of a dataset."""
    if isinstance(document, int) and not isinstance(document, bool):
        raise DataError(_SINGLE)
    if not isinstance(document, Mapping):
        return document
    for column in ("text", "input_ids"):
        if column in document:
            return document[column]
    raise DataError(f"A row has no column 'text' or 'input_ids' (it has {', '.join(map(str, document))}).")


def _joined(contents: list[Any]) -> tuple[list[Any], int]:
    """Return all documents as a single one, and how many there were."""
    if contents and all(isinstance(content, str) for content in contents):
        return [JOINT.join(contents)], len(contents)
    if any(isinstance(content, str) for content in contents):
        raise DataError("Texts and token ids cannot be joined into one stream: give one kind.")
    ids = [token_ids(content, index, None) for index, content in enumerate(contents)]
    return ([torch.cat(ids)] if ids else []), len(contents)


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


def token_ids(
    document: Any,
    index: int,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    specials: bool = False,
    target: bool = False,
) -> torch.Tensor:
    """Return a document's token ids as a 1-D int64 CPU tensor.

    Args:
        document: a text or a row of ids.
        index: its number, for messages.
        tokenizer: needed for a text.
        specials: keep the special tokens that the tokenizer adds to a text.
        target: tokenise a text as the target of a translation, which some tokenizers do in another way.

    Raises:
        DataError: a text without a tokenizer, or what is neither a text nor one row of integers.
    """
    if isinstance(document, str):
        if tokenizer is None:
            raise DataError(f"Document {index} is a text: give tokenizer= too, or token ids instead of texts.")
        # verbose=False: that a text is longer than model_max_length is the very point of this evaluation.
        texts = {"text_target": document} if target else {"text": document}
        document = tokenizer(**texts, add_special_tokens=specials, verbose=False)["input_ids"]
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


def check_vocabulary(ids: torch.Tensor, index: int, vocab_size: int | None) -> None:
    """Raise DataError where a document, (n,), holds ids that the model does not know; `index` is its number."""
    if not len(ids):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        raise DataError(f"Document {index} holds the token id {low}, and ids begin at 0.")
    if vocab_size is not None and high >= vocab_size:
        raise DataError(
            f"Document {index} holds the token id {high}, and the model's vocabulary has {vocab_size} tokens. "
            "Tokenise with the model's own tokenizer."
        )
