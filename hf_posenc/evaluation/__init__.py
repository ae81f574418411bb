"""Measurement of any language model, patched or not: it never imports what patches."""

from hf_posenc.evaluation.curve import LengthCurve
from hf_posenc.evaluation.key_tokens import KeyTokenPerplexity, key_token_perplexity
from hf_posenc.evaluation.masked import masked_perplexity_by_length
from hf_posenc.evaluation.perplexity import perplexity_by_length
from hf_posenc.evaluation.position import PositionCurve, perplexity_by_position
from hf_posenc.evaluation.retrieval import retrieval_by_length
from hf_posenc.evaluation.retrieval_grid import RetrievalGrid
from hf_posenc.evaluation.seq2seq import seq2seq_perplexity_by_length

__all__ = [
    "KeyTokenPerplexity",
    "LengthCurve",
    "PositionCurve",
    "RetrievalGrid",
    "key_token_perplexity",
    "masked_perplexity_by_length",
    "perplexity_by_length",
    "perplexity_by_position",
    "retrieval_by_length",
    "seq2seq_perplexity_by_length",
]
