"""Read a GGUF file as the Hugging Face checkpoint from which it was converted.

The ``gguf`` package (extra ``[gguf]``) reads the file. The package trusts the counts and lengths in
a file's header, so this module checks them first. The format is described in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

This module has, in this order, ``GgufCheckpoint``, the check of the header, and the conversion of
the tokenizer.
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
# The tensor of the reward head for llama.cpp's rank pooling, and the metadata field with the prompt
# template of llama.cpp's /rerank.
CLASSIFIER = "cls.output.weight"
RERANK_TEMPLATE = "tokenizer.chat_template.rerank"
_MAX_EXPERTS = 10_000
_SHARED_GATE = ".ffn_gate_inp_shexp.weight"
# Metadata field with the scoring contract. Only this package writes and reads it.
CONTRACT_FIELD = "nemo_aligner.scoring_contract"


@dataclass(frozen=True)
class _StoredTensor:
    """Location of a tensor in the file.

    Attributes:
        offset: position of the data in the file, in bytes.
        shape: shape of the stored (quantized) data.
        dtype: dtype of the stored data.
        kind: quantization type of the gguf package.
        unpacked_shape: shape of the tensor after dequantization.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: Any
    unpacked_shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> _StoredTensor:
        # GGUF lists a tensor's axes in the reverse of torch's order.
        unpacked = tuple(map(int, reversed(tensor.shape)))
        data = tensor.data
        return cls(int(tensor.data_offset), data.shape, data.dtype, tensor.tensor_type, unpacked)


class GgufCheckpoint:
    """A GGUF file, read as a Hugging Face checkpoint.

    Attributes:
        config: settings by the keys of ``config.json``.
        tensors: lazy fp32 tensors by their Hugging Face names.
        fields: all metadata by key, except the vocabulary.
        contract: content of the scoring contract, if this package exported the file.

    Raises:
        CheckpointError: the file is not a GGUF file, its family is unknown, or it has a tensor or a
            field that the family does not have. The message lacks the file's name, which the caller
            adds.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fields, self._stored = _open_gguf(path)
        if self.fields.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"split.count: this is one of {self.fields['split.count']} files of a split model. "
                "Merge them with llama.cpp's llama-gguf-split --merge"
            )
        self._family, self._format = find_gguf_family(self.fields)
        rope = {name: self._dequantize(name) for name in ROPE_TENSORS if name in self._stored}
        self.tensors: dict[str, LazyTensor] = {}
        for name, stored in self._stored.items():
            if name not in (*ROPE_TENSORS, CLASSIFIER):
                self._add_tensor(name, self._hf_name(name), stored.unpacked_shape)
        if "token_embd.weight" not in self._stored:
            raise CheckpointError(
                "token_embd.weight: this tensor, the embedding, is missing. Download the file again"
            )
        self.contract = _read_contract(self.fields)
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

    def _add_tensor(self, name: str, hf_name: str, shape: tuple[int, ...]) -> None:
        """Add a tensor by its Hugging Face name; split a tensor of all experts into one per expert.

        Args:
            hf_name: Hugging Face name. EXPERT in it stands for the number of an expert.
        """
        if EXPERT in hf_name:
            # Limit the number of experts, because a damaged tensor with an empty axis can claim any
            # number without having any data.
            if len(shape) != 3 or shape[0] > _MAX_EXPERTS:
                raise CheckpointError(
                    f"tensor {shown(name)}: got shape {list(shape)}, wanted matrices of at most "
                    f"{_MAX_EXPERTS} experts"
                )
            for expert in range(shape[0]):
                read = partial(self._dequantize, name, expert)
                single = LazyTensor(shape[1:], torch.float32, read)
                self.tensors[hf_name.replace(EXPERT, str(expert))] = single
            return
        # The gate of the shared expert is a matrix of one row, which GGUF stores as a vector.
        shape = (1, *shape) if name.endswith(_SHARED_GATE) and len(shape) == 1 else shape
        read = partial(self._read_tensor, name, shape)
        self.tensors[hf_name] = LazyTensor(shape, torch.float32, read)

    def _add_classifier(self) -> None:
        """Add the reward head of a file for llama.cpp's rank pooling, which has two classes.

        llama.cpp applies a softmax to the classes' logits. The reward is the log-odds, the first
        logit minus the second, so the head is the first row minus the second.
        """
        key = f"{self._format.architecture}.{LABELS}"
        labels, shape = self.fields.get(key), self._stored[CLASSIFIER].unpacked_shape
        if not self._format.has_classifier or shape[:1] != (2,):
            raise CheckpointError(
                f"{CLASSIFIER}: got a head of shape {list(shape)} in a {self._format.architecture} "
                "model, wanted two rows in a qwen3 model, the only head that llama.cpp's rank "
                "pooling reads"
            )
        if not isinstance(labels, list) or len(labels) != 2:
            raise CheckpointError(f"{key}: got {shown(labels)}, wanted the names of two classes")
        size = (1, *shape[1:])
        self.tensors[HF_HEAD] = LazyTensor(size, torch.float32, self._read_classifier)
        self.config |= {"num_labels": 1, "id2label": {"0": str(labels[0])}}

    def _read_classifier(self) -> Tensor:
        first, second = self._dequantize(CLASSIFIER)
        return (first - second)[None]

    def _hf_name(self, name: str) -> str:
        """Translate a GGUF tensor name to Hugging Face's, with EXPERT for an expert's number."""
        part, _, kind = name.rpartition(".")
        if part in self._format.model:
            return f"{self._format.model[part]}.{kind}"
        block, _, part = part.removeprefix("blk.").partition(".")
        if not (name.startswith("blk.") and block.isdigit() and part in self._format.layer):
            raise CheckpointError(
                f"tensor {shown(name)}: a {self._format.architecture} model has no such tensor"
            )
        return f"{self._family.layer_prefix}{block}.{self._format.layer[part]}.{kind}"

    def _dequantize(self, name: str, part: int | None = None) -> Tensor:
        """Read a tensor as fp32; with ``part``, only the slice at this index of its first axis."""
        import gguf

        stored = self._stored[name]
        shape = stored.shape if part is None else stored.shape[1:]
        # Read the data without mapping the file, because pages of a mapped file would stay in
        # memory.
        count = math.prod(shape)
        offset = stored.offset + (part or 0) * count * stored.dtype.itemsize
        data = np.fromfile(self._path, stored.dtype, count, offset=offset)
        try:
            values = gguf.dequantize(data.reshape(shape), stored.kind)
        except NotImplementedError as error:
            raise CheckpointError(f"tensor {name}: {error}") from error
        # Make the array writable, because torch warns about read-only arrays.
        tensor = torch.from_numpy(np.require(values, requirements="W"))
        check_finite(tensor, f"tensor {name}")
        return tensor

    def _read_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor, and undo llama.cpp's changes to norms, queries and keys."""
        tensor = self._dequantize(name).reshape(shape)
        if self._format.norm_offset and name.endswith("norm.weight"):
            return tensor - self._format.norm_offset
        if self._format.is_permuted and ".attn_q." in name:
            return _halves_order(tensor, self.config["num_attention_heads"])
        if self._format.is_permuted and ".attn_k." in name:
            return _halves_order(tensor, self.config["num_key_value_heads"])
        return tensor


def _read_contract(fields: Fields) -> Mapping[str, Any] | None:
    """Parse the scoring contract in a file's metadata; None if another program wrote the file."""
    if CONTRACT_FIELD not in fields:
        return None
    try:
        contract = json.loads(fields[CONTRACT_FIELD])
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{CONTRACT_FIELD}: not JSON: {short(error)}") from error
    if not isinstance(contract, dict):
        raise CheckpointError(f"{CONTRACT_FIELD}: got {shown(contract)}, wanted a JSON object")
    return contract


def _open_gguf(path: Path) -> tuple[dict[str, Any], dict[str, _StoredTensor]]:
    """Return a file's metadata by key, without the vocabulary, and its tensors by name."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError("GGUF files need the gguf package (extra [gguf])") from error
    try:
        architecture = check_header(path)
        if architecture is not None:
            # Check the architecture first, because reading the vocabulary can take seconds.
            check_gguf_architecture(architecture)
        # GGUFReader trusts the counts in the header, which check_header has checked.
        reader = _fast_reader(gguf.GGUFReader, path)
        # Skip the vocabulary, because the reader makes an array for every word.
        fields = {
            key: _read_value(field)
            for key, field in reader.fields.items()
            if not (key.startswith("tokenizer.") and field.types[0].name == "ARRAY")
        }
        return fields, {tensor.name: _StoredTensor.of(tensor) for tensor in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"not a readable GGUF file: {short(error)}") from error


def _fast_reader(reader_class: type[Any], path: Path) -> Any:
    """Open a file by gguf's ``GGUFReader`` with a plain array instead of its ``np.memmap``.

    The reader slices the array for every word of the vocabulary, three times as fast.
    """

    class Reader(reader_class):  # type: ignore[misc]
        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._data = mapped.view(np.ndarray)

    return Reader(path)


def _read_value(field: Any) -> Any:
    value = field.contents()
    # Convert fp32 via its shortest decimal: 1e-5, as in config.json, instead of 9.99999974e-06.
    return float(str(np.float32(value))) if field.types[0].name == "FLOAT32" else value


def _halves_order(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows of q or k ``[heads * d, ...]`` from interleaved RoPE pairs to two halves.

    llama.cpp rotates neighbouring channels; transformers rotates channel i with i + d / 2.
    """
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


# Functions that check a header before the gguf package reads it. The package creates as many
# objects for an array as the header claims, even if the file ends before.

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Limits for the numbers of fields and of tensors, for the items of all arrays together, and for a
# tensor's axes, far above those of any real file. A vocabulary of 300,000 tokens has two arrays of
# about this length.
_MAX_ENTRIES, _MAX_ITEMS, _MAX_AXES = 2**16, 2**23, 8


def check_header(path: Path) -> str | None:
    """Check that the fields and tensor entries of a header lie within the file.

    Returns:
        The value of ``general.architecture``; None if the file has no such field.

    Raises:
        CheckpointError: the file is not a GGUF file, or a count or a size is too large.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise CheckpointError("not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).check()


class _Header:
    """Reads a GGUF file's header to check its counts and lengths; stores no values."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._position = data, len(_MAGIC)
        self._order = "<"

    def check(self) -> str | None:
        if self._read_number("I") & 0xFFFF == 0:  # the version is small, so bytes are swapped
            self._order = ">"
        tensors, fields = self._read_count("tensors"), self._read_count("fields")
        # Count the items of all arrays together, because a limit for a single array would still
        # allow 65,536 arrays of 8 million items.
        items_left, architecture = _MAX_ITEMS, None
        for _ in range(fields):
            is_architecture = self._read_string() == b"general.architecture"
            kind = self._read_number("I")
            if is_architecture and kind == _STRING:
                architecture = self._read_string().decode(errors="replace")
            else:
                items_left -= self._skip_value(kind, items_left)
        for _ in range(tensors):
            self._skip(self._read_number("Q"))
            axes = self._read_number("I")
            if axes > _MAX_AXES:
                raise self._error(f"a tensor of {axes} axes, wanted at most {_MAX_AXES}")
            self._skip(8 * axes + 4 + 8)  # sizes of the axes, type, offset
        return architecture

    def _read_string(self) -> bytes:
        size = self._read_number("Q")
        self._skip(size)
        return self._data[self._position - size : self._position]

    def _skip_value(self, kind: int, items_left: int) -> int:
        """Skip the value of a field.

        Args:
            kind: GGUF's number of the value's type.
            items_left: how many items the arrays of the file may still have, together.

        Returns:
            The number of items if the value is an array, otherwise 0.
        """
        if kind != _ARRAY:
            self._skip(self._size_of(kind))
            return 0
        kind, count = self._read_number("I"), self._read_number("Q")
        if count > items_left:
            raise self._error(
                f"an array of {count} items, wanted at most {_MAX_ITEMS} items in all arrays of "
                "the file together"
            )
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._read_number("Q"))
        else:
            self._skip(count * self._size_of(kind))
        return count

    def _size_of(self, kind: int) -> int:
        """Return the size in bytes of a value of the type with GGUF's number ``kind``."""
        if kind == _STRING:
            return self._read_number("Q")
        if kind not in _SIZES:
            raise self._error(f"a value of the unknown type {kind}")
        return _SIZES[kind]

    def _read_count(self, name: str) -> int:
        count = self._read_number("Q")
        if count > _MAX_ENTRIES:
            raise self._error(f"{count} {name}, wanted at most {_MAX_ENTRIES}")
        return count

    def _read_number(self, kind: str) -> int:
        start = self._position
        self._skip(struct.calcsize(f"{self._order}{kind}"))
        return struct.unpack_from(f"{self._order}{kind}", self._data, start)[0]

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._position:
            raise self._error(f"a value of {size} bytes, which goes past the end of the file")
        self._position += size

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"not a readable GGUF file: byte {self._position}: got {problem}. The file is probably "
            "damaged: download or convert it again."
        )


# Conversion of the tokenizer. transformers reads it from the file, but ignores some of its rules.
# ``_add_rules`` adds them, as llama.cpp reads them:
# https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp.

# Older versions of transformers misread the tokenizers of GGUF files: they use BOS in place of EOS,
# and GPT-2's pre-tokenizer for every tokenizer.
_OLDEST_TRANSFORMERS = (5, 23)
_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
# Names of pre-tokenizers with the rule ignore_merges: a word that is in the vocabulary is one
# token, even if no merges lead to it.
_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "pixtral", "tekken")
# Names of GPT-2's pre-tokenizer (byte-level BPE). None: a file without a name uses it, too.
_LIKE_GPT2 = (None, "gpt-2", "olmo", "exaone4")
# Names of pre-tokenizers that split numbers into single digits. transformers does not know these
# names, so ``_add_rules`` adds the rule.
_SINGLE_DIGITS = ("smollm", "refact", "starcoder")
_READ_BY_TRANSFORMERS = ("qwen2", "deepseek-r1-qwen", "megrez", "dbrx", "smaug-bpe", "gpt-4o")
# Names of pre-tokenizers with Llama 3's regular expression, but without ignore_merges.
_LIKE_LLAMA3 = ("glm4", "chatglm-bpe")
_LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = (
    *_LIKE_GPT2,
    *_READ_BY_TRANSFORMERS,
    *_LIKE_LLAMA3,
    *_SINGLE_DIGITS,
    *_IGNORE_MERGES,
)
# llama.cpp's converter renames InternLM2's token for the NUL character to this emoji.
_NUL = "\N{DRAGON}"


def save_gguf_tokenizer(path: Path, fields: Fields, folder: Path) -> None:
    """Write the tokenizer of a GGUF file into ``folder``, in Hugging Face's form.

    Args:
        path: the GGUF file.
        fields: its metadata (``GgufCheckpoint.fields``).
    """
    import transformers

    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < _OLDEST_TRANSFORMERS:
        required = ".".join(map(str, _OLDEST_TRANSFORMERS))
        raise CheckpointError(
            f"got transformers {version}, which misreads GGUF tokenizers. Install {required} "
            "or newer (extra [gguf])"
        )
    _check_pre_tokenizer(fields)
    # The file is read through a link in an empty folder, because transformers would also read other
    # tokenizer files in the same folder.
    with tempfile.TemporaryDirectory() as empty_folder:
        Path(empty_folder, "model.gguf").symlink_to(path.resolve())
        try:
            # Not AutoTokenizer: it rejects model classes that it does not know, and adds a token to
            # Gemma 2's tokenizer.
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
                empty_folder,
                gguf_file="model.gguf",
                local_files_only=True,
                trust_remote_code=False,
                add_bos_token=_adds_bos(fields),
            )
        except Exception as error:  # third-party code may raise anything
            raise CheckpointError(
                f"tokenizer.ggml.model: got {shown(fields.get('tokenizer.ggml.model'))}, which "
                f"transformers cannot read ({short(error)}). Convert the Hugging Face folder from "
                "which the file was made"
            ) from error
    _add_rules(tokenizer.backend_tokenizer, fields)
    rerank = fields.get(RERANK_TEMPLATE)
    if isinstance(rerank, str) and CONTRACT_FIELD not in fields:
        # Prefer the template of /rerank to the file's chat template, because the head was trained
        # on it.
        tokenizer.chat_template = _convert_to_jinja(rerank)
    tokenizer.save_pretrained(str(folder))
    if fields.get("general.architecture") == "internlm2":
        _restore_nul(folder / "tokenizer.json")


def _restore_nul(file: Path) -> None:
    """Rename InternLM2's token for the NUL character in ``file`` from "dragon" back to NUL.

    llama.cpp's converter names the token like a dragon emoji, so a dragon in a sample would be read
    as NUL.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    if _NUL in vocabulary and "\0" not in vocabulary:
        vocabulary["\0"] = vocabulary.pop(_NUL)
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _convert_to_jinja(rerank: str) -> str:
    """Convert a prompt template of llama.cpp's ``/rerank`` to a chat template in Jinja.

    The prompt takes the place of ``{query}``, and the response that of ``{document}``.
    """
    parts = re.split(r"(\{query\}|\{document\})", rerank)
    turns = {"{query}": "messages[0].content", "{document}": "messages[1].content"}
    return "".join(
        f"{{{{ {turns.get(part) or json.dumps(part, ensure_ascii=False)} }}}}"
        for part in parts
        if part
    )


def _check_pre_tokenizer(fields: Fields) -> None:
    """Raise CheckpointError for a pre-tokenizer that transformers would replace by GPT-2's."""
    name = fields.get(_PRE)
    if fields.get(_MODEL) == "gpt2" and name not in _PRE_TOKENIZERS:
        supported = ", ".join(filter(None, _PRE_TOKENIZERS))
        raise CheckpointError(f"{_PRE}: got {shown(name)}, wanted one of: {supported}")


def _adds_bos(fields: Fields) -> bool:
    """Tell if samples begin with BOS, from a field or, without it, from the tokenizer's kind."""
    is_default = fields.get(_MODEL) == "llama" or fields.get(_PRE) in _IGNORE_MERGES
    has_bos = "tokenizer.ggml.bos_token_id" in fields
    return bool(fields.get("tokenizer.ggml.add_bos_token", is_default and has_bos))


def _add_rules(backend: tokenizers.Tokenizer, fields: Fields) -> None:
    """Add to ``backend`` the tokenizer rules in ``fields`` that transformers ignores."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence, Split

    if fields.get(_PRE) in _IGNORE_MERGES:
        backend.model.ignore_merges = True
    if fields.get(_PRE) in _SINGLE_DIGITS:
        byte_level = ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), byte_level])
    if fields.get(_PRE) in _LIKE_LLAMA3:
        split, byte_level = (
            Split(Regex(_LLAMA3_REGEX), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        )
        backend.pre_tokenizer = Sequence([split, byte_level])
    has_prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    if not has_prefix and isinstance(backend.pre_tokenizer, Metaspace):
        backend.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
