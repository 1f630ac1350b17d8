"""Registry of model families, by their names in ``config.json``, GGUF files and NeMo configs.

A new family is a file beside this one, and its line in ``_BUILT_IN``; ``register_family`` takes one
from another package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_aligner.checkpoint.hf.families.base import GgufFormat, ModelFamily, beside_llama
from nemo_aligner.checkpoint.hf.families.gemma import GEMMA, GEMMA2, GEMMA3
from nemo_aligner.checkpoint.hf.families.glm import GLM, GLM4, HELIUM
from nemo_aligner.checkpoint.hf.families.llama import (
    ARCEE,
    GRANITE,
    INTERNLM2,
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    PHI3,
    SMOLLM3,
)
from nemo_aligner.checkpoint.hf.families.mixtures import MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from nemo_aligner.checkpoint.hf.families.nemotron import NEMOTRON
from nemo_aligner.checkpoint.hf.families.olmo import EXAONE4, OLMO2, OLMO3
from nemo_aligner.checkpoint.hf.families.qwen import QWEN2, QWEN3, SEED_OSS
from nemo_aligner.checkpoint.hf.families.settings import NAME_KEY, Config
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

# In order of preference: the first family that has a decoder names its export.
_BUILT_IN = (
    LLAMA,
    MISTRAL,
    MINISTRAL,
    MINISTRAL3,
    SMOLLM3,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    NEMOTRON,
    INTERNLM2,
    OLMO2,
    OLMO3,
    EXAONE4,
    GRANITE,
    PHI3,
    GLM,
    GLM4,
    HELIUM,
    ARCEE,
    SEED_OSS,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    OLMOE,
)
_FAMILIES = {family.name: family for family in _BUILT_IN}


def register_family(family: ModelFamily) -> None:
    """Add a family from another package, for this process.

    If another family has such decoders, too, its ``to_nemo`` must write its name under
    ``NAME_KEY``; otherwise exports of one would become models of the other.

    Raises:
        ConfigError: a family has this name already, or this name in GGUF files.
    """
    names = {each.gguf.architecture for each in _FAMILIES.values() if each.gguf}
    if family.name in _FAMILIES or (family.gguf and family.gguf.architecture in names):
        raise ConfigError(
            f"model family {family.name}: its name, or its name in GGUF files, is taken"
        )
    _FAMILIES[family.name] = family


def find_family(model_type: Any) -> ModelFamily:
    """Find the family with this ``model_type`` in ``config.json``."""
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise CheckpointError(f"model_type: got {shown(model_type)}, wanted one of: {known}")
    return _FAMILIES[model_type]


def check_gguf_architecture(architecture: Any) -> None:
    """Refuse GGUF files of an architecture that no family has."""
    formats = [family.gguf for family in _FAMILIES.values() if family.gguf]
    architectures = dict.fromkeys(gguf.architecture for gguf in formats)
    if not isinstance(architecture, str) or architecture not in architectures:
        raise CheckpointError(
            f"general.architecture: got {shown(architecture)}, wanted one of: "
            f"{', '.join(architectures)}. Convert the Hugging Face folder that the file was made "
            "from"
        )


def find_gguf_family(fields: Mapping[str, Any]) -> tuple[ModelFamily, GgufFormat]:
    """Find the family of a GGUF file by its fields; several may share an architecture."""
    architecture = fields.get("general.architecture")
    check_gguf_architecture(architecture)
    plain = None
    for family in _FAMILIES.values():
        gguf = family.gguf
        if gguf is None or gguf.architecture != architecture:
            continue
        if gguf.marked_by is None:
            plain = family, gguf
        # It is 0, or missing, in files of the other family.
        elif fields.get(f"{architecture}.{gguf.marked_by}"):
            return family, gguf
    assert plain is not None  # every architecture has a family without a mark
    family, gguf = plain
    return _FAMILIES[gguf.hf_family or family.name], gguf


def family_of(config: Config) -> ModelFamily:
    """Find the family of a NeMo config: the one it names, or the first with such a decoder.

    Raises:
        CheckpointError: no family has one; it says how the decoder differs from Llama's.
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
