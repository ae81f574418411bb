"""The joint between encodings and attention: what happens between a stock attention module and its attention function.

The attention instance's class is swapped for a subclass whose forward is the stock forward with two stand-ins. A cache
proxy rotates new keys once, on their way into the cache. A view of the config routes the look-up of the attention
function through `posenc_attention`, where queries are rotated and the bias joins the mask. The model's own
`_attn_implementation` stays what it is and decides which stock attention function finally runs.

What is added to the scores, and in which pieces, is the business of `scores`. This is the only module that names
`AttentionInterface`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc.caching import remembered, update_measured
from hf_posenc.config import Encoding
from hf_posenc.errors import BackendError
from hf_posenc.flash import by_name, is_flash, kernel_dtype, rides
from hf_posenc.flex import FLEX, carries
from hf_posenc.forms import attend_in_form
from hf_posenc.kernels import KERNELS
from hf_posenc.positions import Positions, carried, working_dtype
from hf_posenc.scores import (
    Output,
    Scores,
    additive,
    exactly,
    fitted,
    fitted_gates,
    tempered,
    with_gates,
    without_gates,
)
from hf_posenc.toeplitz import trusted

NAME = __name__.replace(".", "_")
"""Under this name stands `posenc_attention`; the code beside a saved model is a module of its own and has its own."""
CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past", "past_key_value")
BIAS_BACKENDS = ("eager", "sdpa")
Inner = Callable[..., Any]


def uses_attention(encoding: Encoding) -> bool:
    """Tell whether the encoding acts inside attention at all."""
    return any(map(encoding.overrides, ("rotate", "rotate_key", "bias", "temperature", "score", "output_bias")))


def looks_up_attention(stock: type[nn.Module]) -> bool:
    """Tell whether an attention class was written to look its attention function up, where it can be handed ours."""
    modules = (sys.modules.get(cls.__module__) for cls in stock.__mro__)
    return any(isinstance(value, AttentionInterface) for module in modules for value in vars(module).values())


def uses_key_positions(encoding: Encoding) -> bool:
    """Tell whether a query has to know the positions of cached keys."""
    hooks = ("bias", "score", "output_bias")
    return any(encoding.overrides(hook) for hook in hooks) or encoding.rotation_grows_after is not None


def caches_bare_keys(encoding: Encoding) -> bool:
    """Tell whether keys have to be cached as projected, since how they turn depends on who looks at them."""
    return encoding.overrides("score") or encoding.rotation_grows_after is not None


def check_backend(encoding: Encoding, backend: str | None, *, packed: bool = False) -> None:
    """Raise BackendError where an attention backend would drop or distort the encoding, or texts `packed` in a row."""
    known = backend in ALL_ATTENTION_FUNCTIONS or {"/", "|"} & set(str(backend))  # transformers refuses any other
    able = backend in BIAS_BACKENDS or (backend == FLEX and carries(encoding))
    able = able or (is_flash(backend) and rides(encoding) and not packed)
    if (packed or uses_key_positions(encoding)) and known and not able:
        what = "document_ids" if packed else f"the scores of {type(encoding).__name__}"
        raise BackendError(
            f"attention backend {backend!r} has no way to carry {what}; "
            f"use one of {', '.join(BIAS_BACKENDS)}: model.set_attn_implementation('sdpa')."
        )


class _Call:
    """One call of one attention module; stands in for its cache."""

    def __init__(self, encoding: Encoding, positions: Positions, cache: Any, gates: Tensor | None) -> None:
        self.encoding = encoding
        self.positions = positions
        self.cache = cache
        self.gates = gates  # (b, h, n) of the new keys, from the cache on of all keys
        self.keys_done = False
        self.longest: Tensor | None = None  # norm of a cached key, (h_kv,)

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Rotate the new keys, unless they must be cached as they are, and hand them to the cache."""
        key = self.turned(key, self.encoding.remap(self.positions.query))
        self.keys_done = True
        if self.gates is not None:
            key = with_gates(key, self.gates)
        if self.gates is None and self.encoding.overrides("distance_bias"):
            key, value, self.longest = update_measured(self.cache, key, value, *args, **kwargs)
            return key, value
        key, value = self.cache.update(key, value, *args, **kwargs)
        if self.gates is not None:
            key, self.gates = without_gates(key, self.gates)
        return key, value

    def turned(self, key: Tensor, position_ids: Tensor) -> Tensor:
        """Return keys as they are cached, (b, h_kv, n, d)."""
        return key if caches_bare_keys(self.encoding) else self.encoding.rotate_key(key, position_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


class _ConfigView:
    """The config of an attention module, in which the attention function is ours."""

    _attn_implementation = NAME

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_config"), name)


def _viewed_config(self: nn.Module) -> _ConfigView:
    return _ConfigView(self.__dict__["config"])


def _set_config(self: nn.Module, config: Any) -> None:
    self.__dict__["config"] = config


def _rebuild(*described: Any) -> nn.Module:
    cls = interposed(*described)
    return cls.__new__(cls)


def _reduce(self: nn.Module, protocol: Any) -> Any:
    return _rebuild, (self.posenc_stock, self.posenc_label, self.posenc_inner), self.__dict__


@functools.cache
def interposed(stock: type[nn.Module], label: str, inner: Inner | None = None) -> type[nn.Module]:
    """Return the subclass of an attention class that attends with the encoding of its `posenc_joint`.

    Args:
        stock: a self-attention class.
        label: what the encoding puts before the class name, as in `RotaryGPT2Attention`.
        inner: what is run in place of the stock forward, where that looks up no attention function; hashable.
    """
    parameters = list(inspect.signature(stock.forward).parameters)[1:]
    states = parameters[0]  # `hidden_states`, as nearly everywhere
    cache_name = next((name for name in CACHE_ARGUMENTS if name in parameters), None)

    @functools.wraps(stock.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(parameters, args, strict=False))
        # 5.24 renamed the argument and still takes the old name, which may be the one that the caller used
        given = next((name for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)
        cache = kwargs[given] if given else None
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        hidden = kwargs.pop(states)
        positions = kwargs.pop("posenc_positions", None) or carried()
        if positions is None:
            past = cache.get_seq_length(getattr(self, "layer_idx", None) or 0) if cache is not None else 0
            positions = _plain_positions(hidden, kwargs.get("position_ids"), cache, int(past))
        encoding: Encoding = self.posenc_joint.of(self)  # type: ignore[union-attr, operator]
        with exactly(hidden.device):
            gates = encoding.gate(hidden)
        call = _Call(encoding, positions, cache, gates)
        if given and cache_name:
            kwargs.pop(given)
            kwargs[cache_name] = call
        return (inner or stock.forward)(self, hidden, posenc_call=call, **kwargs)

    body = {
        "__doc__": f"{stock.__name__} with positions by {label}.",
        "__module__": __name__,
        "forward": forward,
        "posenc_stock": stock,
        "posenc_label": label,
        "posenc_inner": inner,
        "__reduce_ex__": _reduce,
    }
    if inner is None:
        body["config"] = property(_viewed_config, _set_config)
    return type(f"{label}{stock.__name__}", (stock,), body)


def _plain_positions(states: Tensor, position_ids: Tensor | None, cache: Any, past: int) -> Positions:
    """Return the positions of a module that its model hands `position_ids` at most, or that is called by itself."""
    steps = torch.arange(past + states.shape[1], device=states.device)[None]
    query = steps[:, past:] if position_ids is None else position_ids
    noted = remembered(cache, past)  # by whoever filled the cache
    before = steps[:, :past] if noted is None else noted.to(query.device)
    rows = max(len(before), len(query))
    return Positions(query=query, key=torch.cat([before.expand(rows, -1), query.expand(rows, -1)], dim=-1))


def _stock_function(module: Any) -> tuple[str, Callable[..., Output]]:
    """Return the name and the attention function that the model's own config asks for."""
    backend = (module.__dict__.get("config") or module.posenc_joint.body.config)._attn_implementation or "eager"
    stock = module.posenc_stock
    if module.posenc_inner is not None:
        return backend, KERNELS[backend]
    if backend == "eager" and getattr(module, "reorder_and_upcast_attn", False):

        def upcast(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any) -> Output:
            output: Output = module._upcast_and_reordered_attn(query, key, value, mask)
            return output

        return backend, upcast
    eager = sys.modules[stock.__module__].eager_attention_forward
    function = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager)
    return backend, by_name(function) if is_flash(backend) else function


def _taken_dtype(module: nn.Module, backend: str, query: Tensor) -> torch.dtype:
    """Return the dtype in which an attention function takes what is added to the scores of queries, (b, h, q, d)."""
    if is_flash(backend):
        return kernel_dtype(module, query)
    # the CPU kernels take a float32 mask beside half-precision queries, which keeps distant keys apart; others do not
    wide = backend == "sdpa" and query.device.type == "cpu" and query.dtype != torch.float64
    wide = wide and (torch.compiler.is_compiling() or trusted(query.dtype))
    return working_dtype(query) if wide or backend == FLEX else query.dtype


def posenc_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> Output:
    """Attend with the encoding of `module.posenc_joint`; called by stock attention modules in place of their function.

    Args:
        module: the attention module.
        query: (b, h, q, d).
        key: (b, h_kv, k, d), rotated already where they come out of a cache.
        value: (b, h_kv, k, d).
        attention_mask: None, boolean or additive, (b, 1, q, k).
        **kwargs: handed to the stock attention function.

    Returns:
        Output (b, q, h, d), and the attention weights where the backend gives them.

    Raises:
        BackendError: the backend cannot carry the encoding.
    """
    call: _Call = kwargs.pop("posenc_call")
    kwargs.pop("position_bias", None)  # T5's own: zeros, now that its table is gone
    kwargs.pop("position_ids", None)  # flash attention would read off them which tokens are of one text
    encoding, positions = call.encoding, call.positions
    backend, stock = _stock_function(module)
    check_backend(encoding, backend)
    if spelled := positions.documents is not None or uses_key_positions(encoding):
        causal = kwargs.pop("is_causal", None)
        causal = getattr(module, "is_causal", True) if causal is None else causal
        kwargs["is_causal"] = causal and is_flash(backend)  # any other is told by the mask alone
        if attention_mask is None or is_flash(backend):
            # no mask hides the empty slots of a static cache, behind the tokens that there are
            key, value = (states[:, :, : positions.key.shape[1]] for states in (key, value))
        positions = fitted(positions, key.shape[2])
    positions = Positions(
        query=encoding.remap(positions.query),
        key=encoding.remap(positions.key),
        gates=fitted_gates(call.gates, key),
        slots=positions.own_slots(),
        documents=positions.documents,
        counted=call.positions.counted and not encoding.overrides("remap"),
        known={} if encoding.overrides("remap") else call.positions.known,
    )
    factor = encoding.factor(positions.query)
    key = key if call.keys_done else call.turned(key, positions.key)
    if not caches_bare_keys(encoding):
        query = encoding.rotate(query, positions.query)
    if not spelled:
        if backend == "eager" and attention_mask is not None:
            attention_mask = additive(attention_mask, query.dtype)
        return stock(module, tempered(query, factor), key, value, attention_mask, **kwargs)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, _: Tensor) -> Output:
        return stock(module, query, key, value, mask, **kwargs)

    dtype = _taken_dtype(module, backend, query)
    scaling = kwargs["scaling"] = kwargs.get("scaling") or query.shape[-1] ** -0.5
    known = {"mask": attention_mask, "causal": causal, "dtype": dtype, "scaling": scaling, "factor": factor}
    scores = Scores(encoding, positions, longest=call.longest, **known)
    return attend_in_form(scores, attend, query, key, value, backend=backend, **kwargs)


AttentionInterface.register(NAME, posenc_attention)
