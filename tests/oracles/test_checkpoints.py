"""The real checkpoints are what they claim to be: trained, complete, and as long as their tables say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import checkpoints

STORY = (
    "Once upon a time, there was a boy named Tim. Tim had a small red car. He liked to play with his car every day. "
    'One day, Tim lost his car in the park. He was very sad. His mom said, "Don\'t cry, Tim. We will look for it." '
    "They looked under the tree and behind the bench. Then Tim saw his car in the grass. He was so happy! "
    "He hugged his mom and they went home."
)
# The variable heavy domain of trastuzumab; then an esterification, a Suzuki coupling and a Boc protection.
HEAVY_CHAIN = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRY"
    "ADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS"
)
REACTIONS = [
    "CC(=O)Cl.OCc1ccccc1>>CC(=O)OCc1ccccc1",
    "OB(O)c1ccccc1.Brc1ccncc1>>c1ccc(-c2ccncc2)cc1",
    "CCN(CC)CC.CC(C)(C)OC(=O)OC(=O)OC(C)(C)C.NCc1ccccc1>>CC(C)(C)OC(=O)NCc1ccccc1",
]


def perplexity(model: Any, ids: torch.Tensor) -> float:
    """The perplexity of every token of `ids` (1, n) after the first, in one forward pass."""
    with torch.no_grad():
        logits = model(ids).logits.float()
    return math.exp(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item())


def untrained(model: Any) -> Any:
    """A model of the same class and config with random weights."""
    return type(model)(model.config).eval()


def test_stories_llama_knows_simple_stories() -> None:
    model, tokenizer = checkpoints.stories260k()
    ids = tokenizer(STORY, return_tensors="pt").input_ids
    assert model.num_parameters() == 260_032
    assert perplexity(model, ids) < 4
    assert perplexity(untrained(model), ids) > 200


def test_stories_rotary_layout_matters() -> None:
    # Were the rows of q and k left interleaved, every shape would still fit and nothing would complain.
    model, tokenizer = checkpoints.stories260k()
    ids = tokenizer(STORY, return_tensors="pt").input_ids
    before = perplexity(model, ids)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            rows = projection.weight.data
            rows.copy_(rows.view(-1, 2, 4, 64).transpose(1, 2).reshape(rows.shape))
    assert perplexity(model, ids) > 10 * before


def test_stories_tokenizer_is_lossless_and_greedy() -> None:
    _, tokenizer = checkpoints.stories260k()
    ids = tokenizer(STORY + " é").input_ids  # é is not in the vocabulary: it falls back to its two bytes
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == STORY + " é"
    assert tokenizer.unk_token_id not in ids
    assert len(ids) < len(STORY) / 2


def test_roberta_fills_in_an_antibody() -> None:
    model, tokenizer = checkpoints.sapiens_roberta()
    assert checkpoints.masked_accuracy(model, tokenizer, HEAVY_CHAIN) > 0.7
    assert checkpoints.masked_accuracy(untrained(model), tokenizer, HEAVY_CHAIN) < 0.2


def test_roberta_has_rows_minus_offset_positions() -> None:
    model, _ = checkpoints.sapiens_roberta()
    table = model.roberta.embeddings.position_embeddings.weight
    usable = table.shape[0] - model.config.pad_token_id - 1
    assert usable == 144
    assert table[model.config.pad_token_id].abs().max() == 0  # the row of padding: never trained, never a position
    tokens = torch.full((1, usable), 7)
    assert model(tokens).logits.isfinite().all()
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        model(torch.full((1, usable + 1), 7))


def test_roberta_depends_on_where_positions_start() -> None:
    model, tokenizer = checkpoints.sapiens_roberta()
    shifted = model.roberta.embeddings.position_embeddings.weight.data
    shifted[2:-8] = shifted[10:].clone()  # as if every token stood eight places later
    assert checkpoints.masked_accuracy(model, tokenizer, HEAVY_CHAIN) < 0.4


@pytest.mark.parametrize("reaction", REACTIONS)
def test_albert_fills_in_reactions(reaction: str) -> None:
    model, tokenizer = checkpoints.rxnmapper_albert()
    assert model.config.max_position_embeddings == 512
    assert tokenizer.unk_token_id not in tokenizer(reaction).input_ids
    assert checkpoints.masked_accuracy(model, tokenizer, reaction) > 0.9
    assert checkpoints.masked_accuracy(untrained(model), tokenizer, reaction) < 0.5


def test_gpt2_vocabulary_is_the_genuine_one() -> None:
    tokenizer = checkpoints.gpt2_tokenizer()
    assert tokenizer("Hello world").input_ids == [15496, 995]
    assert len(tokenizer) == 50_257
    assert tokenizer.decode(tokenizer(STORY).input_ids) == STORY


@pytest.mark.slow
def test_smollm2_knows_english(tmp_path: Path) -> None:
    model, tokenizer = checkpoints.smollm2()
    ids = tokenizer(STORY, return_tensors="pt").input_ids
    assert perplexity(model, ids) < 12
    model.save_pretrained(tmp_path)  # an ordinary Llama, which a model read from GGUF is not
    assert torch.equal(model(ids).logits, type(model).from_pretrained(tmp_path)(ids).logits)


def test_changed_material_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in checkpoints.STORIES:
        (tmp_path / name).write_bytes(b"not what was pinned")
    monkeypatch.setenv("HF_POSENC_STORIES", str(tmp_path))
    with pytest.raises(AssertionError, match="not the pinned file"):
        checkpoints.stories260k()


def test_absent_material_skips_with_one_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_POSENC_STORIES", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="HF_POSENC_STORIES"):
        checkpoints.stories260k()
