"""Measurement of any language model, patched or not: it never imports what patches."""

from hf_posenc.evaluation.curve import LengthCurve
from hf_posenc.evaluation.masked import masked_perplexity_by_length
from hf_posenc.evaluation.perplexity import perplexity_by_length
from hf_posenc.evaluation.position import PositionCurve, perplexity_by_position
from hf_posenc.evaluation.seq2seq import seq2seq_perplexity_by_length

__all__ = [
    "LengthCurve",
    "PositionCurve",
    "masked_perplexity_by_length",
    "perplexity_by_length",
    "perplexity_by_position",
    "seq2seq_perplexity_by_length",
]
