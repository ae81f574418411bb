"""What an export goes from and to: the patched model read as plain facts, the record of a route, and their registry.

A route is one stock architecture that computes the same function as some patched models do. It says why it does not
serve in two steps: by the model type and the encoding's config alone, and by the model itself.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.config import ENCODINGS, Encoding, EncodingConfig, encoding
from hf_posenc.errors import ConfigError, ExportError, PatchStateError
from hf_posenc.family import FAMILIES, Family
from hf_posenc.planning import PatchPlan
from hf_posenc.positions import Geometry
from hf_posenc.registry import Registry
from hf_posenc.surgery import record_of

Reason = str | None
"""Why something does not go, as the end of a sentence; None where it does."""
HEADS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")
"""How the names of model classes end whose only head is the language model's."""
TABLE_FACTOR = 4
"""Rows of a table that has to end somewhere, over the trained length, where nobody says how many."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A patched model, read.

    Attributes:
        model: the model itself.
        encoding: the config in force, complete.
        module: what computes it, with its trained numbers.
        geometry: the numbers of the model that the encoding depends on.
        family: where positions entered the stock model.
        stacks: the encoder and the decoder, read by themselves, of a model that has both; `encoding` is that of both
            then, the rest that of the decoder.
        asked: positions, in tokens, that the export shall state or have rows for; None where nobody said.
    """

    model: PreTrainedModel
    encoding: EncodingConfig
    module: Encoding
    geometry: Geometry
    family: Family
    stacks: Mapping[str, Source] = field(default_factory=dict)
    asked: int | None = None

    @property
    def rows(self) -> int:
        """Rows of a table that has to end somewhere."""
        own = self.module.max_positions()
        return self.asked or own or TABLE_FACTOR * self.geometry.max_position_embeddings

    @property
    def stated(self) -> int:
        """What `max_position_embeddings` says where nothing ends: the trained length, times what it was scaled by."""
        scaling = getattr(self.encoding, "scaling", None) or {}
        trained = self.geometry.max_position_embeddings
        original = scaling.get("original_max_position_embeddings", trained)
        own = int(getattr(self.config, self.family.length, None) or 0)
        return self.asked or max(own, trained, round(original * scaling.get("factor", 1.0)))

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    @property
    def model_type(self) -> str:
        """The stock model type."""
        return str(self.config.model_type).removeprefix("posenc_")

    @property
    def stock(self) -> Any:
        """The stock model class."""
        return getattr(type(self.model), "posenc_stock", type(self.model))

    @property
    def bare(self) -> bool:
        """Whether the model has no head."""
        return self.model.base_model is self.model

    @property
    def tied(self) -> bool:
        """Whether the head reads the weights of the token embedding."""
        head: Any = self.model.get_output_embeddings()
        return head is not None and head.weight is self.model.get_input_embeddings().weight

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the body by their stock names, without its prefix and without the encoding's own."""
        named = self.model.base_model.state_dict()
        return {name: weight for name, weight in named.items() if "posenc" not in name.split(".")}

    def no_head_but_the_language_models(self) -> Reason:
        """Say why a target with that head, or none, does not do."""
        if self.bare or self.stock.__name__.endswith(HEADS):
            return None
        return f"the target has no head like that of {self.stock.__name__}; export the language model or the bare body"


@dataclass(kw_only=True)
class Target:
    """A stock model that is about to be written.

    Attributes:
        cls: its class.
        config: its config.
        weights: everything that is not tied, by the names of that class.
        head: (vocab_size, hidden_size) where the output projection is not tied; its name differs between releases.
        limits: what the target leaves out that its source could be asked for, by a word for it.
    """

    cls: type[PreTrainedModel]
    config: Any
    weights: dict[str, Tensor]
    head: Tensor | None = None
    limits: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Route:
    """One way out.

    Attributes:
        name: what `target=` takes.
        writes: the architecture, in words.
        rank: routes with a lower one are taken first.
        serves: whether it starts from models of a type.
        takes: why an encoding does not go, by its config alone.
        fits: why this one model does not go.
        build: the target of a model that goes; touches nothing.
        tempered: whether encodings with a temperature are looked at at all.
        runs: what is known of other runtimes, for the table.
    """

    name: str
    writes: str
    rank: int
    serves: Callable[[str], bool]
    takes: Callable[[EncodingConfig], Reason]
    fits: Callable[[Source], Reason]
    build: Callable[[Source], Target]
    tempered: bool = False
    runs: str = ""

    def admits(self, config: EncodingConfig) -> Reason:
        """Say why an encoding does not go, by its config alone, or None where it may."""
        if config.temperature is not None and not self.tempered:
            return "its scores have a temperature, which the target has not"
        return self.takes(config)

    def refuses(self, source: Source) -> Reason:
        """Say why this route does not serve a model, or None where it does."""
        if not self.serves(source.model_type):
            return f"it does not start from models of type {source.model_type!r}"
        return self.admits(source.encoding) or self.fits(source)


ROUTES: Registry[Route] = Registry(kind="export target", package="hf_posenc.export.targets")


def register_route(route: Route) -> Route:
    """Make a route known under its name; raises ConfigError where another one has it."""
    return ROUTES.add(route.name, route)


def ranked() -> list[Route]:
    """Return all routes, the preferred ones first."""
    return sorted(ROUTES.values(), key=lambda route: (route.rank, route.name))


def targets(model_type: str, config: EncodingConfig | str) -> tuple[str, ...]:
    """Return the names of the routes from a model type and an encoding, the preferred first; builds no model.

    Args:
        model_type: transformers' own, such as `gpt2`.
        config: an encoding's config, or its name, which stands for its default fields.

    Returns:
        What may do: a single model of that type can still be unfit, for which see `routes`. Empty where nothing does,
        and for an encoding that is nothing by default, being made of others.
    """
    if isinstance(config, str):
        try:
            config = encoding(config) if config in ENCODINGS else ENCODINGS[config]()
        except (ConfigError, TypeError):
            return ()
    stock = model_type.removeprefix("posenc_")
    return tuple(route.name for route in ranked() if route.serves(stock) and route.admits(config) is None)


def read(model: PreTrainedModel, *, length: int | None = None) -> Source:
    """Read a patched model.

    Args:
        model: a patched model.
        length: see `Source.asked`.

    Raises:
        PatchStateError: the model is not patched.
        ConfigError: `length` is no positive number, or beyond what the encoding can express.
        ExportError: the model is an encoder or a decoder of a family of both.
    """
    record = record_of(model)
    if record is None:
        raise PatchStateError("the model is not patched: it is a stock model, which model.save_pretrained writes.")
    plan = record.plan
    if plan.stack:
        raise ExportError(
            f"no target takes over the {plan.stack.rpartition('.')[2]} of a family of both stacks by itself; "
            "model.save_pretrained writes this one, and posenc.from_pretrained reads it."
        )
    source = _read_part(model, plan, length)
    end = source.module.max_positions()
    if length is not None and (length < 1 or (end is not None and length > end)):
        raise ConfigError(f"length must lie between 1 and {end or 'any number'} for this encoding, was: {length}")
    return source


def _read_part(model: PreTrainedModel, plan: PatchPlan, length: int | None) -> Source:
    stacks = {name: _read_part(model, part, length) for name, part in plan.stacks.items()}
    if stacks:
        module = list(stacks.values())[-1].module
    else:
        module = plan.body_of(model).posenc if plan.route == "interposer" else plan.config.build(plan.geometry)
    return Source(
        model=model,
        encoding=plan.config,
        module=module,
        geometry=plan.geometry,
        family=plan.family,
        stacks=stacks,
        asked=length,
    )


def within(source: Source, encoding: EncodingConfig, module: Encoding) -> Source:
    """Return the source as if an encoding inside of its own were all that it had."""
    return dataclasses.replace(source, encoding=encoding, module=module)


def routes(model: PreTrainedModel, *, length: int | None = None) -> dict[str, Reason]:
    """Return, for every route from the model's type, None where it would be exact, or why it is not; preferred first.

    Raises:
        PatchStateError: the model is not patched.
    """
    source = read(model, length=length)
    return {route.name: route.refuses(source) for route in ranked() if route.serves(source.model_type)}


def stock_config(source: Source) -> Any:
    """Return the config that the stock model had, a copy, without what a patch notes in it."""
    config = copy.deepcopy(source.config)
    config.__class__ = source.stock.config_class
    for name in ("posenc", "original_max_position_embeddings"):
        if not hasattr(type(config), name):  # Phi-3 has the second one by itself
            config.__dict__.pop(name, None)
    return config


def from_types(*model_types: str) -> Callable[[str], bool]:
    """Return the test whether a model type is one of these."""
    return frozenset(model_types).__contains__


def known_types(route: Route) -> list[str]:
    """Return the registered model types that a route starts from."""
    return [model_type for model_type in FAMILIES if route.serves(model_type)]
