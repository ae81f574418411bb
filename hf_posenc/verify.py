"""The certificate: did the patch take? Refuses, never warns."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.anatomy import attention_modules
from hf_posenc.config import Encoding
from hf_posenc.declared import replacement
from hf_posenc.errors import PatchStateError, VerificationError
from hf_posenc.forms import form_of
from hf_posenc.interposer import CACHE_ARGUMENTS
from hf_posenc.planning import PatchPlan
from hf_posenc.surgery import record_of
from hf_posenc.trial import TOLERANCE

TOKENS = 16
POSITIONAL = ("embed", "remap", "rotate", "rotate_key", "bias", "score", "output_bias")
"""Hooks through which positions reach a model; one that overrides none of them has none, and means it."""
HALF_TOLERANCE = 0.1
"""Largest deviation of the logits that counts as equal, as a share of their largest magnitude."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was proven of a patched model.

    Attributes:
        plan: what was changed.
        findings: name of a check -> what was measured, in the order of the checks.
    """

    plan: PatchPlan
    findings: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line a finding."""
        return "\n".join(f"{name}: {value}" for name, value in self.findings.items())


class Probe:
    """A short random input and what a model makes of it.

    Args:
        model: the model to ask; its mode and the global random state are left as they were.

    Raises:
        VerificationError: the model's weights are not on a device that can compute.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if next(model.parameters()).is_meta:
            raise VerificationError("the model lies on the meta device and cannot be tried; patch with verify=False.")
        config = model.config
        limit = getattr(config, "max_position_embeddings", 2 * TOKENS)
        padding = getattr(config, "pad_token_id", None)
        generator = torch.Generator().manual_seed(0)
        words = min(config.vocab_size, getattr(config, "decoder_vocab_size", None) or config.vocab_size)
        ids = torch.randint(0, words - 1, (1, min(TOKENS, limit // 2)), generator=generator)
        # every id but the padding one: some models read padding off the ids
        self.ids = (ids + (ids >= padding) if padding is not None else ids).to(model.device)
        self.logits = answer(model, self.ids)


@contextmanager
def _asked(model: PreTrainedModel) -> Iterator[None]:
    """Be in eval mode and without gradients for a while; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def answer(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    """Return the first output of a model, (b, n, width) in float64, computed in eval mode without gradients."""
    with _asked(model):
        output = model(input_ids=ids, **inputs)
    first: Tensor = output.logits if getattr(output, "logits", None) is not None else output[0]
    if first.ndim != 3:  # a classifier's: the body says more
        body: Any = model.base_model
        return answer(body, ids, **inputs)
    return first.double()


def verify(model: PreTrainedModel, *, before: Mapping[str, Probe] | None = None) -> Certificate:
    """Prove on a short random input that a patched model does what its encoding promises.

    Encoder and decoder are asked one by one: what one hears of the other has no positions.

    Args:
        model: a patched model.
        before: what each of its parts answered before it was patched, by the name of the stack, where that is known.

    Returns:
        What was measured.

    Raises:
        PatchStateError: the model is not patched.
        VerificationError: a promise is broken; the message names the first one.
    """
    record = record_of(model)
    if record is None:
        raise PatchStateError("the model is not patched; there is nothing to verify.")
    certificate = Certificate(plan=record.plan)
    for name, plan in record.plan.parts.items():
        known = None if before is None else before[name]
        _verify_part(plan.model_of(model), plan, known, certificate.findings, f"{name}: " if name else "")
    return certificate


def _verify_part(
    model: PreTrainedModel, plan: PatchPlan, before: Probe | None, findings: dict[str, str], prefix: str
) -> None:
    """Prove that a model of one body does what its encoding promises."""
    probe = Probe(model)
    tolerance = TOLERANCE.get(model.dtype, HALF_TOLERANCE)
    check = _Checks(findings, tolerance * max(1.0, float(probe.logits.abs().max())), prefix)
    check.equal("finite", probe.logits.isfinite().all().logical_not().double(), "the logits contain NaN or infinity")
    if plan.route == "native":
        _verify_native(model, plan, check)
    else:
        _verify_interposed(model, plan, probe, before, check)
    if plan.geometry.causal:
        _verify_causal(model, probe, check)
    _verify_padding(model, probe, check, causal=plan.geometry.causal)


class _Checks:
    """Notes findings, each under a name that gets a prefix, and refuses bad ones."""

    def __init__(self, findings: dict[str, str], tolerance: float, prefix: str) -> None:
        self.findings = findings
        self.tolerance = tolerance
        self.prefix = prefix

    def note(self, name: str, found: str) -> None:
        """Note a finding."""
        self.findings[self.prefix + name] = found

    def equal(self, name: str, difference: Tensor, meaning: str) -> None:
        """Refuse where a difference exceeds the tolerance."""
        size = float(difference.abs().max())
        if not size <= self.tolerance:
            allowed = f"at most {self.tolerance:.3g} allowed"
            raise VerificationError(f"{self.prefix}{name}: {meaning} (off by {size:.3g}, {allowed})")
        self.note(name, f"off by {size:.3g}")

    def differs(self, name: str, difference: Tensor, meaning: str) -> None:
        """Refuse where there is no difference at all."""
        size = float(difference.abs().max())
        if not size > 0.0:
            raise VerificationError(f"{self.prefix}{name}: {meaning}")
        self.note(name, f"differs by {size:.3g}")


def _verify_native(model: PreTrainedModel, plan: PatchPlan, check: _Checks) -> None:
    """Compare the rotary module's table with our own float64 one, at positions up to four times the length."""
    rotary = plan.family.body_of(model).get_submodule(plan.family.rotary or "")
    length = plan.geometry.max_position_embeddings
    ids = torch.tensor([[0, 1, length - 1, length, 4 * length - 1]], device=model.device)
    if "dynamic" in str(getattr(rotary, "rope_type", "")):
        ids = ids[:, :3]  # beyond its length such a table is that of the longest call
    states = torch.zeros(1, 1, 1, device=model.device)
    cos, sin = rotary(states, ids)
    own: Any = plan.config.build(plan.geometry)
    expected = own.angles(ids, torch.float64)
    pairs = len(own.inv_freq)
    for name, table, exact in (("cosines", cos, expected[0]), ("sines", sin, expected[1])):
        # transformers takes the phase in float32: the error grows with the position
        halves, neighbours = table[..., :pairs], table[..., : 2 * pairs : 2]
        layouts = (halves, neighbours) if plan.family.interleaved else (halves,)
        worst = min((layout.double() - exact[:, 0]).abs().max() for layout in layouts) / (1e-6 * 4 * length + 1e-5)
        check.equal(f"rotary {name}", worst * check.tolerance, "the rotary module did not take the new parameters")


def _verify_interposed(
    model: PreTrainedModel, plan: PatchPlan, probe: Probe, before: Probe | None, check: _Checks
) -> None:
    swapped = []
    for module in attention_modules(plan.family.body_of(model), plan.family).values():
        stock: Any = getattr(module, "posenc_stock", None)
        if stock is not None and type(module) is replacement(stock, plan.config.label, plan.family):
            swapped.append(module)
    if len(swapped) != len(plan.attention):
        raise VerificationError(f"{len(swapped)} attention modules were replaced, {len(plan.attention)} were planned")
    check.note("attention modules", str(len(swapped)))
    body = plan.family.body_of(model)
    encoding: Encoding = body.posenc
    check.note("attends by", form_of(encoding, model, causal=plan.geometry.causal))
    if before is not None:
        changed = probe.logits - before.logits
        takes_over = bool(plan.family.bias) and encoding.overrides("adopt_bias")
        if plan.keeps:
            check.equal("original", changed, "the learned rows changed what the model says")
        elif plan.config.within_length == "changed" and plan.config.temperature is None and not takes_over:
            check.differs("original", changed, "the model says exactly what it said before")
    if any(encoding.overrides(hook) for hook in POSITIONAL):
        # tables that start at zero say nothing yet: what has to matter is what they will say once they are trained
        with _replaced(body, _stirred(encoding)):
            stirred = answer(model, probe.ids)
        with _replaced(body, Encoding()):
            bare = answer(model, probe.ids)
        check.differs("no positions", stirred - bare, "the encoding has no effect: the model has no positions")


def _stirred(encoding: Encoding) -> Encoding:
    """Return a copy whose parameters are all a little off."""
    if next(encoding.parameters(), None) is None:
        return encoding
    twin, generator = copy.deepcopy(encoding), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return twin


@contextmanager
def _replaced(body: Any, encoding: Encoding) -> Iterator[None]:
    joint = next(joint for joint in body.posenc_joints if joint.body is body)
    joint.override = encoding
    try:
        yield
    finally:
        joint.override = None


def _verify_causal(model: PreTrainedModel, probe: Probe, check: _Checks) -> None:
    ids, cut = probe.ids, probe.ids.shape[1] // 2
    other = ids.clone()
    other[:, -1] = ids[:, 0] if int(ids[0, 0]) != int(ids[0, -1]) else ids[:, 1]
    leak = answer(model, other)[:, :-1] - probe.logits[:, :-1]
    check.equal("future", leak, "a later token changes what is said before it")
    with _asked(model):
        output = model(input_ids=ids[:, :cut], use_cache=True)
        name = next((name for name in CACHE_ARGUMENTS if name in output), None)
        if name is None:
            check.note("cache", "the model keeps none")
            return
        cache = output[name]
        steps = [output]
        for step in range(cut, ids.shape[1]):
            steps.append(model(input_ids=ids[:, step : step + 1], use_cache=True, **{name: cache}))
    first = "logits" if "logits" in output else "last_hidden_state"
    cached = torch.cat([step[first] for step in steps], dim=1).double()
    if cached.shape == probe.logits.shape:
        check.equal("cache", cached - probe.logits, "decoding with a cache differs from the full forward")


def _verify_padding(model: PreTrainedModel, probe: Probe, check: _Checks, *, causal: bool) -> None:
    ids = probe.ids
    padding = getattr(model.config, "pad_token_id", None)
    pads = torch.full_like(ids[:, :3], padding if padding is not None else 0)
    rows, mask = torch.cat([pads, ids], dim=1), torch.cat([torch.zeros_like(pads), torch.ones_like(ids)], dim=1)
    padded = answer(model, rows, attention_mask=mask)
    check.equal("left padding", padded[:, 3:] - probe.logits, "padding on the left changes what is said")
    if not causal:
        return
    with _asked(model):
        output = model(input_ids=rows[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
        name = next((name for name in CACHE_ARGUMENTS if name in output), None)
        if name is None:
            return
        last = model(input_ids=rows[:, -1:], attention_mask=mask, use_cache=True, **{name: output[name]})
    said = last["logits" if "logits" in last else "last_hidden_state"].double()
    if said.shape == probe.logits[:, -1:].shape:
        check.equal("padding in a cache", said - probe.logits[:, -1:], "padding on the left changes what is decoded")
