"""The model families: found by the name in ``config.json``, in a GGUF file, or by a NeMo config.

A new one is a file beside this one, and its line in ``_BUILT_IN``; ``register_family`` takes one
from outside the package.
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.checkpoint.hf.families.base import Config, GgufFormat, ModelFamily, beside_llama
from nemo_aligner.checkpoint.hf.families.gemma import GEMMA, GEMMA2
from nemo_aligner.checkpoint.hf.families.llama import LLAMA, MISTRAL
from nemo_aligner.checkpoint.hf.families.nemotron import NEMOTRON
from nemo_aligner.checkpoint.hf.families.qwen import QWEN2, QWEN3
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

# The first that has a decoder gives its export the name.
_BUILT_IN = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    NEMOTRON,
)
_FAMILIES = {family.name: family for family in _BUILT_IN}
_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
# The key of a NeMo config that names the family, where what its decoder is made of does not.
NAME_KEY = "hf_model_type"


def register_family(family: ModelFamily) -> None:
    """Add a family from outside the package, for this process.

    Where another family has such decoders, too, its ``to_nemo`` has to write its name under
    ``NAME_KEY``: else the export of one would be a model of the other.

    Raises:
        ConfigError: a family has this name already, or this name in GGUF files.
    """
    names = {each.gguf.architecture for each in _FAMILIES.values() if each.gguf}
    if family.name in _FAMILIES or (family.gguf and family.gguf.architecture in names):
        raise ConfigError(
            f"model family {family.name}: got a name, or one of GGUF files, that another has"
        )
    _FAMILIES[family.name] = family


def find_family(model_type: Any) -> ModelFamily:
    """The family that ``config.json`` calls ``model_type``.

    Raises:
        CheckpointError: it is not known.
    """
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        experts = ", a mixture of experts" if model_type in _EXPERTS else ""
        known = ", ".join(_FAMILIES)
        raise CheckpointError(
            f"model_type: got {shown(model_type)}{experts}, wanted one of: {known}"
        )
    return _FAMILIES[model_type]


def find_gguf_family(architecture: Any) -> tuple[ModelFamily, GgufFormat]:
    """The family of GGUF files whose ``general.architecture`` is ``architecture``.

    Raises:
        CheckpointError: it is not known.
    """
    found = {each.gguf.architecture: (each, each.gguf) for each in _FAMILIES.values() if each.gguf}
    if not isinstance(architecture, str) or architecture not in found:
        raise CheckpointError(
            f"general.architecture: got {shown(architecture)}, wanted one of: {', '.join(found)}"
        )
    return found[architecture]


def family_of(config: Config) -> ModelFamily:
    """The family of a NeMo config: the one it names, or else by what its decoder is made of.

    Raises:
        CheckpointError: no family is made of this; it says what is not Llama's.
    """
    shape, name = ModelShape.from_config(config), config.get(NAME_KEY)
    if name is not None and name not in tuple(_FAMILIES):
        raise CheckpointError(
            f"model_config.yaml: {NAME_KEY}: got {shown(name)}, "
            f"wanted one of: {', '.join(_FAMILIES)}"
        )
    for family in _FAMILIES.values() if name is None else (_FAMILIES[name],):
        if family.has(shape):
            return family
    wanted = f"any family: {', '.join(_FAMILIES)}" if name is None else f"the family {name}"
    raise CheckpointError(
        f"model_config.yaml: got a decoder with {beside_llama(shape)}, which is not of {wanted}"
    )
