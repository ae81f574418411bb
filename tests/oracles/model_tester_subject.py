"""A subject for transformers' `ModelTesterMixin`: stock classes, or the patched ones where POSENC names an encoding.

Not collected here: `test_model_tester` puts a copy beside the mixin's own file and runs it there.
"""

from __future__ import annotations

import copy
import os
import unittest
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from .test_modeling_common import ModelTesterMixin  # type: ignore[import-not-found]

HEADS = ("Model", "{lm}", "ForSequenceClassification", "ForTokenClassification")
SHAPE = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "GPT2": ("LMHeadModel", {"n_positions": 64, "scale_attn_by_inverse_layer_idx": False}),
    "Llama": ("ForCausalLM", {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}),
}
FAMILY, ENCODING = os.environ["FAMILY"], os.environ.get("POSENC", "")


def subjects() -> tuple[PreTrainedConfig, tuple[type[PreTrainedModel], ...]]:
    """Return a config and the classes to test with it."""
    lm, fields = FAMILIES[FAMILY]
    classes = [getattr(transformers, FAMILY + head.format(lm=lm)) for head in HEADS]
    ids = {"pad_token_id": 0, "bos_token_id": 97, "eos_token_id": 97}
    config = getattr(transformers, f"{FAMILY}Config")(**SHAPE, **fields, **ids)
    if ENCODING:
        import hf_posenc as posenc

        # by the interposer in both families: what transformers computes itself needs no class of ours
        encoding = {
            "rope": posenc.RoPE(theta=20000.0, scaling={"rope_type": "dynamic", "factor": 2.0}),
            "alibi": posenc.Alibi(),
        }[ENCODING]
        patched = [posenc.patch(cls(config), encoding) for cls in classes]
        # read anew, as the stock config is new: one that a model was made from has its attention backend chosen
        config = type(patched[0].config).from_dict(patched[0].config.to_dict())
        classes = [type(model) for model in patched]
        for cls in classes:
            cls.__name__ = cls.posenc_stock.__name__  # by which the mixin tells what inputs a class takes
    return config, tuple(classes)


CONFIG, CLASSES = subjects()


class Tester:
    """What the mixin asks of the tester of a model."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Any]]:
        """Return a config and the inputs of a forward pass."""
        ids = torch.randint(1, 97, (self.batch_size, self.seq_length))
        return copy.deepcopy(CONFIG), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class SubjectTest(ModelTesterMixin, unittest.TestCase):  # type: ignore[misc]
    """Run by pytest in a folder of its own."""

    all_model_classes = CLASSES
    all_generative_model_classes = CLASSES[1:2]
    pipeline_model_mapping = MappingProxyType[str, Any]({})
    test_resize_embeddings = True

    def setUp(self) -> None:
        """Make what the mixin looks up."""
        self.model_tester = Tester(self)
