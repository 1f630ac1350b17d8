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
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families import check_gguf_architecture, find_gguf_family
from nemo_aligner.checkpoint.hf.families.base import EXPERT, HF_HEAD
from nemo_aligner.checkpoint.hf.gguf_config import LABELS, ROPE_TENSORS, read_config
from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.checkpoint.weights.store import check_finite
from nemo_aligner.utils.errors import CheckpointError, short, shown

if TYPE_CHECKING:
    import tokenizers


Fields = Mapping[str, Any]
# A reward head for llama.cpp's rank pooling, and the prompt of its /rerank.
CLASSIFIER = "cls.output.weight"
RERANK_TEMPLATE = "tokenizer.chat_template.rerank"
_MOST_EXPERTS = 10_000
_SHARED_GATE = ".ffn_gate_inp_shexp.weight"
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
        self._family, self._format = find_gguf_family(self.fields)
        rope = {name: self._dequantized(name) for name in ROPE_TENSORS if name in self._stored}
        self.tensors: dict[str, LazyTensor] = {}
        for name, stored in self._stored.items():
            if name not in (*ROPE_TENSORS, CLASSIFIER):
                self._add_tensor(name, self._hf_name(name), stored.unpacked_shape)
        if "token_embd.weight" not in self._stored:
            raise CheckpointError("token_embd.weight: the tensor is missing")
        self.contract = _own_contract(self.fields)
        self.config = {
            "model_type": self._family.name,
            **read_config(self.fields, self._format, rope),
            "vocab_size": self._stored["token_embd.weight"].unpacked_shape[0],
            "tie_word_embeddings": "output.weight" not in self._stored,
        }
        if self._format.may_have_biases:
            self.config["attention_bias"] = "blk.0.attn_q.bias" in self._stored
        if CLASSIFIER in self._stored:
            self._add_classifier()

    def _add_tensor(self, name: str, ours: str, shape: tuple[int, ...]) -> None:
        """Add a tensor by its Hugging Face name; of all experts' one, that of each."""
        if EXPERT in ours:
            # A tensor without columns may claim any number of rows at no cost.
            if len(shape) != 3 or shape[0] > _MOST_EXPERTS:
                raise CheckpointError(
                    f"tensor {shown(name)}: got shape {list(shape)}, wanted matrices of at most "
                    f"{_MOST_EXPERTS} experts"
                )
            for expert in range(shape[0]):
                read = partial(self._dequantized, name, expert)
                single = LazyTensor(shape[1:], torch.float32, read)
                self.tensors[ours.replace(EXPERT, str(expert))] = single
            return
        # A row alone has lost its first axis.
        shape = (1, *shape) if name.endswith(_SHARED_GATE) and len(shape) == 1 else shape
        read = partial(self._read, name, shape)
        self.tensors[ours] = LazyTensor(shape, torch.float32, read)

    def _add_classifier(self) -> None:
        """Add the reward head of a file for rank pooling: the log odds of two classes.

        llama.cpp's softmax of the products with two rows has the logarithm of its ratio in the
        product with their difference.
        """
        key = f"{self._format.architecture}.{LABELS}"
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

    def _dequantized(self, name: str, part: int | None = None) -> Tensor:
        """Read a tensor, or a part of its first axis, in fp32."""
        import gguf

        stored = self._stored[name]
        shape = stored.shape if part is None else stored.shape[1:]
        # Read from the file, as pages of a mapping would stay resident.
        count = math.prod(shape)
        offset = stored.offset + (part or 0) * count * stored.dtype.itemsize
        data = np.fromfile(self._path, stored.dtype, count, offset=offset)
        try:
            values = gguf.dequantize(data.reshape(shape), stored.kind)
        except NotImplementedError as error:
            raise CheckpointError(f"tensor {name}: {error}") from error
        # torch warns about an array that is read-only.
        tensor = torch.from_numpy(np.require(values, requirements="W"))
        check_finite(tensor, f"tensor {name}")
        return tensor

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._dequantized(name).reshape(shape)
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
        architecture = check_header(path)
        if architecture is not None:
            # Before the package reads a vocabulary, which takes seconds.
            check_gguf_architecture(architecture)
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


def check_header(path: Path) -> str | None:
    """Check that the fields and tensor entries of a header lie within the file.

    Returns:
        Its ``general.architecture``; None if there is none.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise CheckpointError("not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).check()


class _Header:
    """Cursor over a file's header."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._position = data, len(_MAGIC)
        self._order = "<"

    def check(self) -> str | None:
        if self._number("I") & 0xFFFF == 0:  # a version in the other byte order
            self._order = ">"
        tensors, fields = self._count("tensors"), self._count("fields")
        # In all, as 65,536 fields of 8 million items each would pass one by one.
        items_left, architecture = _MOST_ITEMS, None
        for _ in range(fields):
            is_architecture = self._text() == b"general.architecture"
            kind = self._number("I")
            if is_architecture and kind == _STRING:
                architecture = self._text().decode(errors="replace")
            else:
                items_left -= self._skip_value(kind, items_left)
        for _ in range(tensors):
            self._skip(self._number("Q"))
            axes = self._number("I")
            if axes > _MOST_AXES:
                raise self._error(f"a tensor of {axes} axes")
            self._skip(8 * axes + 4 + 8)  # dimensions, type, offset
        return architecture

    def _text(self) -> bytes:
        size = self._number("Q")
        self._skip(size)
        return self._data[self._position - size : self._position]

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
# Pre-tokenizers of byte-level BPE that are supported; GPT-2's is the default, and that of two more.
# Those with single digits are not among transformers' own.
_LIKE_GPT2, _SINGLE_DIGITS = (None, "gpt-2", "olmo", "exaone4"), ("smollm", "refact", "starcoder")
_BY_TRANSFORMERS = ("qwen2", "deepseek-r1-qwen", "megrez", "dbrx", "smaug-bpe", "gpt-4o")
# Llama 3's cuts, without its whole words.
_LIKE_LLAMA3 = ("glm4", "chatglm-bpe")
_LLAMA3_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = (*_LIKE_GPT2, *_BY_TRANSFORMERS, *_LIKE_LLAMA3, *_SINGLE_DIGITS, *_WHOLE_WORDS)
# What llama.cpp's converter writes in place of InternLM2's token of the character 0.
_NUL = "\N{DRAGON}"


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
    if fields.get("general.architecture") == "internlm2":
        _restore_nul(folder / "tokenizer.json")


def _restore_nul(file: Path) -> None:
    """Name InternLM2's token of the character 0 again, so that no other text becomes that token."""
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    if _NUL in vocabulary and "\0" not in vocabulary:
        vocabulary["\0"] = vocabulary.pop(_NUL)
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


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
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence, Split

    if fields.get(_PRE) in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    if fields.get(_PRE) in _SINGLE_DIGITS:
        bytes_of_words = ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), bytes_of_words])
    if fields.get(_PRE) in _LIKE_LLAMA3:
        cuts = Split(Regex(_LLAMA3_CUTS), behavior="isolated")
        backend.pre_tokenizer = Sequence([cuts, ByteLevel(add_prefix_space=False, use_regex=False)])
    has_prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    if not has_prefix and isinstance(backend.pre_tokenizer, Metaspace):
        backend.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
