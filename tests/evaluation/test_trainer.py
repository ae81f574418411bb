"""Our loss against `Trainer.evaluate`, where both are defined alike: one length, whole windows, loss_type set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_posenc.evaluation import perplexity_by_length
from tests.evaluation.models import llama, random_documents


@pytest.mark.parametrize("rows", [1, 3])
def test_trainer_and_we_agree_at_equal_lengths(rows: int, tmp_path: Path) -> None:
    model, documents = llama(), random_documents(*[33] * 6)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=rows, report_to=[], use_cpu=True, disable_tqdm=True
    )
    # the first token has nothing before it; transformers 5.5 would count it all the same
    labels = [[-100, *ids[1:]] for ids in documents]
    data = Dataset.from_dict({"input_ids": documents, "labels": labels})
    loss = Trainer(model=model, args=arguments, eval_dataset=data).evaluate()["eval_loss"]
    curve = perplexity_by_length(model, documents, [32], batch_size=2)
    assert curve.n_tokens[32] == 6 * 32
    assert curve.nll[32] == pytest.approx(loss, rel=1e-6)


def test_documents_and_windows_by_hand() -> None:
    """One forward per document, cross entropy by torch: an oracle that shares no code with the evaluator."""
    model, documents = llama(), random_documents(30, 12, 5)
    total = 0.0
    for ids in documents:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids[1:]), reduction="sum").item()
    assert perplexity_by_length(model, documents, [64]).nll_sum[64] == pytest.approx(total, rel=1e-6)
