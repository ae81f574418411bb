"""The same rotary architecture, with other `rope_parameters`."""

from __future__ import annotations

from hf_posenc.export.rotation import pair_frequencies, rope_parameters, silent, takes_rotation
from hf_posenc.export.route import Reason, Route, Source, Target, register_route, stock_config
from hf_posenc.family import FAMILIES


def serves(model_type: str) -> bool:
    """Tell whether models of a type take their rotation from `rope_parameters`."""
    if model_type not in FAMILIES:
        return False
    family = FAMILIES[model_type]
    return bool(family.rotary) and not family.sine_first and not family.stacks


def fits(source: Source) -> Reason:
    """Say why the parameters of a model cannot hold the encoding."""
    if not hasattr(source.config, "rope_parameters"):
        return "its config says nothing of its rotation, which is fixed"
    own = source.config.rope_parameters or {}
    if any(isinstance(value, dict) for value in own.values()):
        return "its layers have parameters by their type, which no single set replaces"
    if getattr(source.encoding, "pairing", "half_split") == "interleaved" and not source.family.interleaved:
        return "its attention pairs dimension k with k + half, and the encoding 2k with 2k + 1"
    share = getattr(source.encoding, "partial_rotary_factor", None) or 1.0
    if share != 1.0 and not source.family.partial_rotary and not silent(source.encoding):
        return "its attention turns whole heads only"
    return None


def build(source: Source) -> Target:
    """Return the stock model with the parameters of the encoding."""
    config = stock_config(source)
    parameters = rope_parameters(source, container=source.model_type == "phi3")  # which takes no other type
    if source.model_type == "phimoe" and parameters["rope_type"] != "default":
        parameters |= dict.fromkeys(("short_mscale", "long_mscale"), pair_frequencies(source)[1])  # read, and wanted
    if not source.family.partial_rotary:
        parameters.pop("partial_rotary_factor", None)
    config.rope_parameters = parameters
    config.max_position_embeddings = source.stated
    weights = {name: weight for name, weight in source.model.state_dict().items() if "posenc" not in name.split(".")}
    return Target(cls=source.stock, config=config, weights=weights)


register_route(
    Route(
        name="self_rope",
        writes="the same architecture, its rope_parameters rewritten",
        rank=0,
        serves=serves,
        takes=takes_rotation,
        fits=fits,
        build=build,
        runs="every engine that knows the rope_type: llama3 for none, longrope for one by pair",
    )
)
