"""Export of a reward model as a GGUF file for llama.cpp's rank pooling, read before it is named.

Among the decoders of this package llama.cpp (``src/models/*.cpp``, ``build_pooling`` in
``src/llama-graph.cpp``) gives only Qwen3 a classifier: one matrix without a bias, at the last
token, with a softmax behind it. So the file has the reward's row and one of zeros: the softmax of
the two is the sigmoid of the reward, and the logarithm of their ratio is the reward itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.check import encode_texts
from nemo_aligner.checkpoint.hf.export import write_tokenizer
from nemo_aligner.checkpoint.hf.families.base import HF_HEAD, GgufFormat
from nemo_aligner.checkpoint.hf.gguf import (
    CLASSIFIER,
    CONTRACT_FIELD,
    GgufCheckpoint,
    save_gguf_tokenizer,
)
from nemo_aligner.checkpoint.hf.gguf_config import SETTINGS
from nemo_aligner.checkpoint.hf.reward_archive import ExportOptions, RewardArchive, head_of
from nemo_aligner.checkpoint.hf.source import hf_shapes
from nemo_aligner.checkpoint.nemo.archive import open_nemo, scratch_beside, sync_to_disk
from nemo_aligner.checkpoint.nemo.folder import NemoFolder
from nemo_aligner.checkpoint.nemo.reward_model import contract_of, model_shape
from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import format_of, torch_dtype
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import check_last_token
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.contract.turns import write_conversation
from nemo_aligner.models.shape import ModelShape, check_is_linear
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import CheckpointError, shown

_WHO = "llama.cpp's rank pooling"
# Name of the row of zeros, beside the attribute's.
_ZERO = "zero"
_QUERY, _DOCUMENT = "{query}", "{document}"
# By precision: the gguf package's quantization type, and llama.cpp's number of a file's type.
_KINDS = {
    Precision.fp32: ("F32", "ALL_F32"),
    Precision.fp16: ("F16", "MOSTLY_F16"),
    Precision.bf16: ("BF16", "MOSTLY_BF16"),
}


def export_to_gguf(archive: str | Path, output: str | Path, options: ExportOptions) -> str:
    """Write the reward model ``archive`` as the new file ``output``; returns what to tell.

    Matrices are stored as ``options.dtype``, the head and one-dimensional tensors in fp32. The file
    is read again as a conversion would, and must have the same weights, settings and token ids.

    Raises:
        CheckpointError: ``output`` exists, llama.cpp has no place for the head, the decoder or the
            tokenizer, or what was written reads otherwise.
    """
    output = Path(output)
    with scratch_beside(output) as scratch, open_nemo(archive) as folder:
        lines = _Writer.of(folder, scratch, options).write(output.stem)
        sync_to_disk(scratch / _FILE)
        (scratch / _FILE).rename(output)
    sync_to_disk(output.parent)
    return "\n".join([f"{output}: {lines[0]}", *lines[1:]])


_FILE = "model.gguf"


@dataclass(frozen=True)
class _Writer:
    """One export: what is read of the archive, and the folder to write into."""

    archive: RewardArchive
    gguf: GgufFormat
    head: Tensor
    contract: ScoringContract
    tokenizer: Tokenizer
    scratch: Path
    precision: Precision
    license: str

    @classmethod
    def of(cls, folder: NemoFolder, scratch: Path, options: ExportOptions) -> _Writer:
        tokenizer = folder.load_tokenizer()
        contract, where = contract_of(folder, tokenizer), str(folder.source)
        if contract is None:
            raise CheckpointError(f"{where}: it has no scoring contract, wanted a reward model")
        check_last_token(contract, where, _WHO)
        check_is_linear(model_shape(folder).head, where, _WHO)
        archive = RewardArchive.of(folder)
        gguf = archive.family.gguf
        if gguf is None or not gguf.has_classifier:
            raise CheckpointError(
                f"{where}: got a {archive.family.name}, wanted a qwen3: llama.cpp has a classifier "
                "at the last token for no other decoder that is read here"
            )
        if ModelShape.from_config(archive.config).window_size is not None:
            raise CheckpointError(f"{where}: got a sliding window, which {gguf.architecture} lacks")
        head, exported = head_of(archive, contract, options)
        rows = head.tensors[HF_HEAD]
        if len(rows) != 1:
            raise CheckpointError(
                f"{where}: got {len(rows)} outputs ({', '.join(exported.output_names)}), wanted "
                f"one: {_WHO} answers with the first alone (--merge makes one of attributes)"
            )
        stored = format_of(options.dtype or archive.embedding_dtype).precision
        write_tokenizer(scratch, tokenizer, exported, tokenizer.pad_token)
        return cls(
            archive, gguf, rows, exported.with_dtype(stored), load_tokenizer(scratch), scratch,
            stored, options.base_license,
        )  # fmt: skip

    def write(self, name: str) -> list[str]:
        """Write the file and read it again; returns what to tell."""
        try:
            import gguf
        except ImportError as error:
            raise CheckpointError("GGUF files need the gguf package (extra [gguf])") from error
        say("writing the file ...")
        writer = gguf.GGUFWriter(self.scratch / _FILE, self.gguf.architecture)
        writer.add_type("model")
        writer.add_name(name)
        if self.license != "unknown":
            writer.add_license(self.license)
        kind, file_type = _KINDS[self.precision]
        writer.add_file_type(gguf.LlamaFileType[file_type])
        self._add_settings(writer)
        self._add_tokenizer(writer)
        rerank = self._rerank_template()
        self._add_classifier(writer, rerank)
        self._write_tensors(writer, gguf.GGMLQuantizationType[kind])
        say("reading it again ...")
        self._check()
        return self._told(kind, rerank)

    def _add_settings(self, writer: Any) -> None:
        config = self.archive.family.to_hf(self.archive.config)
        for name, key in SETTINGS.items():
            writer.add_uint32(f"{self.gguf.architecture}.{name}", config[key])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        rope = config["rope_parameters"]
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "linear":
            import gguf

            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        elif rope["rope_type"] != "default":
            raise CheckpointError(f"rope_type: got {shown(rope['rope_type'])}, wanted default")

    def _add_tokenizer(self, writer: Any) -> None:
        content = json.loads((self.scratch / "tokenizer.json").read_text(encoding="utf-8"))
        cut = cut_of(content)
        tokens, kinds = _vocabulary(content, self.archive.config["vocab_size"])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(cut)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        # tokenizers up to 0.19 write a merge as one text, later ones as a pair.
        merges = content["model"]["merges"]
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
        if self.tokenizer.bos_id is not None:
            writer.add_bos_token_id(self.tokenizer.bos_id)
        if self.tokenizer.eos_id is not None:
            writer.add_eos_token_id(self.tokenizer.eos_id)
        writer.add_add_bos_token(self.contract.add_bos)
        writer.add_add_eos_token(self.contract.add_eos)

    def _rerank_template(self) -> str:
        """The text that ``/rerank`` fills in: a question and its answer, by the contract."""
        ids = self.contract.reward_token_id
        end = "" if ids is None else self.tokenizer.decode([ids])
        if self.contract.template:
            turns = [("user", _QUERY), ("assistant", _DOCUMENT)]
            messages = [{"role": role, "content": content} for role, content in turns]
            written = write_conversation(
                self.contract.template, messages, self.tokenizer, self.contract.template_kwargs
            )
            written += end
        else:
            begin = self.tokenizer.bos_token if self.contract.add_bos else ""
            end = (self.tokenizer.eos_token if self.contract.add_eos else "") + end
            written = f"{begin}{_QUERY}{_DOCUMENT}{end}"
        if written.count(_QUERY) != 1 or written.count(_DOCUMENT) != 1:
            raise CheckpointError(
                f"chat template: got {shown(written)} for a question and its answer, wanted each "
                f"once and as it is: {_WHO} puts texts into it"
            )
        return written

    def _add_classifier(self, writer: Any, rerank: str) -> None:
        import gguf

        templates = [{"name": "rerank", "template": rerank}]
        if self.tokenizer.chat_template:
            templates.append({"name": "default", "template": self.tokenizer.chat_template})
        writer.add_chat_template(templates)
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels([*self.contract.output_names, _ZERO])
        writer.add_string(CONTRACT_FIELD, json.dumps(self.contract.to_dict()))

    def _write_tensors(self, writer: Any, kind: Any) -> None:
        import gguf

        shapes = hf_shapes(self.archive.rules, self.archive.config)
        for name, shape in shapes.items():
            fits = len(shape) > 1 and kind != gguf.GGMLQuantizationType.F32
            # numpy has no bf16: 16 bits of any kind are written as int16, and named by raw_dtype.
            dtype = torch.zeros(0, dtype=torch.int16 if fits else torch.float32).numpy().dtype
            size = torch.Size(shape).numel() * dtype.itemsize
            raw = kind if fits else None
            writer.add_tensor_info(self._name(name), shape, dtype, size, raw)
        head = torch.cat([self.head, torch.zeros_like(self.head)]).numpy()
        writer.add_tensor_info(CLASSIFIER, head.shape, head.dtype, head.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, tensor in self._tensors():
            plain = tensor if tensor.dtype == torch.float32 else tensor.view(torch.int16)
            writer.write_tensor_data(plain.contiguous().numpy())
        writer.write_tensor_data(head)
        writer.close()

    def _name(self, name: str) -> str:
        """GGUF's name of a tensor, by Hugging Face's."""
        part, _, kind = name.rpartition(".")
        outside = {theirs: ours for ours, theirs in self.gguf.model.items()}
        if part in outside:
            return f"{outside[part]}.{kind}"
        inside = {theirs: ours for ours, theirs in self.gguf.layer.items()}
        layer, _, part = part.removeprefix(self.archive.family.layer_prefix).partition(".")
        return f"blk.{layer}.{inside[part]}.{kind}"

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors by Hugging Face's names, as they are stored."""
        dtype = torch_dtype(self.precision)
        for name, tensor in self.archive.tensors(self.archive.config["vocab_size"], None):
            stored = tensor.to(dtype if tensor.dim() > 1 else torch.float32)
            if not stored.isfinite().all():
                raise CheckpointError(f"{name}: a weight of it is too large for {dtype}")
            yield name, stored

    def _check(self) -> None:
        """Compare the file, as a conversion reads it, with the archive."""
        read = GgufCheckpoint(self.scratch / _FILE)
        family = self.archive.family
        got, wanted = family.to_hf(family.to_nemo(read.config)), family.to_hf(self.archive.config)
        for key, value in wanted.items():
            # A reward model has no output layer, tied or not.
            if got[key] != value and key != "tie_word_embeddings":
                raise CheckpointError(f"{key}: the file reads as {got[key]}, wanted {value}")
        for name, tensor in [*self._tensors(), (HF_HEAD, self.head)]:
            if not torch.equal(read.tensors[name].read(), tensor.float()):
                raise CheckpointError(f"{name}: the file reads otherwise than the archive")
        save_gguf_tokenizer(self.scratch / _FILE, read.fields, self.scratch / "read")
        tokenizer = load_tokenizer(self.scratch / "read")
        for each in encode_texts(self.contract, self.tokenizer):
            (again,) = self.contract.tokenize(tokenizer, [each.text])
            if again != each.token_ids:
                raise CheckpointError(
                    f"the file's tokenizer writes {each.text!r} as {again}, wanted {each.token_ids}"
                )

    def _told(self, kind: str, rerank: str) -> list[str]:
        (name,) = self.contract.output_names
        lines = [
            f"{self.gguf.architecture} with rank pooling of {name}, matrices in {kind}",
            "checked: weights, settings and token ids, as a conversion reads them",
            f"scoring contract: {self.contract.hash}",
            "llama-server --rerank answers /rerank with the sigmoid of the reward of each document "
            f"as the reply to the query, written as {rerank!r}",
        ]
        if any(self.contract.label_means):
            lines.append(
                f"WARNING: llama.cpp's score lacks {self.contract.label_means[0]:g}: its "
                "classifier has no bias. The order of replies is right without it"
            )
        return lines


# Pre-tokenizers of byte-level BPE by llama.cpp's names (``src/llama-vocab.cpp``).

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
}


def cut_of(content: Mapping[str, Any]) -> str:
    """``tokenizer.ggml.pre`` of a ``tokenizer.json``."""
    model, normalizer = content["model"], content.get("normalizer") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise CheckpointError(
            f"tokenizer.json: got {shown(model.get('type'))}, wanted byte-level BPE"
        )
    # llama.cpp does not compose characters: texts that are composed already have the same ids.
    if normalizer.get("type", "NFC") != "NFC":
        raise CheckpointError(f"tokenizer.json: normalizer: got {shown(normalizer)}, wanted none")
    before = content.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    kinds = [step.get("type") for step in steps]
    last = steps[-1]
    cut = None
    if not last.get("add_prefix_space", True):
        if kinds == ["ByteLevel"] and last.get("use_regex", True):
            cut = "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
            cut = "smollm"
        if kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
            cut = _SPLITS.get(steps[0].get("pattern", {}).get("Regex"))
    if cut is None or (cut == "llama-bpe") != bool(model.get("ignore_merges")):
        raise CheckpointError(
            f"tokenizer.json: pre_tokenizer: got {shown(before)}, wanted that of GPT-2, SmolLM, "
            "Qwen2 or Llama 3"
        )
    return cut


def _vocabulary(content: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Tokens by id and their GGUF types; ids that the tokenizer lacks are unused."""
    import gguf

    kinds = gguf.TokenType
    by_id = {number: (token, kinds.NORMAL) for token, number in content["model"]["vocab"].items()}
    for added in content["added_tokens"]:
        kind = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
        by_id[added["id"]] = (added["content"], kind)
    filled = [by_id.get(number, (f"[PAD{number}]", kinds.UNUSED)) for number in range(size)]
    return [token for token, _ in filled], [int(kind) for _, kind in filled]
