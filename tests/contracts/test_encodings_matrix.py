"""Every encoding in the registry, in a decoder with a table, a rotary decoder with grouped heads, and an encoder.

A new encoding enters by being registered. It is asked for with its defaults, unless these need fields or are too large
for texts of a few tokens, in which case `SMALL` has it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import hf_posenc as posenc
from hf_posenc.errors import LengthError, UnsupportedEncodingError
from tests.models import SUBJECTS, TRAINED, assert_same, in_steps, logits, padding_of, tokens

SMALL: dict[str, dict[str, Any]] = {
    "dual_chunk": {"chunk": 48, "local": 8},
    "layered": {"pattern": [{"name": "rope"}, {"name": "kerple"}]},
    "lm_infinite": {"first": 2},
    "rerope": {"window": 20},
    "self_extend": {"group": 3, "window": 20},
    "string": {"local": 8},
}
CAUSAL_ONLY = {"cable", "cope", "drope", "dual_chunk", "fire", "fox", "lm_infinite", "nope", "sinks", "xpos"}
IDENTITY = {"bert_relative", "cope", "drope", "fire", "nope", "shaw", "t5", "transformer_xl"}
"""Those that start as if there were no positions at all. `lerope` starts as `rope`."""
FROZEN = {"alibi", "fope"}
"""Those whose numbers are trained only where that is asked for."""
ENDED = {"learned"}
"""Those that cannot express positions past the trained length."""
NAMES = [name for name in posenc.encodings() if name != "stacks"]  # for models of another kind
CELLS = [(subject, name) for subject in ("gpt2", "llama", "bert") for name in NAMES]
CAN = [(subject, name) for subject, name in CELLS if subject != "bert" or name not in CAUSAL_ONLY]
LAYERED = [
    (subject, name)
    for subject, name in CAN
    if subject != "llama" and hasattr(posenc.encoding(name, **SMALL.get(name, {})), "per_layer")
]
ALL = [(*cell, False) for cell in CAN] + [(*cell, True) for cell in LAYERED]
"""Subject, encoding, and whether every layer has its own."""


def config_of(name: str, **fields: Any) -> posenc.EncodingConfig:
    return posenc.encoding(name, **SMALL.get(name, {}), **fields)


def own(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters of the encoding itself."""
    return [parameter for name, parameter in model.named_parameters() if "posenc." in name and parameter.requires_grad]


@functools.cache
def trained(subject: str, name: str, per_layer: bool = False) -> PreTrainedModel:
    """A patched model whose encoding has left its start, at random."""
    fields: dict[str, Any] = {"trainable": True} if per_layer and name in FROZEN else {}
    if hasattr(config_of(name), "per_layer"):
        fields["per_layer"] = per_layer
    config = config_of(name, **fields)
    model = posenc.patch(SUBJECTS[subject].fresh(), config, verify=False)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in own(model):
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def reach(name: str) -> int:
    """Twice the trained length, where there is more than that."""
    return TRAINED if name in ENDED else 2 * TRAINED


@pytest.mark.parametrize(("subject", "name"), CAN)
def test_patch_is_verified_before_and_after_training(subject: str, name: str) -> None:
    posenc.patch(SUBJECTS[subject].fresh(), config_of(name))
    posenc.verify(copy.deepcopy(trained(subject, name)))


@pytest.mark.parametrize("name", sorted(CAUSAL_ONLY))
def test_encoders_are_refused_by_name_and_left_alone(name: str) -> None:
    model, ids = SUBJECTS["bert"].fresh(), tokens(1, 9)
    before = logits(model, ids)
    with pytest.raises(UnsupportedEncodingError, match=r"bidirectional model|causal models only") as refused:
        posenc.patch(model, config_of(name))
    assert type(config_of(name)).__name__.lower() in str(refused.value).lower()
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize(("subject", "name"), [cell for cell in CAN if cell[0] != "bert"])
def test_cached_decode_equals_the_full_pass(subject: str, name: str) -> None:
    model, length = trained(subject, name), reach(name)
    ids = tokens(2, length)
    sizes = [length // 2 - 3, 1, 1, 1, 1, 1, 1, length // 2 - 4, 1]
    assert_same(in_steps(model, ids, sizes, DynamicCache(config=model.config)), logits(model, ids), 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_what_has_an_end_says_so(name: str) -> None:
    model, ids = trained("gpt2", name), tokens(1, reach(name) + 1)
    if name not in ENDED:
        assert logits(model, ids).isfinite().all()
        return
    with pytest.raises(LengthError, match=f"no position {TRAINED + 1}"):
        logits(model, ids)


@pytest.mark.parametrize(("subject", "name"), CAN)
def test_padding_and_backend_change_nothing(subject: str, name: str) -> None:
    model, ids = trained(subject, name), tokens(2, reach(name))
    full = logits(model, ids)
    padded = nn.functional.pad(ids, (5, 0), value=padding_of(model))
    mask = nn.functional.pad(torch.ones_like(ids), (5, 0))
    assert_same(logits(model, padded, attention_mask=mask)[:, 5:], full, 1e-4)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    assert_same(logits(eager, ids), full, 1e-4)
    assert_same(logits(eager, padded, attention_mask=mask)[:, 5:], full, 1e-4)


@pytest.mark.parametrize(("subject", "name", "per_layer"), ALL)
def test_a_saved_model_says_the_same_bits(subject: str, name: str, per_layer: bool, tmp_path: Path) -> None:
    model, ids = trained(subject, name, per_layer), tokens(2, reach(name))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(posenc.from_pretrained(tmp_path).eval(), ids), logits(model, ids))


@pytest.mark.parametrize(("subject", "name"), LAYERED)
def test_layers_of_their_own(subject: str, name: str) -> None:
    """Two layers have twice the numbers, and say what one set says only where both have the same."""
    model, ids = copy.deepcopy(trained(subject, name, per_layer=True)), tokens(2, TRAINED)
    one, two = model.get_submodule(_body(model) + "posenc.layers").children()
    fields = {"trainable": True} if name in FROZEN else {}
    shared = dataclasses.replace(config_of(name), per_layer=False, **fields)
    alone = posenc.patch(SUBJECTS[subject].fresh(), shared, verify=False)
    alone.get_submodule(_body(alone) + "posenc").load_state_dict(one.state_dict())
    assert (logits(model, ids) - logits(alone, ids)).abs().max() > 1e-5
    two.load_state_dict(one.state_dict())
    assert torch.equal(logits(model, ids), logits(alone, ids))


def _body(model: nn.Module) -> str:
    return next(name for name, _ in model.named_modules() if name.endswith("posenc"))[: -len("posenc")]


@pytest.mark.parametrize(("subject", "name", "per_layer"), ALL)
def test_gradients_reach_every_number(subject: str, name: str, per_layer: bool) -> None:
    model, ids = copy.deepcopy(trained(subject, name, per_layer)), tokens(2, reach(name))
    model(input_ids=ids).logits.float().log_softmax(-1)[:, :, 7].mean().backward()
    for parameter in own(model):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()
    assert per_layer <= bool(own(model))


@pytest.mark.parametrize(("subject", "name"), CAN)
def test_identity_starts_change_no_logit(subject: str, name: str) -> None:
    """Against a model without positions, to the bit; whatever is not an identity changes something."""
    model = posenc.patch(SUBJECTS[subject].fresh(attn_implementation="eager"), config_of(name), verify=False)
    assert torch.equal(logits(model, tokens(2, 40)), _bare_logits(subject)) == (name in IDENTITY)


@functools.cache
def _bare_logits(subject: str) -> torch.Tensor:
    config = posenc.NoPE(allow_bidirectional=True)
    model = posenc.patch(SUBJECTS[subject].fresh(attn_implementation="eager"), config, verify=False)
    return logits(model, tokens(2, 40))
