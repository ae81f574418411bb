"""The recommended recipe on real models that it was not made on: a rotary decoder and an encoder."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hf_posenc as posenc
from hf_posenc.conversion.convert import Conversion
from tests import checkpoints

ANTIBODY = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDY"
)


def losses(done: Conversion) -> list[float]:
    """Return the held-out loss of the original, and after every stage."""
    stages = done.record["stages"]
    return [stages[0]["before"], *(stage["after"] for stage in stages)]


@pytest.mark.slow
def test_a_rotary_decoder_comes_part_of_the_way_to_no_positions() -> None:
    """Its text is what it writes itself, 256 tokens a row; half of what is lost is back after 98,304 tokens."""
    model, _ = checkpoints.stories260k()
    torch.manual_seed(0)
    start = torch.ones(256, 1, dtype=torch.long)
    rows = model.generate(
        start, attention_mask=start, do_sample=True, top_k=0, max_new_tokens=255, eos_token_id=None, pad_token_id=0
    )
    recipe = posenc.recipe_for(model, posenc.NoPE(), tokens=98_304)
    done = posenc.convert(model, posenc.NoPE(), rows.tolist(), recipe, length=256)
    original, replaced, end = losses(done)
    assert done.record["packing"]["separators"] == 0  # its texts begin with <s>, and it never met </s>
    assert original < end < (original + replaced) / 2


def evolved(model: object, mask: int, sequence: Tensor, *, rounds: int, chains: int) -> Tensor:
    """Return sequences that a masked model makes of one, (chains * rounds / 2, n), guessing places in turn."""
    sequences, found = sequence.repeat(chains, 1), []
    letters = slice(4, mask)
    for number in range(rounds):
        hidden = torch.rand(sequences.shape) < 0.4
        hidden[:, 0] = False
        with torch.no_grad():
            logits = model(sequences.masked_fill(hidden, mask)).logits[..., letters]  # type: ignore[operator]
        drawn = torch.distributions.Categorical(logits=logits).sample() + letters.start
        sequences = torch.where(hidden, drawn, sequences)
        if number >= rounds // 2:
            found.append(sequences)
    return torch.cat(found)


@pytest.mark.slow
def test_an_encoder_takes_the_same_road_to_a_rotation() -> None:
    model, tokenizer = checkpoints.sapiens_roberta()
    torch.manual_seed(0)
    ids = tokenizer(ANTIBODY, return_tensors="pt").input_ids
    written = evolved(model, tokenizer.mask_token_id, ids[:, :-1], rounds=8, chains=128)
    rows = torch.cat([written, ids[:, -1:].expand(len(written), 1)], dim=1)
    recipe = posenc.recipe_for(model, posenc.RoPE(), tokens=60_000)
    done = posenc.convert(model, posenc.RoPE(), rows.tolist(), recipe, tokenizer=tokenizer, length=ids.shape[1])
    original, replaced, absorbed, calibrated, end = losses(done)
    assert original < end < calibrated < absorbed < replaced
