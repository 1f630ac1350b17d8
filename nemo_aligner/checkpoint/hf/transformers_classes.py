"""Load checkpoints with transformers, and name the classes that it has for a decoder."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.hf.heads import TOKEN_SUFFIX
from nemo_aligner.checkpoint.hf.source import REWARD_SUFFIX
from nemo_aligner.utils.errors import CheckpointError, one_line

BODY_SUFFIX, LANGUAGE_MODEL_SUFFIX = "Model", "ForCausalLM"


def load_pretrained(loader: Any, name: str | Path, **options: Any) -> Any:
    """Return ``loader.from_pretrained(name, **options)``; the checkpoint's code is never run.

    Without ``trust_remote_code=False``, transformers asks on stdin whether to run that code.

    Args:
        loader: class of transformers for a model, a config or a tokenizer.
        name: a folder, or a model's name on the hub.

    Raises:
        CheckpointError: transformers cannot load it, or only with the checkpoint's code.
    """
    try:
        return loader.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # third-party code may raise anything
        problem = one_line(error)
        if "trust_remote_code" in problem:
            problem = (
                "transformers would have to run the checkpoint's code, which is never done here. "
                "Convert it with `nemo-aligner convert`, which needs no code"
            )
        raise CheckpointError(problem) from error


def class_name(model_type: str, suffix: str) -> str:
    """Return the name of a decoder's class, such as ``LlamaForSequenceClassification``.

    Args:
        suffix: end of the name, such as ``ForSequenceClassification``. The name begins like that of
            the decoder's language model class (``Llama`` in ``LlamaForCausalLM``), because vLLM
            finds the decoder by it. transformers' own name may begin differently: it has
            ``Gemma3ForCausalLM``, but ``Gemma3TextForSequenceClassification``.

    Raises:
        CheckpointError: transformers does not know the ``model_type``.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    # Use transformers' mappings, because they include the classes that other packages registered.
    try:
        config = CONFIG_MAPPING[model_type]
        body: Any = MODEL_MAPPING[config]
    except KeyError as error:
        raise CheckpointError(f"{model_type}: transformers has no decoder of this type") from error
    if suffix == BODY_SUFFIX or config not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return body.__name__.removesuffix(BODY_SUFFIX) + suffix
    language_model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config]
    return language_model.__name__.removesuffix(LANGUAGE_MODEL_SUFFIX) + suffix


def has_class(architecture: str, model_type: str) -> bool:
    """Tell if transformers has the reward-model class ``architecture`` for this ``model_type``.

    If it has not, transformers can load only the decoder, and programs must compute the head.
    """
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    )

    config = CONFIG_MAPPING[model_type]
    if architecture.endswith(TOKEN_SUFFIX):
        return config in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    return (
        architecture.endswith(REWARD_SUFFIX) and config in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    )


def is_in_transformers(name: str) -> bool:
    """Tell if transformers has a class of this name, for any model."""
    return name in _list_names()


@cache
def _list_names() -> frozenset[str]:
    """Return all names of transformers; ``dir`` takes 0.2 s, and ``hasattr`` would import."""
    import transformers

    return frozenset(dir(transformers))
