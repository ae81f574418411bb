"""Rotary extensions, temperatures and growing rotations inside models, with stock models as oracles."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_posenc as posenc
from tests import checkpoints
from tests.encodings.test_distances import CASES
from tests.models import SUBJECTS, assert_same, in_steps, logits, sharpened, tokens

LENGTH = 45
SPECS: dict[str, posenc.EncodingConfig] = {
    **{case: posenc.encoding(name, **fields) for case, (name, fields, _) in CASES.items()},
    "xpos": posenc.encoding("xpos", scale_base=50.0),
    "lerope": posenc.encoding("lerope", per_layer=True),
    "longrope": posenc.RoPE(
        scaling={
            "rope_type": "longrope",
            "factor": 2.0,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": 20,
        }
    ),
    "tempered-rerope": posenc.encoding("rerope", window=5, temperature={"kind": "log_n", "length": 8}),
    "tempered-alibi": posenc.Alibi(temperature={"kind": "per_head", "scale": 1.5, "per_layer": True}),
    "tempered-dynamic": posenc.RoPE(
        scaling={"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 20},
        temperature={"kind": "llama4", "length": 8},
    ),
    "tempered-nope": posenc.NoPE(temperature={"kind": "ssmax_paper"}),
    "tempered-shaw": posenc.encoding("shaw", relative="keys_and_values", temperature={"kind": "llama4", "length": 8}),
    "tempered-cope": posenc.encoding("cope", temperature={"kind": "inkling", "length": 8}),
}


def patched(spec: posenc.EncodingConfig, subject: str = "llama", **fields: Any) -> Any:
    return posenc.patch(SUBJECTS[subject].fresh(**fields), spec, verify=False)


@pytest.mark.parametrize("case", list(CASES))
def test_a_stock_model_says_the_same_where_keys_stand_as_far_away_as_they_seem(case: str) -> None:
    """In one layer the last token hears of others through their positions alone, which a stock model takes as given."""
    name, fields, distance = CASES[case]
    stock = SUBJECTS["llama"].fresh(num_hidden_layers=1, attn_implementation="eager")
    model = posenc.patch(copy.deepcopy(stock), posenc.encoding(name, **fields), verify=False)
    ids = tokens(1, LENGTH)
    found = logits(model, ids)
    for i in range(0, LENGTH, 4):
        seems = [(j, distance(i, j)) for j in range(i + 1)]
        seen = [(j, away) for j, away in seems if away is not None]
        positions = torch.tensor([[100 - away for _, away in seen]])
        mask = torch.ones(1, len(seen), dtype=torch.long)
        expected = logits(stock, ids[:, [j for j, _ in seen]], position_ids=positions, attention_mask=mask)
        assert_same(found[:, i], expected[:, -1], 1e-4)


@pytest.mark.parametrize("subject", ["llama", "gpt2"])
@pytest.mark.parametrize("spec", list(SPECS))
def test_pieces_padding_and_backends_change_nothing(spec: str, subject: str) -> None:
    model, ids = patched(SPECS[spec], subject), tokens(2, LENGTH)
    full = logits(model, ids)
    assert full.isfinite().all()
    assert_same(in_steps(model, ids, [17, 1, 6, 1, 20], DynamicCache()), full, 1e-4)
    mask = torch.ones(2, LENGTH + 3, dtype=torch.long)
    mask[1, :3] = mask[0, -3:] = 0
    padded = torch.zeros_like(mask)
    padded[mask.bool()] = ids.flatten()
    said = logits(model, padded, attention_mask=mask)
    assert_same(torch.stack([said[0, :LENGTH], said[1, 3:]]), full, 1e-4)
    model.set_attn_implementation("eager")
    assert_same(logits(model, ids), full, 1e-4)


@pytest.mark.parametrize("spec", ["self_extend", "rerope-leaky", "string"])
def test_an_encoder_goes_by_positions_and_not_by_slots(spec: str) -> None:
    """Tokens handed over in another order, with their positions, get the same answers."""
    model, ids = patched(SPECS[spec], "bert"), tokens(2, LENGTH)
    full, positions = logits(model, ids), torch.arange(LENGTH)[None]
    assert_same(logits(model, ids.flip(1), position_ids=positions.flip(1)), full.flip(1), 1e-4)
    mask = torch.ones(2, LENGTH + 4, dtype=torch.long)
    mask[:, LENGTH:] = 0
    padded = torch.nn.functional.pad(ids, (0, 4))
    assert_same(logits(model, padded, attention_mask=mask)[:, :LENGTH], full, 1e-4)
    plain = logits(patched(posenc.RoPE(), "bert"), ids)
    assert float((plain - full).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("start", "plain"),
    [
        (posenc.encoding("lerope", theta=500.0), posenc.RoPE(theta=500.0)),
        (posenc.encoding("lerope", theta=500.0, per_layer=True), posenc.RoPE(theta=500.0)),
        (posenc.RoPE(theta=500.0, temperature={"kind": "ssmax"}), posenc.RoPE(theta=500.0)),
        (posenc.Alibi(temperature={"kind": "per_head", "per_layer": True}), posenc.Alibi()),
        (posenc.Learned(temperature={"kind": "constant"}), posenc.Learned()),
        (posenc.encoding("drope"), posenc.NoPE()),
    ],
    ids=lambda config: config.name,
)
def test_identity_starts_change_no_logit(start: posenc.EncodingConfig, plain: posenc.EncodingConfig) -> None:
    ids = tokens(2, LENGTH)
    assert torch.equal(logits(patched(start, "gpt2"), ids), logits(patched(plain, "gpt2"), ids))


@pytest.mark.parametrize(
    "inner",
    [posenc.NoPE(), SPECS["rerope"], SPECS["longrope"], SPECS["xpos"], posenc.encoding("lerope")],
    ids=lambda config: config.name,
)
def test_a_temperature_is_another_scale_of_products(inner: posenc.EncodingConfig) -> None:
    """Whichever way the encoding acts, where it adds nothing to them."""
    ids, plain = tokens(2, LENGTH), patched(inner, "llama")
    warm = patched(dataclasses.replace(inner, temperature={"kind": "constant", "scale": 1.5}), "llama")
    for layer in plain.model.layers:
        layer.self_attn.scaling *= 1.5
    assert_same(logits(warm, ids), logits(plain, ids))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["alibi", "shaw", "shaw-values", "cope", "fox", "transformer_xl"])
def test_a_temperature_multiplies_the_whole_score_once(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softmax of t_i times (product + bias), the bias being that of the bare query: read off a model without one."""
    fields = {"shaw-values": {"relative": "keys_and_values"}}.get(name, {})
    temperature = {"kind": "inkling", "length": 8, "scale": 0.7}
    plain, warm = (
        patched(posenc.encoding(name.removesuffix("-values"), **fields, **more), "llama", attn_implementation=kind)
        for more, kind in (({}, "eager"), ({"temperature": temperature}, backend))
    )
    torch.manual_seed(3)
    for one, other in zip(plain.model.posenc.parameters(), warm.model.posenc.parameters(), strict=True):
        other.data = one.data.add_(0.3 * torch.randn_like(one)).clone()
    ids = tokens(2, LENGTH)
    factor = 1 + 0.7 * ((torch.arange(LENGTH) + 1) / 8).clamp(min=1).log()

    def tempered(scores: Tensor, dim: int, **fields: Any) -> Tensor:
        return torch.softmax(scores * factor[:, None], dim, **fields)

    found = logits(warm, ids)
    plain_logits = logits(plain, ids)
    monkeypatch.setattr(torch.nn.functional, "softmax", tempered)
    monkeypatch.setattr(Tensor, "softmax", tempered)
    assert_same(found, logits(plain, ids))
    assert float((found - plain_logits).abs().max()) > 1e-2


def test_the_attention_factor_of_yarn_stands_on_the_angles_or_on_the_scores() -> None:
    """Where the whole head turns, a factor on cosine and sine is its square on the scores."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    on_angles = posenc.RoPE(scaling={**scaling, "attention_factor": 1.3})
    bare = posenc.RoPE(scaling={**scaling, "attention_factor": 1.0})
    on_scores = dataclasses.replace(bare, temperature={"kind": "constant", "scale": 1.3**2})
    ids = tokens(2, LENGTH)
    said = [logits(patched(spec, "gpt2"), ids) for spec in (on_angles, on_scores, bare)]
    assert_same(said[1], said[0], 1e-4)
    assert float((said[2] - said[0]).abs().max()) > 1e-2


@pytest.mark.parametrize("spec", ["tempered-alibi", "tempered-nope", "lerope"])
def test_trained_numbers_learn_and_are_saved(spec: str, tmp_path: Path) -> None:
    model, ids = patched(SPECS[spec], "gpt2"), tokens(2, 20)
    own = {name: weight for name, weight in model.named_parameters() if ".posenc." in name}
    assert own
    model(ids, labels=ids).loss.backward()
    for weight in own.values():
        assert weight.grad is not None
        assert weight.grad.any()
        weight.data.add_(0.1 * torch.rand_like(weight))
    model.save_pretrained(tmp_path)
    loaded = posenc.from_pretrained(str(tmp_path))
    assert torch.equal(logits(loaded.eval(), ids), logits(model, ids))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_hf_compat_says_what_transformers_says(kind: str) -> None:
    """One pass and a cached decode across the trained length, keys of older bases included."""
    fields: dict[str, Any] = {"rope_type": kind, "factor": 2.0}
    if kind == "longrope":
        fields |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
        fields["original_max_position_embeddings"] = 64
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=61, num_key_value_heads=2, max_position_embeddings=64, **shape)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    plain = sharpened(LlamaForCausalLM(config)).eval()
    theirs = copy.deepcopy(config)
    theirs.rope_parameters = {**fields, "rope_theta": 10000.0}
    ids = tokens(1, 80)
    compat_encoding = posenc.RoPE(scaling={**fields, "mode": "hf_compat"})
    for sizes in ([50], [80], [60, *[1] * 20]):
        # both fresh: transformers' module remembers the longest call, and up to 5.5 it never forgets it
        stock = LlamaForCausalLM(theirs).eval()
        stock.load_state_dict(plain.state_dict())
        ours = posenc.patch(copy.deepcopy(plain), compat_encoding, verify=False)
        end = sum(sizes)
        expected, found = (in_steps(model, ids[:, :end], sizes, DynamicCache()) for model in (stock, ours))
        assert_same(found, expected, 1e-4)
    compat, consistent = (
        in_steps(model, ids, [60, *[1] * 20], DynamicCache())
        for model in (
            posenc.patch(copy.deepcopy(plain), encoding, verify=False)
            for encoding in (compat_encoding, posenc.RoPE(scaling=fields))
        )
    )
    assert float((compat - consistent).abs().max()) > 1e-2, "the cached keys of older bases are what differs"


def block_perplexities(model: Any, documents: Tensor) -> list[float]:
    """Perplexity in every block of 512 tokens."""
    said = logits(model, documents[:, :-1]).float()
    nll = torch.nn.functional.cross_entropy(said.flatten(0, 1), documents[:, 1:].flatten(), reduction="none")
    return nll.view(len(documents), -1, 512).mean(dim=(0, 2)).exp().tolist()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_real_model_reads_further_without_training() -> None:
    """Stories of a Llama trained to 512 tokens, one after the other up to 2,048: the last block, and the first."""
    model, tokenizer = checkpoints.stories260k()
    torch.manual_seed(0)
    starts = torch.full((9, 1), tokenizer.bos_token_id)
    sampled = {"do_sample": True, "min_new_tokens": 250, "max_new_tokens": 250, "eos_token_id": None, "pad_token_id": 0}
    documents = model.generate(starts, **sampled).reshape(1, -1)[:, :2049]
    before = block_perplexities(model, documents)
    specs = {
        "dynamic": posenc.RoPE(scaling={"rope_type": "dynamic", "factor": 1.0}),
        "yarn": posenc.RoPE(scaling={"rope_type": "yarn", "factor": 2.0}),
        "self_extend": posenc.encoding("self_extend", group=8, window=256),
        "rerope": posenc.encoding("rerope", window=256),
        "dual_chunk": posenc.encoding("dual_chunk"),
        "string": posenc.encoding("string", local=64),
        "lm_infinite": posenc.encoding("lm_infinite"),
        "sinks": posenc.encoding("sinks"),
    }
    print(f"\n{'as it is':12} {' '.join(f'{ppl:6.2f}' for ppl in before)}")
    for name, spec in specs.items():
        after = block_perplexities(posenc.patch(copy.deepcopy(model), spec), documents)
        print(f"{name:12} {' '.join(f'{ppl:6.2f}' for ppl in after)}")
        assert after[-1] < before[-1], name
        # a head of this model has four pairs: the one that YaRN's ramp meets halfway is a quarter of all
        assert after[0] < (1.15 if name == "yarn" else 1.08) * before[0], name


ALIKE = {
    "rope": {},
    "lerope": {},
    "self_extend": {"window": 64},
    "rerope": {"window": 64},
    "string": {"shift": 64, "local": 0},
    "sinks": {"recent": 64},
    "lm_infinite": {"window": 64},
    "dual_chunk": {"chunk": 90, "local": 10},
    "xpos": {"scale_base": 1e7},
}
"""Fields with which each says what the rotation alone says of a short text."""


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("kind", ["gptj", "cohere", "llama"])
def test_pairs_are_those_of_the_models_weights(kind: str, name: str) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    if kind == "gptj":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    config = AutoConfig.for_model(kind, vocab_size=61, pad_token_id=0, eos_token_id=None, **shape)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model, ids = sharpened(AutoModelForCausalLM.from_config(config)).eval(), tokens(2, LENGTH)
    if kind == "gptj" and not hasattr(model.base_model, "rotary_emb"):
        pytest.skip("before transformers 5.24 the heads of GPT-J turn without a module that could be replaced")
    before = logits(model, ids)
    posenc.patch(model, posenc.encoding(name, **ALIKE[name]), verify=False)
    assert_same(logits(model, ids), before, 2e-4)
    with torch.no_grad():
        bare = logits(posenc.patch(posenc.unpatch(model), posenc.NoPE()), ids)
    assert float((bare - before).abs().max()) > 1e-2 * float(before.abs().max())
