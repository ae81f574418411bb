"""FoPE against its twin and the sheet's counts, and DroPE's normalisation against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_posenc as posenc
from hf_posenc.errors import ConfigError, UnsupportedEncodingError
from tests import naive_rotary as naive
from tests.models import SUBJECTS, assert_same, in_steps, logits, tokens


def geometry(dim: int = 8, length: int = 512, **fields: Any) -> posenc.Geometry:
    plain = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "causal": True}
    return posenc.Geometry(**{**plain, "head_dim": dim, "max_position_embeddings": length, **fields})


@pytest.mark.parametrize(("dim", "length", "kept"), [(64, 512, 16), (64, 1024, 18), (128, 4096, 46)])
def test_published_numbers_of_frequencies_are_kept(dim: int, length: int, kept: int) -> None:
    encoding: Any = posenc.build(posenc.encoding("fope"), geometry(dim, length))
    assert (len(encoding.inv_freq), encoding.still) == (kept, dim // 2 - kept)
    assert encoding.cosines.shape == encoding.sines.shape == (2, kept, kept)
    assert not any(parameter.requires_grad for parameter in encoding.parameters())


@pytest.mark.parametrize("sine", ["one", "zero"])
def test_it_turns_as_its_twin_does(sine: str) -> None:
    torch.manual_seed(0)
    encoding: Any = posenc.build(posenc.encoding("fope", still_sines=sine, trainable=True), geometry(16)).double()
    queries, ids = torch.randn(2, 4, 3, 16).double(), torch.tensor([[0, 5, 131072], [7, 8, 9]])
    found = encoding.rotate(queries, ids)
    cosines, sines = encoding.cosines.tolist(), encoding.sines.tolist()
    for b, row in enumerate(ids.tolist()):
        for h in range(4):
            for n, position in enumerate(row):
                mixture = cosines[h // 2], sines[h // 2]
                state = queries[b, h, n].tolist()
                expected = naive.fope(state, position, *mixture, 10000.0, 512, 1.0 if sine == "one" else 0.0)
                assert found[b, h, n].tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(encoding.rotate(queries[:, ::2], ids), found[:, ::2]), "a key turns as the queries that meet it"
    found.square().sum().backward()
    assert encoding.cosines.grad.any()
    assert encoding.sines.grad.any()


def test_without_noise_it_is_rope_on_the_pairs_that_turn() -> None:
    plain = posenc.build(posenc.encoding("fope", gain=0, still_sines="zero"), geometry(16))
    states, ids = torch.randn(1, 4, 5, 16), torch.tensor([[0, 1, 2, 77, 4000]])
    found, whole = plain.rotate(states, ids), posenc.build(posenc.RoPE(), geometry(16)).rotate(states, ids)
    kept = len(plain.inv_freq)  # type: ignore[arg-type]
    turning = [*range(kept), *range(8, 8 + kept)]
    still = [k for k in range(16) if k not in turning]
    assert torch.allclose(found[..., turning], whole[..., turning], atol=1e-6)
    assert torch.equal(found[..., still], states[..., still])


def test_drope_normalises_as_torch_does() -> None:
    for kind in ("all_heads", "per_head"):
        encoding: Any = posenc.encoding("drope", normalization=kind).build(geometry())
        for parameter in encoding.parameters():
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
        for heads, hook, weight in ((4, "rotate", "query_weight"), (2, "rotate_key", "key_weight")):
            states, scale = 9 * torch.randn(2, heads, 5, 8), getattr(encoding, weight)
            whole = states.transpose(1, 2).flatten(2) if kind == "all_heads" else states
            expected = torch.nn.functional.rms_norm(whole, whole.shape[-1:], scale.flatten(), eps=1e-6)
            expected = expected.unflatten(-1, (heads, 8)).transpose(1, 2) if kind == "all_heads" else expected
            assert torch.allclose(getattr(encoding, hook)(states, torch.arange(5)[None]), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["all_heads", "per_head"])
def test_a_normalised_model_decodes_learns_and_forgets_scale(kind: str) -> None:
    config, ids = posenc.encoding("drope", normalization=kind), tokens(2, 40)
    model = posenc.patch(SUBJECTS["llama"].fresh(), config)
    said = logits(model, ids)
    assert_same(in_steps(model, ids, [11, 1, 1, 20, 7], DynamicCache(config=model.config)), said)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(3)
    assert_same(logits(model, ids), said, 1e-4)
    model(input_ids=ids, labels=ids).loss.backward()
    weights = [parameter for name, parameter in model.named_parameters() if "posenc." in name]
    assert len(weights) == 2
    assert all(parameter.grad.any() for parameter in weights)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UnsupportedEncodingError, match="for rotary models"):
        posenc.patch(SUBJECTS["gpt2"].fresh(), posenc.encoding("drope", normalization="per_head"))
    with pytest.raises(ConfigError, match="did you mean 'per_head'"):
        posenc.encoding("drope", normalization="per_heads")
    with pytest.raises(ConfigError, match="gain"):
        posenc.encoding("fope", gain=-1.0)
    with pytest.raises(ConfigError, match="did you mean 'zero'"):
        posenc.encoding("fope", still_sines="zeros")
    with pytest.raises(ConfigError, match="none does within 4 tokens"):
        posenc.build(posenc.encoding("fope"), geometry(length=4))
