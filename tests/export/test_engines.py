"""An engine that shares no code with transformers runs what was exported, and goes on in the same words.

CTranslate2 reads checkpoints through a transformers before version 5, so it needs an environment of its own:
`HF_POSENC_CTRANSLATE2` names the interpreter of one with ctranslate2 4.8, transformers 4.57 and torch.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import hf_posenc as posenc
from hf_posenc.quickstart import BASE

PROGRAM = """
import json, sys
import ctranslate2
from ctranslate2.converters import TransformersConverter
folder, out, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
TransformersConverter(folder).convert(out)
config = json.load(open(out + "/config.json"))
config["unk_token"] = config["unk_token"] or "<unk>"  # it cannot do without one, and a byte-level vocabulary has none
json.dump(config, open(out + "/config.json", "w"))
generator = ctranslate2.Generator(out, device="cpu", compute_type="float32")
found = generator.generate_batch(
    [tokens], max_length=64, min_length=64, sampling_topk=1, include_prompt_in_result=False
)
print(json.dumps(found[0].sequences_ids[0]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "target"),
    [
        (posenc.RoPE(), "gpt_neox"),
        (posenc.Learned(max_position_embeddings=256, extension="tile"), "self_table"),
    ],
    ids=["gpt_neox", "self_table"],
)
def test_ctranslate2_generates_the_same_tokens_past_the_trained_length(
    spec: posenc.EncodingConfig, target: str, tmp_path: Path
) -> None:
    python = os.environ.get("HF_POSENC_CTRANSLATE2") or pytest.skip("HF_POSENC_CTRANSLATE2 names no interpreter")
    model = posenc.patch(posenc.from_pretrained(BASE), spec, verify=False)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    posenc.export_native(model, tmp_path / "out", tokenizer, target=target)
    ids = tokenizer("The quick brown fox jumps over the lazy dog. " * 20, return_tensors="pt").input_ids[:, :128]
    asked = json.dumps(tokenizer.convert_ids_to_tokens(ids[0].tolist()))
    arguments = [python, "-c", PROGRAM, str(tmp_path / "out"), str(tmp_path / "converted"), asked]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(arguments, capture_output=True, text=True, env=clean, check=False)
    assert done.returncode == 0, done.stderr
    mask = torch.ones_like(ids)
    said = model.generate(ids, attention_mask=mask, max_new_tokens=64, min_new_tokens=64, do_sample=False)
    assert json.loads(done.stdout.splitlines()[-1]) == said[0, 128:].tolist()
