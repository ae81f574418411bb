"""lm-evaluation-harness, as it is, runs patched models past their trained length and finds our numbers.

`HF_POSENC_LM_EVAL` names the interpreter of an environment with lm-eval 0.4.13, beside what this package needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_posenc as posenc
from hf_posenc.errors import ConfigError, LengthError
from hf_posenc.harness import harness_model
from hf_posenc.quickstart import BASE
from tests.models import SUBJECTS

ROOT = Path(__file__).parents[1]
LENGTH = 256  # twice the trained one
TASK = """
task: posenc_texts
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: bits_per_byte}
"""
PROGRAM = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer
import hf_posenc as posenc
from hf_posenc.harness import harness_model
folder, tasks, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = posenc.from_pretrained(folder)
subject = harness_model(model, AutoTokenizer.from_pretrained(folder), max_length=length)
found = lm_eval.simple_evaluate(
    model=subject, tasks=["posenc_texts"], task_manager=TaskManager(include_path=tasks), bootstrap_iters=0
)
print(json.dumps(found["results"]["posenc_texts"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("spec", [posenc.Alibi(), posenc.RoPE()], ids=lambda spec: spec.name)
def test_the_harness_finds_our_bits_per_byte(spec: posenc.EncodingConfig, tmp_path: Path) -> None:
    python = os.environ.get("HF_POSENC_LM_EVAL") or pytest.skip("HF_POSENC_LM_EVAL names no interpreter")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = posenc.patch(posenc.from_pretrained(BASE), spec)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    texts = [Path(module).read_text(encoding="utf-8")[:5000] for module in (os.__file__, json.__file__)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "texts.jsonl").write_text(rows, encoding="utf-8")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "texts.yaml").write_text(TASK.replace("FILE", str(tmp_path / "texts.jsonl")))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home")}
    arguments = [python, "-c", PROGRAM, str(tmp_path / "model"), str(tmp_path / "tasks"), str(LENGTH)]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    curve = posenc.perplexity_by_length(model, texts, [LENGTH], tokenizer=tokenizer, protocol="lm_eval_rolling")
    assert found["bits_per_byte,none"] == pytest.approx((curve.bits_per_byte or {})[LENGTH], rel=1e-5)


def test_a_window_that_the_model_has_no_positions_for_is_refused() -> None:
    with pytest.raises(LengthError, match="the model has 64 positions"):
        harness_model(SUBJECTS["gpt2"].fresh(), None, max_length=65)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="positive integer"):
        harness_model(SUBJECTS["gpt2"].fresh(), None, max_length=0)  # type: ignore[arg-type]


def test_without_the_harness_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    with pytest.raises(ConfigError, match="pip install 'lm-eval"):
        harness_model(SUBJECTS["gpt2"].fresh(), None, max_length=64)  # type: ignore[arg-type]
