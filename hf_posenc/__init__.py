"""hf_posenc: replace the position encoding of a pretrained Hugging Face model, and measure what that does."""

from pathlib import Path as _Path

from hf_posenc.config import Encoding, EncodingConfig, build, encoding, register_encoding
from hf_posenc.config import encodings as _encodings
from hf_posenc.conversion.convert import convert
from hf_posenc.conversion.defaults import recipe_for
from hf_posenc.conversion.recipe import Recipe
from hf_posenc.encodings.alibi import Alibi
from hf_posenc.encodings.learned import Learned
from hf_posenc.encodings.nope import NoPE
from hf_posenc.encodings.rope import RoPE
from hf_posenc.encodings.sinusoidal import Sinusoidal
from hf_posenc.encodings.stacks import Stacks
from hf_posenc.errors import PosencError
from hf_posenc.evaluation import (
    LengthCurve,
    key_token_perplexity,
    masked_perplexity_by_length,
    perplexity_by_length,
    perplexity_by_position,
    retrieval_by_length,
    seq2seq_perplexity_by_length,
)
from hf_posenc.export import export_native
from hf_posenc.family import DeclaredAttention, Family, register_family
from hf_posenc.family import families as _families
from hf_posenc.hub.bundle import write_bundle as _write_bundle
from hf_posenc.hub.loading import from_pretrained
from hf_posenc.hub.registration import register_configs
from hf_posenc.length import max_length, set_model_max_length
from hf_posenc.modeling import when_written as _when_written
from hf_posenc.patching import discover, is_patched, patch, plan, unpatch
from hf_posenc.positions import Geometry, Positions
from hf_posenc.report.comparison import compare
from hf_posenc.temperature import Temperature
from hf_posenc.verify import Certificate, verify

__all__ = [
    "METRIC",
    "Alibi",
    "Certificate",
    "DeclaredAttention",
    "Encoding",
    "EncodingConfig",
    "Family",
    "Geometry",
    "Learned",
    "LengthCurve",
    "NoPE",
    "PosencError",
    "Positions",
    "Recipe",
    "RoPE",
    "Sinusoidal",
    "Stacks",
    "Temperature",
    "build",
    "compare",
    "convert",
    "discover",
    "encoding",
    "encodings",
    "export_native",
    "families",
    "from_pretrained",
    "is_patched",
    "key_token_perplexity",
    "masked_perplexity_by_length",
    "max_length",
    "patch",
    "perplexity_by_length",
    "perplexity_by_position",
    "plan",
    "recipe_for",
    "register_encoding",
    "register_family",
    "retrieval_by_length",
    "seq2seq_perplexity_by_length",
    "set_model_max_length",
    "unpatch",
    "verify",
]

__version__ = "0.1.0"

METRIC = str(_Path(__file__).with_name("metric.py"))
"""The script that `evaluate.load` takes; that library is needed by nothing else here."""

register_configs()
_when_written(_write_bundle)

# Importing the subpackages of these names has bound them here; the functions are what the package promises.
encodings = _encodings
families = _families
