"""A GGUF file's tokenizer, as transformers reads it, and with what transformers does not read.

As llama.cpp has it: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_aligner.errors import CheckpointError, short, shown

if TYPE_CHECKING:
    import tokenizers

Fields = Mapping[str, Any]
# Older ones take BOS for EOS, and cut a text into words as GPT-2 does.
_OLDEST_TRANSFORMERS = (5, 23)
_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
# A word that is in the vocabulary is one token, whatever the merges say.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "pixtral", "tekken")
_SMOLLM = "smollm"
# How byte-level BPE cuts a text into words; where it is not said, as GPT-2 does.
_CUTS = (None, "gpt-2", "qwen2", "deepseek-r1-qwen", "megrez", _SMOLLM, *_WHOLE_WORDS)


def save_gguf_tokenizer(path: Path, fields: Fields, folder: Path) -> None:
    """Write the tokenizer of the file ``path``, whose ``fields`` were read, as Hugging Face does.

    Raises:
        CheckpointError: transformers is too old for it, or makes no such tokenizer.
    """
    import transformers

    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < _OLDEST_TRANSFORMERS:
        wanted = ".".join(map(str, _OLDEST_TRANSFORMERS))
        raise CheckpointError(
            f"got transformers {version}, which mistakes tokenizers of GGUF files; wanted {wanted} "
            "or newer (extra [gguf])"
        )
    _check_cut(fields)
    # From a folder of its own: transformers would also take other tokenizer files that lie beside.
    with tempfile.TemporaryDirectory() as alone:
        Path(alone, "model.gguf").symlink_to(path.resolve())
        try:
            # Not AutoTokenizer, which has to know the model, and adds a token to Gemma 2's.
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
                alone,
                gguf_file="model.gguf",
                local_files_only=True,
                add_bos_token=_adds_bos(fields),
            )
        except Exception as error:  # whatever the library raises
            raise CheckpointError(
                f"tokenizer.ggml.model: got {shown(fields.get('tokenizer.ggml.model'))}, of which "
                f"transformers makes no tokenizer ({short(error)}); wanted the Hugging Face folder "
                "that the file was made of"
            ) from error
    _add_rules(tokenizer.backend_tokenizer, fields)
    tokenizer.save_pretrained(str(folder))


def _check_cut(fields: Fields) -> None:
    """Refuse a rule for cutting texts that transformers would take for GPT-2's.

    Raises:
        CheckpointError: the rule is not known.
    """
    cut = fields.get(_PRE)
    if fields.get(_MODEL) == "gpt2" and cut not in _CUTS:
        known = ", ".join(name for name in _CUTS if name)
        raise CheckpointError(f"{_PRE}: got {shown(cut)}, wanted one of: {known}")


def _adds_bos(fields: Fields) -> bool:
    """Whether a bare text begins with BOS; where the file does not say, its kind does."""
    by_kind = fields.get(_MODEL) == "llama" or fields.get(_PRE) in _WHOLE_WORDS
    has_bos = "tokenizer.ggml.bos_token_id" in fields
    return bool(fields.get("tokenizer.ggml.add_bos_token", by_kind and has_bos))


def _add_rules(backend: tokenizers.Tokenizer, fields: Fields) -> None:
    """Give transformers' tokenizer of a file the rules that it left out."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence

    if fields.get(_PRE) in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    if fields.get(_PRE) == _SMOLLM:
        bytes_of_words = ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), bytes_of_words])
    has_prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    if not has_prefix and isinstance(backend.pre_tokenizer, Metaspace):
        backend.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
