"""The routes of native export: exact in float64 where the target computes in the same order, and refused elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_posenc as posenc
from hf_posenc.config import Encoding
from hf_posenc.errors import ExportError, PatchStateError, UnknownNameError
from hf_posenc.export import export_native, known_types, ranked, routes
from hf_posenc.export.route import ROUTES, read, targets
from hf_posenc.export.writing import _write
from hf_posenc.rotation import turn
from hf_posenc.surgery import record_of
from tests.export.models import ENCODINGS, MODELS, REFUSED, ROUTED, by_loops, of_type, prepared, stirred
from tests.families import stacked
from tests.models import TRAINED, logits, tokens

EXACT = 1e-12
ROUNDED = {"phi3": 2e-6, "bloom": 2e-8, "mpt": 1e-6}
"""Where the order or a constant differs: joint projections before norms that cut to float32,
BLOOM's GELU of eight digits, and MPT's softmax in float32."""
SINGLE = ("gemma", "gemma2", "gpt_neo", "hunyuan_v1_moe", "vaultgemma")
"""Types that keep a number or compute a softmax in float32, whatever dtype they are asked for."""
TURNING = [
    next(cell for cell in ROUTED if cell[1:] == pair)
    for pair in dict.fromkeys(cell[1:] for cell in ROUTED)
    if pair[1] not in ("mpnet", "roformer", "self_table")
]
"""One model for every encoding and target with `rope_parameters`; the tables of the others are compared bit by bit."""


class Borrowed(Encoding):
    """Turns by the table of a stock rotary module, which rounds its angles to float32; everything else stays exact."""

    def __init__(self, rotary: nn.Module, inner: Encoding) -> None:
        super().__init__()
        self.rotary, self.inner = rotary, inner

    def overrides(self, hook: str) -> bool:
        return self.inner.overrides(hook)

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        if not self.inner.overrides("rotate"):
            return states
        cos, sin = (part[:, None, :, : part.shape[-1] // 2] for part in self.rotary(states, position_ids))
        pairing = getattr(getattr(self.inner, "config", None), "pairing", "half_split")
        return turn(states, cos, sin, pairing=pairing)

    def temperature(self, position_ids: Tensor) -> Tensor | None:
        return self.inner.factor(position_ids)


def written(model: Any, target: str, folder: Path) -> Any:
    """The stock model that a route writes, read back in float64."""
    route, source = ROUTES[target], read(model)
    assert route.refuses(source) is None
    built = route.build(source)
    _write(source, built, folder)
    loaded, info = built.cls.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return by_loops(loaded).eval()


def borrowing(model: Any, stock: Any) -> Any:
    """The patched model, turning by the stock model's own table where that has one."""
    rotary = next((module for name, module in stock.named_modules() if name.endswith("rotary_emb")), None)
    body = record_of(model).plan.body_of(model)  # type: ignore[union-attr]
    if rotary is not None and hasattr(body, "posenc"):
        encoding = body.posenc
        layers = getattr(encoding, "layers", None)
        each = [Borrowed(rotary, layer) for layer in layers] if layers is not None else []
        body.posenc_joints[0].override = posenc.config.Layers(each) if each else Borrowed(rotary, encoding)
    return model


def compare(model: Any, stock: Any, allowed: float = EXACT) -> None:
    """The two say the same in float64, past the trained length too where positions reach that far."""
    own = posenc.max_length(model)
    ids = tokens(2, min(TRAINED + 20, own or TRAINED + 20))
    expected, found = logits(borrowing(model, stock), ids), logits(stock, ids)
    assert found.dtype == torch.float64
    assert float((found - expected).abs().max()) <= allowed * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(("name", "spec", "target"), ROUTED, ids=["-".join(cell) for cell in ROUTED])
def test_every_route_is_exact(name: str, spec: str, target: str, tmp_path: Path) -> None:
    model = prepared(name, spec, torch.float64)
    compare(model, written(model, target, tmp_path), ROUNDED.get(target, ROUNDED.get(name, EXACT)))


@pytest.mark.parametrize(("name", "spec", "target"), TURNING, ids=["-".join(cell) for cell in TURNING])
def test_stock_frequencies_are_those_of_the_encoding(name: str, spec: str, target: str) -> None:
    model = prepared(name, spec)
    source = read(model)
    module: Any = source.module
    stock = ROUTES[target].build(source)
    rotary = next(m for n, m in stock.cls(stock.config).named_modules() if n.endswith("rotary_emb"))
    module = getattr(module, "inner", module)
    module = module.layers[0] if hasattr(module, "layers") else module
    own = torch.tensor(getattr(module, "inv_freq", [0.0] * len(rotary.inv_freq)), dtype=torch.float64)
    own = own * module.alpha.detach().double().exp() if hasattr(module, "alpha") else own
    torch.testing.assert_close(rotary.inv_freq.double(), own, rtol=1e-6, atol=1e-25)
    assert rotary.attention_scaling == pytest.approx(getattr(module, "attention_factor", 1.0))


@pytest.mark.parametrize(("name", "spec", "target", "word"), REFUSED, ids=["-".join(cell[:3]) for cell in REFUSED])
def test_what_is_not_exact_is_refused_with_its_reason(
    name: str, spec: str, target: str, word: str, tmp_path: Path
) -> None:
    model = prepared(name, spec)
    assert word in str(routes(model)[target])
    with pytest.raises(ExportError, match=word):
        export_native(model, tmp_path / "out", target=target)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_every_route_and_every_type_that_it_names_is_tried() -> None:
    tried = {(target, read(prepared(name, spec)).model_type) for name, spec, target in ROUTED}
    general = ("self_bias", "self_rope", "self_table")  # from every type of a kind: see the tests of these
    declared = {(route.name, kind) for route in ranked() if route.name not in general for kind in known_types(route)}
    twins = {"camembert": "roberta", "xlm-roberta": "roberta"}
    left = {(target, kind) for target, kind in declared - tried if (target, twins.get(kind)) not in tried}
    assert left <= {("gpt_neox", "gpt_bigcode")}
    assert {route.name for route in ranked()} == {target for target, _ in tried} | {"self_bias"}


@pytest.mark.parametrize(
    ("model_type", "encoder", "decoder"),
    [
        ("t5", "alibi", "alibi"),
        ("t5", "t5", "kerple"),
        ("mt5", "nope", "alibi"),
        ("umt5", "t5-per-layer", "alibi"),
    ],
)
def test_a_t5_holds_any_bias_of_the_distance(model_type: str, encoder: str, decoder: str, tmp_path: Path) -> None:
    specs = (ENCODINGS[name].to_dict() for name in (encoder, decoder))
    model = stacked.stock(model_type).double()
    posenc.patch(model, posenc.encoding("stacks", **dict(zip(("encoder", "decoder"), specs, strict=True))))
    stirred(model)
    stock = written(model, "self_bias", tmp_path)
    given, ids = {"input_ids": tokens(2, TRAINED + 20)}, tokens(2, TRAINED + 9, seed=1)
    expected, found = stacked.answers(model, given, ids), stacked.answers(stock, given, ids)
    assert float((found - expected).abs().max()) <= EXACT * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    ("specs", "word"),
    [
        ({"encoder": "alibi"}, "one stack keeps"),
        ({"encoder": "t5-per-layer", "decoder": "alibi"}, "differ"),
        ({"encoder": "alibi", "decoder": "rope"}, "distance alone"),
    ],
)
def test_a_t5_refuses_what_buckets_cannot_hold(specs: dict[str, str], word: str) -> None:
    inner = {name: ENCODINGS[spec].to_dict() for name, spec in specs.items()}
    model = posenc.patch(stacked.stock("t5"), posenc.encoding("stacks", **inner), verify=False)
    assert word in str(routes(model)["self_bias"])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["self_rope", "self_table"])
def test_the_same_architecture_from_every_type(target: str, tmp_path: Path) -> None:
    tried = []
    for model_type in known_types(ROUTES[target]):
        spec = {"self_rope": "nope", "self_table": "learned-tile"}[target]
        model = of_type(model_type, spec, torch.float64)
        if ROUTES[target].refuses(read(model)) is None:
            allowed = 1e-6 if model_type in SINGLE else EXACT
            compare(model, written(model, target, tmp_path / model_type), allowed)
            tried.append(model_type)
    assert len(tried) > {"self_rope": 50, "self_table": 20}[target]


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "spec"), [(t, s) for t in ("gpt2", "bert", "llama") for s in ENCODINGS])
def test_the_cheap_answer_is_never_narrower_than_the_real_one(model_type: str, spec: str) -> None:
    try:
        model = prepared(model_type, spec)
    except posenc.PosencError:
        return
    real = [name for name, reason in routes(model).items() if reason is None]
    cheap = targets(model_type, ENCODINGS[spec])
    assert [name for name in cheap if name in real] == real  # in the same order


def test_targets_by_name_take_the_default_fields() -> None:
    assert targets("gpt2", "rope") == ("starcoder2", "gpt_neox")
    assert targets("posenc_llama", "nope") == ("self_rope", "smollm3")
    assert targets("gpt2", "alibi") == ()
    assert targets("gpt2", ENCODINGS["llama4"]) == ()
    assert targets("mamba", "rope") == ()
    with pytest.raises(UnknownNameError, match="'rope'"):
        targets("gpt2", "rpoe")


def test_a_pair_without_any_target_is_refused_with_every_reason(tmp_path: Path) -> None:
    model = prepared("gpt2", "alibi")
    with pytest.raises(ExportError, match=r"starcoder2: .*no rotation.*gpt_neox: .*save_pretrained"):
        export_native(model, tmp_path / "out")


@pytest.mark.parametrize(("target", "word"), [("falcon", "bfloat16"), ("bloom", "LayerNorm"), ("mpt", "biases")])
def test_families_with_an_encoding_of_that_name_say_why_they_do_not_take_it(
    target: str, word: str, tmp_path: Path
) -> None:
    model = prepared("gpt2", "alibi")
    for asked in (target, None):
        with pytest.raises(ExportError, match=f"{target}: [^;]*{word}"):
            export_native(model, tmp_path / "out", target=asked)
    with pytest.raises(UnknownNameError):
        export_native(prepared("gpt2", "t5"), tmp_path / "out", target=target)


def test_a_stock_model_is_told_to_save_itself(tmp_path: Path) -> None:
    with pytest.raises(PatchStateError, match="save_pretrained"):
        export_native(MODELS["gpt2"].fresh(), tmp_path / "out")


def test_a_target_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="starcoder2"):
        export_native(prepared("gpt2", "rope"), tmp_path / "out", target="starcoder")
