"""Registry of model families, which convert settings and tensors from Hugging Face and back.

- ``base``: ``ModelFamily``, the rules for its tensors (``Rule``), and its names in GGUF files.
- ``query_groups``: Megatron's order of queries, keys and values, and added query groups of zeros.
- ``settings``: translation of settings that several families have: sizes, RoPE, windows.
- ``llama``: Llama and decoders that differ from it by settings or names of tensors (Mistral,
  Ministral, SmolLM3, Granite, Arcee, Phi-3, InternLM2).
- ``qwen``, ``gemma``, ``olmo``, ``glm``, ``nemotron``, ``hunyuan``, ``cohere``, ``apertus``: the
  decoders with these names and relatives.
- ``gemma4``: Gemma 4, whose layers have two sizes of heads.
- ``neox``: GPT-NeoX (Pythia) and StarCoder2.
- ``nemotron_h``: Nemotron-H, whose layers have either a mixer or an MLP.
- ``mixtures`` and ``ernie``: mixture-of-experts (MoE) models.
- ``deepseek``: DeepSeek and relatives, with multi-head latent attention.
- ``unsupported``: why a model of no family is rejected, and which families are near.

The functions here look a family up: a conversion to ``.nemo`` by ``model_type`` or by the fields of
a GGUF file, an export by the NeMo config. To add a family, add a module to this package and a line
to ``_BUILT_IN``; another package calls ``register_family`` (see ``custom_families``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_aligner.checkpoint.custom_families import (
    VARIABLE,
    announce_family,
    load_families,
    unreachable_families,
)
from nemo_aligner.checkpoint.hf.families.apertus import APERTUS
from nemo_aligner.checkpoint.hf.families.base import (
    GgufFormat,
    ModelFamily,
    describe_differences_from_llama,
)
from nemo_aligner.checkpoint.hf.families.cohere import COHERE, COHERE2
from nemo_aligner.checkpoint.hf.families.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    KIMI_K2,
)
from nemo_aligner.checkpoint.hf.families.ernie import ERNIE4_5_MOE
from nemo_aligner.checkpoint.hf.families.gemma import GEMMA, GEMMA2, GEMMA3
from nemo_aligner.checkpoint.hf.families.gemma4 import GEMMA4
from nemo_aligner.checkpoint.hf.families.glm import ERNIE4_5, GLM, GLM4, HELIUM
from nemo_aligner.checkpoint.hf.families.gpt_oss import GPT_OSS
from nemo_aligner.checkpoint.hf.families.hunyuan import HUNYUAN
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
from nemo_aligner.checkpoint.hf.families.mixtures import (
    GLM4_MOE,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
)
from nemo_aligner.checkpoint.hf.families.nemotron import NEMOTRON
from nemo_aligner.checkpoint.hf.families.nemotron_h import NEMOTRON_H
from nemo_aligner.checkpoint.hf.families.neox import GPT_NEOX, STARCODER2
from nemo_aligner.checkpoint.hf.families.olmo import EXAONE4, OLMO2, OLMO3
from nemo_aligner.checkpoint.hf.families.qwen import QWEN2, QWEN3, QWEN3_5, SEED_OSS
from nemo_aligner.checkpoint.hf.families.settings import NAME_KEY, Config
from nemo_aligner.checkpoint.hf.families.unsupported import unsupported_model
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

# The order matters: if a NeMo config names no family, the model is exported as the first family
# that fits it.
_BUILT_IN = (
    LLAMA,
    MISTRAL,
    MINISTRAL,
    MINISTRAL3,
    SMOLLM3,
    QWEN2,
    QWEN3,
    QWEN3_5,
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
    ERNIE4_5,
    HUNYUAN,
    GPT_NEOX,
    STARCODER2,
    COHERE,
    COHERE2,
    APERTUS,
    GLM4_MOE,
    DEEPSEEK_V3,
    KIMI_K2,
    DEEPSEEK_V2,
    GLM4_MOE_LITE,
    ERNIE4_5_MOE,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    GPT_OSS,
    NEMOTRON_H,
    GEMMA4,
)
_FAMILIES = {family.name: family for family in _BUILT_IN}


def register_family(family: ModelFamily) -> None:
    """Add a family that another package defines; processes that this one starts know it, too.

    Assign the family to a name at the top level of a module, because other processes import it by
    that name; the main script does not count.

    If the NeMo configs of the family also fit another family, ``family.to_nemo`` must write the
    family's name under ``NAME_KEY``. Otherwise an export would use the other family.

    Raises:
        ConfigError: another family has the same name, or the same architecture in GGUF files.
    """
    _add_family(family)
    announce_family(family)


def _add_family(family: ModelFamily) -> None:
    if _FAMILIES.get(family.name) is family:
        return
    names = {existing.gguf.architecture for existing in _FAMILIES.values() if existing.gguf}
    if family.name in _FAMILIES or (family.gguf and family.gguf.architecture in names):
        raise ConfigError(
            f"model family {family.name}: another family has this name, or this architecture in "
            "GGUF files. Choose another name"
        )
    _FAMILIES[family.name] = family


def _known_families() -> dict[str, ModelFamily]:
    """Return all families by name, with those that ``NEMO_ALIGNER_FAMILIES`` names.

    Raises:
        ConfigError: the variable names something else.
    """
    for family in load_families():
        if not isinstance(family, ModelFamily):
            raise ConfigError(
                f"{VARIABLE}: got {type(family).__name__}, wanted package.module:NAME of a "
                "ModelFamily (nemo_aligner.checkpoint.hf.families.base)"
            )
        _add_family(family)
    return _FAMILIES


def find_family(model_type: Any, config: Config | None = None) -> ModelFamily:
    """Return the family with this ``model_type`` in ``config.json``.

    Args:
        config: the whole ``config.json``, from which the error tells what the model lacks.

    Raises:
        CheckpointError: there is no such family. The message tells why, and names families with
            similar settings.
    """
    by_name = _known_families()
    if model_type in unreachable_families() and model_type not in by_name:
        raise CheckpointError(
            f"model_type {model_type}: its family was registered by a script whose code other "
            "processes cannot import. Define it in a module, and register it from there"
        )
    if not isinstance(model_type, str) or model_type not in by_name:
        raise unsupported_model(model_type, config or {}, by_name)
    return by_name[model_type]


def check_gguf_architecture(architecture: Any) -> None:
    """Raise CheckpointError if no family has this architecture.

    Args:
        architecture: value of the field ``general.architecture`` of a GGUF file.
    """
    formats = [family.gguf for family in _known_families().values() if family.gguf]
    architectures = dict.fromkeys(gguf.architecture for gguf in formats)
    if not isinstance(architecture, str) or architecture not in architectures:
        raise CheckpointError(
            f"general.architecture: got {shown(architecture)}, wanted one of: "
            f"{', '.join(architectures)}. Convert the Hugging Face folder from which the file was "
            "made"
        )


def find_gguf_family(fields: Mapping[str, Any]) -> tuple[ModelFamily, GgufFormat]:
    """Find the family of a GGUF file by its metadata fields.

    If two families have the same ``general.architecture``, only the files of one of them have the
    field ``GgufFormat.marked_by``.
    """
    architecture = fields.get("general.architecture")
    check_gguf_architecture(architecture)
    unmarked = None
    for family in _FAMILIES.values():
        gguf = family.gguf
        if gguf is None or gguf.architecture != architecture:
            continue
        if gguf.marked_by is None:
            unmarked = family, gguf
        # Files of the other family with this architecture lack the field ``marked_by``, or have a 0
        # in it.
        elif fields.get(f"{architecture}.{gguf.marked_by}"):
            return family, gguf
    assert unmarked is not None, "every architecture has a family without a mark"
    family, gguf = unmarked
    return _FAMILIES[gguf.hf_family or family.name], gguf


def family_of(config: Config) -> ModelFamily:
    """Find the family of a NeMo config: the family that it names, or the first one that fits.

    Raises:
        CheckpointError: the decoder fits no family; the message says how it differs from Llama's.
    """
    shape, name = ModelShape.from_config(config), config.get(NAME_KEY)
    by_name = _known_families()
    if name is not None and name not in tuple(by_name):
        raise CheckpointError(
            f"model_config.yaml: {NAME_KEY}: got {shown(name)}, wanted one of: {', '.join(by_name)}"
        )
    for family in by_name.values() if name is None else (by_name[name],):
        if family.has(shape):
            return family
    families = f"any family: {', '.join(by_name)}" if name is None else f"the family {name}"
    raise CheckpointError(
        f"model_config.yaml: got a decoder with {describe_differences_from_llama(shape)}, which "
        f"does not belong to {families}"
    )
