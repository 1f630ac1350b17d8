"""Reading of GGUF files as the Hugging Face checkpoints they were made from.

Needs the ``gguf`` package (extra ``[gguf]``), which trusts a file's counts and lengths; the header
is checked first. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families import find_gguf_family
from nemo_aligner.checkpoint.hf.families.base import HF_HEAD, GgufFormat
from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.checkpoint.weights.store import check_finite
from nemo_aligner.config.common import read_count, read_number
from nemo_aligner.utils.errors import CheckpointError, short, shown

if TYPE_CHECKING:
    import tokenizers


Fields = Mapping[str, Any]
# A reward head for llama.cpp's rank pooling, the names of its rows, and the prompt of its /rerank.
CLASSIFIER, _LABELS = "cls.output.weight", "classifier.output_labels"
RERANK_TEMPLATE = "tokenizer.chat_template.rerank"
# This package's own; llama.cpp does not read it.
CONTRACT_FIELD = "nemo_aligner.scoring_contract"


@dataclass(frozen=True)
class _Stored:
    """Location of a tensor; ``shape`` and ``dtype`` are those of its stored (packed) data."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: Any
    unpacked_shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> _Stored:
        # GGUF lists the fastest axis first.
        unpacked = tuple(map(int, reversed(tensor.shape)))
        data = tensor.data
        return cls(int(tensor.data_offset), data.shape, data.dtype, tensor.tensor_type, unpacked)


class GgufCheckpoint:
    """A GGUF file as a Hugging Face checkpoint.

    Attributes:
        config: as in ``config.json``.
        tensors: lazy, by their Hugging Face names.
        fields: all metadata by key, except the vocabulary.
        contract: the scoring contract of a reward model that this package exported.

    Raises:
        CheckpointError: it is no GGUF file, or of no known family, or has a tensor or a field that
            the family does not have. The caller adds the file's name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fields, self._stored = _open(path)
        if self.fields.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"split.count: got one of {self.fields['split.count']} files, wanted a whole one; "
                "llama.cpp's llama-gguf-split --merge makes it"
            )
        self._family, self._format = find_gguf_family(self.fields.get("general.architecture"))
        # Llama 3's rope scaling is a tensor in GGUF, not a setting.
        divisors = self._dequantized(ROPE_FREQS) if ROPE_FREQS in self._stored else None
        self.tensors = {
            self._hf_name(name): LazyTensor(
                stored.unpacked_shape, torch.float32, partial(self._read, name)
            )
            for name, stored in self._stored.items()
            if name not in (ROPE_FREQS, CLASSIFIER)
        }
        if "token_embd.weight" not in self._stored:
            raise CheckpointError("token_embd.weight: the tensor is missing")
        self.contract = _own_contract(self.fields)
        self.config = {
            "model_type": self._family.name,
            **read_config(self.fields, self._format, divisors),
            "vocab_size": self._stored["token_embd.weight"].unpacked_shape[0],
            "tie_word_embeddings": "output.weight" not in self._stored,
        }
        if CLASSIFIER in self._stored:
            self._add_classifier()

    def _add_classifier(self) -> None:
        """Add the reward head of a file for rank pooling: the log odds of two classes.

        llama.cpp's softmax of the products with two rows has the logarithm of its ratio in the
        product with their difference.
        """
        key = f"{self._format.architecture}.{_LABELS}"
        labels, shape = self.fields.get(key), self._stored[CLASSIFIER].unpacked_shape
        if not self._format.has_classifier or shape[:1] != (2,):
            raise CheckpointError(
                f"{CLASSIFIER}: got {list(shape)} in a {self._format.architecture}, wanted two "
                "rows in a qwen3, as llama.cpp's rank pooling reads them"
            )
        if not isinstance(labels, list) or len(labels) != 2:
            raise CheckpointError(f"{key}: got {shown(labels)}, wanted two names")
        size = (1, *shape[1:])
        self.tensors[HF_HEAD] = LazyTensor(size, torch.float32, self._read_classifier)
        self.config |= {"num_labels": 1, "id2label": {"0": str(labels[0])}}

    def _read_classifier(self) -> Tensor:
        first, second = self._dequantized(CLASSIFIER)
        return (first - second)[None]

    def _hf_name(self, name: str) -> str:
        part, _, kind = name.rpartition(".")
        if part in self._format.model:
            return f"{self._format.model[part]}.{kind}"
        block, _, part = part.removeprefix("blk.").partition(".")
        if not (name.startswith("blk.") and block.isdigit() and part in self._format.layer):
            raise CheckpointError(f"tensor {shown(name)} is unknown in a model of its family")
        return f"{self._family.layer_prefix}{block}.{self._format.layer[part]}.{kind}"

    def _dequantized(self, name: str) -> Tensor:
        import gguf

        stored = self._stored[name]
        # Read from the file, as pages of a mapping would stay resident.
        count = math.prod(stored.shape)
        data = np.fromfile(self._path, stored.dtype, count, offset=stored.offset)
        try:
            values = gguf.dequantize(data.reshape(stored.shape), stored.kind)
        except NotImplementedError as error:
            raise CheckpointError(f"tensor {name}: {error}") from error
        # torch warns about an array that is read-only.
        tensor = torch.from_numpy(np.require(values, requirements="W"))
        check_finite(tensor, f"tensor {name}")
        return tensor

    def _read(self, name: str) -> Tensor:
        tensor = self._dequantized(name)
        if self._format.norm_offset and name.endswith("norm.weight"):
            return tensor - self._format.norm_offset
        if self._format.is_permuted and ".attn_q." in name:
            return _halves_order(tensor, self.config["num_attention_heads"])
        if self._format.is_permuted and ".attn_k." in name:
            return _halves_order(tensor, self.config["num_key_value_heads"])
        return tensor


def _own_contract(fields: Fields) -> Mapping[str, Any] | None:
    """The scoring contract among the fields, if this package wrote the file."""
    if CONTRACT_FIELD not in fields:
        return None
    try:
        found = json.loads(fields[CONTRACT_FIELD])
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{CONTRACT_FIELD}: not JSON: {short(error)}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{CONTRACT_FIELD}: got {shown(found)}, wanted names and values")
    return found


def _open(path: Path) -> tuple[dict[str, Any], dict[str, _Stored]]:
    """Read the metadata by key, and the tensors' locations by name."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError("GGUF files need the gguf package (extra [gguf])") from error
    try:
        check_header(path)
        # It trusts the header, so it comes second.
        reader = gguf.GGUFReader(path)
        # Skip the vocabulary: the reader makes an array of every word.
        fields = {
            key: _value(field)
            for key, field in reader.fields.items()
            if not (key.startswith("tokenizer.") and field.types[0].name == "ARRAY")
        }
        return fields, {tensor.name: _Stored.of(tensor) for tensor in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"not a readable GGUF file: {short(error)}") from error


def _value(field: Any) -> Any:
    value = field.contents()
    # The shortest decimal that is this fp32 number, as in config.json: 1e-5.
    return float(str(np.float32(value))) if field.types[0].name == "FLOAT32" else value


def _halves_order(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows of q or k ``[heads * d, ...]`` from llama.cpp's rotary pairs to halves."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


# Header check. The gguf package makes an object of every item that an array claims to have, even
# past the end of the file.

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Far above any file's: a vocabulary of 300,000 words has about as many merges.
_MOST_ENTRIES, _MOST_ITEMS, _MOST_AXES = 2**16, 2**23, 8


def check_header(path: Path) -> None:
    """Check that the fields and tensor entries of a header lie within the file."""
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise CheckpointError("not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(data).check()


class _Header:
    """Cursor over a file's header."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._position = data, len(_MAGIC)
        self._order = "<"

    def check(self) -> None:
        if self._number("I") & 0xFFFF == 0:  # a version in the other byte order
            self._order = ">"
        tensors, fields = self._count("tensors"), self._count("fields")
        # In all, as 65,536 fields of 8 million items each would pass one by one.
        items_left = _MOST_ITEMS
        for _ in range(fields):
            self._skip(self._number("Q"))
            items_left -= self._skip_value(self._number("I"), items_left)
        for _ in range(tensors):
            self._skip(self._number("Q"))
            axes = self._number("I")
            if axes > _MOST_AXES:
                raise self._error(f"a tensor of {axes} axes")
            self._skip(8 * axes + 4 + 8)  # dimensions, type, offset

    def _skip_value(self, kind: int, items_left: int) -> int:
        """Skip a field's value; returns the number of items if it is an array."""
        if kind != _ARRAY:
            self._skip(self._size(kind))
            return 0
        kind, count = self._number("I"), self._number("Q")
        if count > items_left:
            raise self._error(f"an array of {count} items, wanted at most {_MOST_ITEMS} in all")
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
        else:
            self._skip(count * self._size(kind))
        return count

    def _size(self, kind: int) -> int:
        if kind == _STRING:
            return self._number("Q")
        if kind not in _SIZES:
            raise self._error(f"a value of type {kind}, which is not known")
        return _SIZES[kind]

    def _count(self, what: str) -> int:
        count = self._number("Q")
        if count > _MOST_ENTRIES:
            raise self._error(f"{count} {what}, wanted at most {_MOST_ENTRIES}")
        return count

    def _number(self, kind: str) -> int:
        start = self._position
        self._skip(struct.calcsize(f"{self._order}{kind}"))
        return struct.unpack_from(f"{self._order}{kind}", self._data, start)[0]

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._position:
            raise self._error(f"{size} bytes more, past the end of the file")
        self._position += size

    def _error(self, got: str) -> CheckpointError:
        return CheckpointError(f"not a readable GGUF file: byte {self._position}: got {got}")


# The tokenizer as transformers reads it, with the rules that transformers drops. As in llama.cpp:
# https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp.

# Older versions take BOS for EOS, and pre-tokenize as GPT-2 does.
_OLDEST_TRANSFORMERS = (5, 23)
_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
# Pre-tokenizers with ignore_merges: a word in the vocabulary is one token, whatever the merges.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "pixtral", "tekken")
_SMOLLM = "smollm"
# Pre-tokenizers of byte-level BPE that are supported; GPT-2's is the default.
_CUTS = (None, "gpt-2", "qwen2", "deepseek-r1-qwen", "megrez", _SMOLLM, *_WHOLE_WORDS)


def save_gguf_tokenizer(path: Path, fields: Fields, folder: Path) -> None:
    """Write the tokenizer of the file ``path``, of these ``fields``, in Hugging Face's form."""
    import transformers

    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < _OLDEST_TRANSFORMERS:
        wanted = ".".join(map(str, _OLDEST_TRANSFORMERS))
        raise CheckpointError(
            f"got transformers {version}, which misreads GGUF tokenizers; wanted {wanted} "
            "or newer (extra [gguf])"
        )
    _check_cut(fields)
    # From a folder of its own: transformers would pick up other tokenizer files beside it.
    with tempfile.TemporaryDirectory() as alone:
        Path(alone, "model.gguf").symlink_to(path.resolve())
        try:
            # Not AutoTokenizer, which must know the model, and adds a token to Gemma 2's.
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
                alone,
                gguf_file="model.gguf",
                local_files_only=True,
                add_bos_token=_adds_bos(fields),
            )
        except Exception as error:  # whatever the library raises
            raise CheckpointError(
                f"tokenizer.ggml.model: got {shown(fields.get('tokenizer.ggml.model'))}, which "
                f"transformers cannot read ({short(error)}); wanted the Hugging Face folder "
                "that the file was made from"
            ) from error
    _add_rules(tokenizer.backend_tokenizer, fields)
    rerank = fields.get(RERANK_TEMPLATE)
    if isinstance(rerank, str) and CONTRACT_FIELD not in fields:
        # The rank is of this prompt, whatever the model's own template is.
        tokenizer.chat_template = _as_jinja(rerank)
    tokenizer.save_pretrained(str(folder))


def _as_jinja(rerank: str) -> str:
    """The template of a reranker's file, filled in with a question and its answer."""
    parts = re.split(r"(\{query\}|\{document\})", rerank)
    turns = {"{query}": "messages[0].content", "{document}": "messages[1].content"}
    return "".join(
        f"{{{{ {turns.get(part) or json.dumps(part, ensure_ascii=False)} }}}}"
        for part in parts
        if part
    )


def _check_cut(fields: Fields) -> None:
    """Refuse a pre-tokenizer that transformers would silently replace by GPT-2's."""
    cut = fields.get(_PRE)
    if fields.get(_MODEL) == "gpt2" and cut not in _CUTS:
        known = ", ".join(name for name in _CUTS if name)
        raise CheckpointError(f"{_PRE}: got {shown(cut)}, wanted one of: {known}")


def _adds_bos(fields: Fields) -> bool:
    """Tell if texts begin with BOS; the tokenizer's kind decides where the file does not."""
    by_kind = fields.get(_MODEL) == "llama" or fields.get(_PRE) in _WHOLE_WORDS
    has_bos = "tokenizer.ggml.bos_token_id" in fields
    return bool(fields.get("tokenizer.ggml.add_bos_token", by_kind and has_bos))


def _add_rules(backend: tokenizers.Tokenizer, fields: Fields) -> None:
    """Add to transformers' tokenizer the rules of the file that it left out."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence

    if fields.get(_PRE) in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    if fields.get(_PRE) == _SMOLLM:
        bytes_of_words = ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), bytes_of_words])
    has_prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    if not has_prefix and isinstance(backend.pre_tokenizer, Metaspace):
        backend.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)


# Metadata as a ``config.json``. A missing field has llama.cpp's default.

ROPE_FREQS = "rope_freqs.weight"
_MOST_FLOAT = sys.float_info.max

# Fields that every family must have; the others are read one by one.
SETTINGS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
}
_OWN = (
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
)  # fmt: skip
# Fields that change no hidden state: sizes that the tensors have, the other norm's epsilon, yarn's
# parameters, changes to logits and to text embeddings, and notes.
_IGNORED = (
    "vocab_size", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "final_logit_softcapping",
    "pooling_type", "tensor_data_layout", _LABELS,
)  # fmt: skip


class GgufFields:
    """Typed access to an architecture's fields; every error has the whole key."""

    def __init__(self, fields: Mapping[str, Any], architecture: str) -> None:
        self._architecture = architecture
        prefix = f"{architecture}."
        self.values = {
            key.removeprefix(prefix): value
            for key, value in fields.items()
            if key.startswith(prefix)
        }

    def error(self, name: str, wanted: str) -> CheckpointError:
        """Make the error for a field; ``wanted`` follows what was got."""
        got = shown(self.values.get(name))
        return CheckpointError(f"{self._architecture}.{name}: got {got}, {wanted}")

    def count(self, name: str, default: int | None = None) -> int:
        """Read a positive integer of any width."""
        value = self.values.get(name, default)
        return read_count(value, self._key(name), "a whole number from 1 on", most=2**64)

    def number(self, name: str, default: float | None = None) -> float:
        """Read a finite number."""
        value = self.values.get(name, default)
        return read_number(value, self._key(name), "a number", -_MOST_FLOAT, _MOST_FLOAT)

    def _key(self, name: str) -> str:
        return f"{self._architecture}.{name}"


def read_config(
    fields: Mapping[str, Any], gguf: GgufFormat, rope_divisors: Tensor | None
) -> dict[str, Any]:
    """Translate ``fields`` to ``config.json``, without ``model_type`` and what the tensors tell.

    Args:
        rope_divisors: ``rope_freqs.weight``, ``[rotated channels / 2]``.
    """
    read = GgufFields(fields, gguf.architecture)
    _refuse_others(read, gguf)
    config: dict[str, Any] = {ours: read.count(name) for name, ours in SETTINGS.items()}
    epsilon, epsilon_key = gguf.epsilon
    heads = config["num_attention_heads"]
    head_dim = read.count("attention.key_length", config["hidden_size"] // heads)
    rotated = _rotated_channels(read, gguf, config, head_dim)
    rope = _rope(read, rotated, rope_divisors)
    if gguf.is_partly_rotated:
        rope["partial_rotary_factor"] = rotated / head_dim
    config |= {
        epsilon_key: read.number(epsilon),
        "num_key_value_heads": read.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_parameters": rope,
        **{ours: read.number(name) for name, ours in gguf.optional.items() if name in read.values},
    }
    return {**config, **gguf.derived(config)}


def _rotated_channels(
    read: GgufFields, gguf: GgufFormat, config: Mapping[str, Any], head_dim: int
) -> int:
    """Count the rotated channels, of a head's ``head_dim``."""
    rotated = read.count("rope.dimension_count", head_dim)
    if read.count("attention.value_length", head_dim) != head_dim:
        raise read.error("attention.value_length", f"wanted the keys' {head_dim}")
    if rotated != head_dim and not (gguf.is_partly_rotated and rotated < head_dim):
        raise read.error("rope.dimension_count", f"wanted the head's {head_dim}")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if gguf.is_partly_rotated and heads * head_dim != hidden:
        # The converter takes the share of hidden / heads, which then is not the size of a head.
        raise read.error(
            "attention.key_length",
            f"wanted {hidden // heads}, a head's part of the hidden size: else the "
            "file does not say how much is rotated; take the Hugging Face folder",
        )
    return rotated


def _refuse_others(read: GgufFields, gguf: GgufFormat) -> None:
    """Refuse unread fields, which might change what the model computes, unless they are off."""
    known = {*SETTINGS, *_OWN, *_IGNORED, *gguf.optional}
    for name, value in read.values.items():
        is_plain = value is True if name == "attention.causal" else not value
        if name not in known and not is_plain:
            raise read.error(name, "which is not supported")


def _rope(read: GgufFields, rotated: int, divisors: Tensor | None) -> dict[str, Any]:
    base = float(read.number("rope.freq_base", 10000.0))
    # As in llama.cpp, a factor without a type is linear, and a missing one is 1.
    kind = read.values.get("rope.scaling.type", "linear")
    factor = read.number("rope.scaling.factor", 0.0)
    if kind not in ("none", "linear"):
        raise read.error("rope.scaling.type", "wanted 'none' or 'linear'")
    is_linear = kind == "linear" and factor not in (0.0, 1.0)
    if divisors is None:
        scaling = {"rope_type": "linear", "factor": factor} if is_linear else {}
        return {"rope_type": "default", "rope_theta": base, **scaling}
    if is_linear:
        raise read.error("rope.scaling.factor", f"and {ROPE_FREQS}; wanted one of them")
    return {"rope_theta": base, **_llama3_scaling(base, rotated, divisors)}


def _llama3_scaling(base: float, rotated: int, divisors: Tensor) -> dict[str, Any]:
    if divisors.shape != (rotated // 2,) or rotated < 2:
        got = list(divisors.shape)
        raise CheckpointError(f"{ROPE_FREQS}: got shape {got}, wanted {[rotated // 2]}")
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(divisors.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # The file keeps only the divisors: accept them if Llama 3's constants give the same.
    if not torch.allclose(divisors, llama3_divisors(base, rotated, scaling), rtol=1e-3):
        raise CheckpointError(f"{ROPE_FREQS}: not the rope scaling of Llama 3.1")
    return scaling


def llama3_divisors(base: float, head_dim: int, scaling: Mapping[str, Any]) -> Tensor:
    """Divisors of the ``head_dim / 2`` frequencies by Llama 3.1's rope scaling."""
    frequencies = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1.0 / ((1 - smooth) / scaling["factor"] + smooth)
