"""Tell transformers' Auto classes of the patched model types, so that `import hf_posenc` is all that loading needs.

Configs are registered at once, which costs little. The model classes of a type follow when a config of that type is
read: making them imports the family's modelling code.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_posenc.family import FAMILIES
from hf_posenc.modeling import PREFIX, config_class, model_class, when_read
from hf_posenc.surgery import rebuild

TASKS = {
    "AutoModel": "MODEL_MAPPING",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    "AutoModelForMultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING",
}


def register_configs() -> None:
    """Register the config class of every family's patched model type with AutoConfig."""
    for model_type in FAMILIES:
        if model_type in CONFIG_MAPPING and PREFIX + model_type not in CONFIG_MAPPING:
            stock: Any = CONFIG_MAPPING[model_type]
            AutoConfig.register(PREFIX + model_type, config_class(stock))
    when_read(register_models)


def register_models(stock: Any) -> None:
    """Register the patched twin of every model class that an Auto class has for a stock config class."""
    patched = config_class(stock)
    for auto, found in tasks_of(stock).items():
        getattr(transformers, auto).register(patched, model_class(found, rebuild), exist_ok=True)


def tasks_of(stock: Any) -> dict[str, Any]:
    """Return Auto class -> the model class that it has for a stock config class, where it has one."""
    found = {auto: getattr(transformers, mapping).get(stock, None) for auto, mapping in TASKS.items()}
    return {auto: cls for auto, cls in found.items() if isinstance(cls, type)}
