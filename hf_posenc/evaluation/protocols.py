"""Protocols by name: the ways in which people cut text into windows and average what they measured.

No two of them give the same number for the same model and text, so a perplexity without its protocol says nothing.
Wherever the origin averages in a way of its own, both numbers are kept: the one in which every token weighs the same,
by which all protocols compare, and the origin's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hf_posenc.errors import ConfigError, UnknownNameError, did_you_mean
from hf_posenc.evaluation import windows as cuts
from hf_posenc.evaluation.documents import BOS_EVERY_WINDOW, BOS_NONE, BOS_POLICIES, BOS_PREPEND
from hf_posenc.evaluation.windows import Window

NONOVERLAPPING = "nonoverlapping"
SLIDING = "sliding"
FIXED_TARGET = "fixed_target"

PSEUDO = "pseudo"
BY_SOURCE = "by_source"
BY_POSITION = "by_position"
KEY_TOKENS = "key_tokens"
_MEASURED_BY = {  # by functions of their own, which cut no stream
    PSEUDO: "masked_perplexity_by_length",
    BY_SOURCE: "seq2seq_perplexity_by_length",
    BY_POSITION: "perplexity_by_position",
    KEY_TOKENS: "key_token_perplexity",
}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One way to measure perplexity.

    Attributes:
        name: what it is called here.
        says: what it does, in words for tables; `{stride}` stands for the stride.
        cut: (number of targets, length, stride) -> windows.
        stride: default stride for a length; None where the cut takes none.
        shortest: the smallest length that makes sense.
        bos_policy: the policy the protocol prescribes; None where it is the caller's.
        joined: whether all documents are one stream.
        once: whether every target is scored exactly once, whatever the stride.
        fills: whether documents shorter than the longest length are left out.
        mean: how the origin averages, where not every token weighs the same; else None.
    """

    name: str
    says: str
    cut: Callable[[int, int, int], Iterator[Window]]
    stride: Callable[[int], int] | None = None
    shortest: int = 1
    bos_policy: str | None = None
    joined: bool = False
    once: bool = True
    fills: bool = False
    mean: str | None = None

    def strides(self, lengths: Sequence[int], stride: int | None) -> dict[int, int]:
        """Return the stride for each length: the given one, or the protocol's own; the length where there is none.

        Raises:
            ConfigError: a stride that means nothing here, skips targets or is no positive integer, or a length that is
                too short for the protocol.
        """
        if min(lengths) < self.shortest:
            raise ConfigError(f"protocol={self.name!r} needs lengths of at least {self.shortest}; got {min(lengths)}.")
        if self.stride is None:
            if stride is not None:
                raise ConfigError(f"stride={stride} means nothing for {self.name!r}; use protocol={SLIDING!r}.")
            return {length: length for length in lengths}
        found = {length: self.stride(length) if stride is None else stride for length in lengths}
        for length, step in sorted(found.items()):
            most = self.inputs(length) if self.once else length
            if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step <= most:
                default = "The default stride" if stride is None else f"stride={stride!r}"
                raise ConfigError(
                    f"{default} of {self.name!r} must be an integer from 1 to what the shortest length holds, {most}, "
                    f"and is {step!r}: a longer stride would leave targets unscored."
                )
        return found

    def inputs(self, length: int) -> int:
        """Return how many positions a window of this length really uses: some origins count the last target too."""
        return length + 1 - self.shortest

    def bos(self, asked: str | None) -> str:
        """Return the BOS policy to use.

        Raises:
            UnknownNameError: there is no such policy.
            ConfigError: another one than the protocol prescribes was asked for.
        """
        if asked is not None and asked not in BOS_POLICIES:
            raise UnknownNameError(f"No bos_policy {asked!r}: {did_you_mean(asked, BOS_POLICIES)}")
        if self.bos_policy is None:
            return BOS_NONE if asked is None else asked
        if asked not in (None, self.bos_policy):
            raise ConfigError(
                f"protocol={self.name!r} has bos_policy={self.bos_policy!r}; {asked!r} would be another protocol."
            )
        return self.bos_policy


def _half(length: int) -> int:
    return max(1, length // 2)


PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol(name=NONOVERLAPPING, says="windows that do not overlap", cut=cuts.nonoverlapping),
        Protocol(name=SLIDING, says="windows sliding by {stride}", cut=cuts.sliding, stride=_half),
        Protocol(
            name="hf_docs",
            says="transformers' guide: one stream, windows sliding by {stride}",
            cut=cuts.hf_docs,
            stride=_half,
            shortest=2,
            joined=True,
            once=False,
            mean="each window weighs one token less than it adds",
        ),
        Protocol(
            name="lm_eval_rolling",
            says="lm-evaluation-harness: windows that do not overlap, the last one moved back",
            cut=cuts.rolling,
            bos_policy=BOS_PREPEND,
        ),
        Protocol(
            name="yarn",
            says="YaRN: BOS before each window, windows sliding by {stride}",
            cut=cuts.window_means,
            stride=lambda length: 256,
            shortest=2,
            bos_policy=BOS_EVERY_WINDOW,
            mean="each window weighs the same",
        ),
        Protocol(
            name="longlora",
            says="LongLoRA: one stream, windows sliding by {stride}, all their targets scored again",
            cut=cuts.longlora,
            stride=lambda length: 256,
            shortest=2,
            joined=True,
            once=False,
        ),
        Protocol(
            name=FIXED_TARGET,
            says="the last {stride} of each document under growing context",
            cut=cuts.fixed_target,
            stride=lambda length: 200,
            once=False,
            fills=True,
        ),
    )
}


def protocol_named(name: str) -> Protocol:
    """Return the protocol of this name.

    Raises:
        UnknownNameError: there is none, with the closest name.
    """
    if name in _MEASURED_BY:
        raise UnknownNameError(
            f"{name!r} is measured by {_MEASURED_BY[name]}, and `hf-posenc evaluate` takes it as the only protocol."
        )
    if name not in PROTOCOLS:
        raise UnknownNameError(f"No protocol {name!r}: {did_you_mean(name, PROTOCOLS)}")
    return PROTOCOLS[name]


def shown_together(names: Sequence[str]) -> list[str]:
    """Return the protocols to measure where these were asked for, each once.

    Windows with and without overlap always stand side by side, since their gap is what early tokens with little
    context cost, and no merit of the model.
    """
    pair = [NONOVERLAPPING, SLIDING] if {NONOVERLAPPING, SLIDING}.intersection(names) else []
    return list(dict.fromkeys([*pair, *(protocol_named(name).name for name in names)]))


_OTHERS = {
    PSEUDO: "windows that do not overlap, one token in {stride} masked at a time and filled in from both sides",
    BY_SOURCE: "the loss of the target under the first tokens of the source",
}


def in_words(name: str, stride: str) -> str:
    """Return what a protocol does, in words for tables; its name where nothing is known of it."""
    says = PROTOCOLS[name].says if name in PROTOCOLS else _OTHERS.get(name, name)
    return says.format(stride=stride)
