"""Export a reward model as a GGUF file for llama.cpp's rank pooling.

The file is read again and compared with the archive before it is renamed to its final name.

llama.cpp (``src/models/*.cpp``, ``build_pooling`` in ``src/llama-graph.cpp``) has a classifier for
only one decoder that this package supports, Qwen3: one matrix without a bias, at the last token,
followed by a softmax. So the file has the reward's row and a row of zeros. The first value of the
softmax is the sigmoid of the reward; the reward is the log of the first value over the second.
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
from nemo_aligner.checkpoint.hf.exported_tokenizer import write_tokenizer
from nemo_aligner.checkpoint.hf.families.base import HF_HEAD, GgufFormat
from nemo_aligner.checkpoint.hf.gguf import (
    CLASSIFIER,
    CONTRACT_FIELD,
    GgufCheckpoint,
    save_gguf_tokenizer,
)
from nemo_aligner.checkpoint.hf.gguf_config import SETTINGS
from nemo_aligner.checkpoint.hf.reward_archive import (
    ExportOptions,
    RewardArchive,
    build_exported_head,
)
from nemo_aligner.checkpoint.hf.source import hf_shapes
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.folder import NemoFolder
from nemo_aligner.checkpoint.nemo.reward_model import contract_of, model_shape
from nemo_aligner.checkpoint.nemo.write import scratch_beside
from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import format_of, torch_dtype
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import check_last_token
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.contract.turns import write_conversation
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.head import check_is_linear
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import CheckpointError, shown
from nemo_aligner.utils.writing import sync_to_disk

_READER = "llama.cpp's rank pooling"
# Label of the head's row of zeros. The label of the other row is the name of the attribute.
_ZERO = "zero"
_QUERY, _DOCUMENT = "{query}", "{document}"
# Names of the gguf package's quantization type and file type, by precision.
_KINDS = {
    Precision.fp32: ("F32", "ALL_F32"),
    Precision.fp16: ("F16", "MOSTLY_F16"),
    Precision.bf16: ("BF16", "MOSTLY_BF16"),
}


def export_to_gguf(archive: str | Path, output: str | Path, options: ExportOptions) -> str:
    """Write the reward model ``archive`` as the new file ``output``.

    Matrices are stored as ``options.dtype``, the head and one-dimensional tensors in fp32. Then the
    file is read again, as a conversion reads it, and must have the archive's weights, settings and
    token ids.

    Returns:
        Lines to print.

    Raises:
        CheckpointError: ``output`` exists; llama.cpp does not support the head, the decoder or the
            tokenizer; or the file differs from the archive when it is read again.
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
    """Writes a reward model as one GGUF file, and checks the written file.

    Attributes:
        archive: the opened archive.
        gguf: how the decoder's family is stored in GGUF files.
        head: the reward's row, fp32 ``[1, hidden]``.
        contract: scoring contract of the exported model.
        tokenizer: tokenizer of the exported model.
        scratch: temporary folder, in which the file is written.
        precision: precision of the stored matrices.
        license: licence of the base model; ``unknown`` if it is not known.
    """

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
        contract, source = contract_of(folder, tokenizer), str(folder.source)
        if contract is None:
            raise CheckpointError(
                f"{source}: it has no scoring contract, so it is not a reward model of this package"
            )
        check_last_token(contract, source, _READER)
        if contract.trailing_pad_id is not None:
            raise CheckpointError(
                f"{source}: its samples end with the pad token (trailing_pad_id "
                f"{contract.trailing_pad_id} in its scoring contract), which is not scored, but "
                f"{_READER} reads the last token of a sample whatever it is. Export it as a "
                "Hugging Face folder"
            )
        check_is_linear(model_shape(folder).head, source, _READER)
        archive = RewardArchive.of(folder)
        gguf = archive.family.gguf
        if gguf is None or not gguf.has_classifier:
            raise CheckpointError(
                f"{source}: got a {archive.family.name}, wanted a qwen3, the only decoder of this "
                "package for which llama.cpp has a classifier at the last token"
            )
        if ModelShape.from_config(archive.config).window_size is not None:
            raise CheckpointError(
                f"{source}: it has a sliding window, which llama.cpp's {gguf.architecture} does "
                "not support"
            )
        head, exported = build_exported_head(archive, contract, options)
        rows = head.tensors[HF_HEAD]
        if len(rows) != 1:
            raise CheckpointError(
                f"{source}: got {len(rows)} outputs ({', '.join(exported.output_names)}), but "
                f"{_READER} returns only the first. Use --merge to merge several attributes"
            )
        stored = format_of(options.dtype or archive.embedding_dtype).precision
        write_tokenizer(scratch, tokenizer, exported, tokenizer.pad_token)
        return cls(
            archive, gguf, rows, exported.with_dtype(stored), load_tokenizer(scratch), scratch,
            stored, options.base_license,
        )  # fmt: skip

    def write(self, name: str) -> list[str]:
        """Write the file, read it again, and return the lines to print.

        ``name`` is the model's name in the file's metadata.
        """
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
        self._compare_with_archive()
        return self._summarize(kind, rerank)

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
            raise CheckpointError(
                f"rope_type: the model has {shown(rope['rope_type'])}, but only default and linear "
                "can be exported as GGUF. Export it as a Hugging Face folder"
            )

    def _add_tokenizer(self, writer: Any) -> None:
        content = json.loads((self.scratch / "tokenizer.json").read_text(encoding="utf-8"))
        pre_tokenizer = name_pre_tokenizer(content)
        tokens, kinds = _list_vocabulary(content, self.archive.config["vocab_size"])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        # The tokenizers package up to 0.19 writes a merge as one string, later versions as a pair.
        merges = content["model"]["merges"]
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
        if self.tokenizer.bos_id is not None:
            writer.add_bos_token_id(self.tokenizer.bos_id)
        if self.tokenizer.eos_id is not None:
            writer.add_eos_token_id(self.tokenizer.eos_id)
        writer.add_add_bos_token(self.contract.add_bos)
        writer.add_add_eos_token(self.contract.add_eos)

    def _rerank_template(self) -> str:
        """Return the template of ``/rerank``, which renders a sample as the scoring contract does.

        llama.cpp replaces ``{query}`` by the prompt and ``{document}`` by the response.
        """
        reward_token_id = self.contract.reward_token_id
        end = "" if reward_token_id is None else self.tokenizer.decode([reward_token_id])
        if self.contract.template:
            turns = [("user", _QUERY), ("assistant", _DOCUMENT)]
            messages = [{"role": role, "content": content} for role, content in turns]
            rules = self.contract.chat_template(self.tokenizer)
            template = write_conversation(rules, messages, self.tokenizer) + end
        else:
            begin = self.tokenizer.bos_token if self.contract.add_bos else ""
            end = (self.tokenizer.eos_token if self.contract.add_eos else "") + end
            template = f"{begin}{_QUERY}{_DOCUMENT}{end}"
        if template.count(_QUERY) != 1 or template.count(_DOCUMENT) != 1:
            raise CheckpointError(
                f"chat template: it renders {_QUERY} and {_DOCUMENT} as {shown(template)}, but "
                f"{_READER} needs a template in which each occurs once, unchanged"
            )
        return template

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
            is_16_bit = len(shape) > 1 and kind != gguf.GGMLQuantizationType.F32
            # numpy has no bf16, so 16-bit values are passed as int16, and raw_dtype tells what they
            # are.
            dtype = torch.zeros(0, dtype=torch.int16 if is_16_bit else torch.float32).numpy().dtype
            size = torch.Size(shape).numel() * dtype.itemsize
            raw_dtype = kind if is_16_bit else None
            writer.add_tensor_info(self._gguf_name(name), shape, dtype, size, raw_dtype)
        head = torch.cat([self.head, torch.zeros_like(self.head)]).numpy()
        writer.add_tensor_info(CLASSIFIER, head.shape, head.dtype, head.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, tensor in self._stored_tensors():
            plain = tensor if tensor.dtype == torch.float32 else tensor.view(torch.int16)
            writer.write_tensor_data(plain.contiguous().numpy())
        writer.write_tensor_data(head)
        writer.close()

    def _gguf_name(self, name: str) -> str:
        """Translate the Hugging Face name of a decoder's tensor to its GGUF name."""
        part, _, kind = name.rpartition(".")
        outside = {hf_name: gguf_name for gguf_name, hf_name in self.gguf.model.items()}
        if part in outside:
            return f"{outside[part]}.{kind}"
        inside = {hf_name: gguf_name for gguf_name, hf_name in self.gguf.layer.items()}
        layer, _, part = part.removeprefix(self.archive.family.layer_prefix).partition(".")
        return f"blk.{layer}.{inside[part]}.{kind}"

    def _stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the decoder's tensors with their Hugging Face names, in the stored dtype."""
        dtype = torch_dtype(self.precision)
        for name, tensor in self.archive.tensors(self.archive.config["vocab_size"], None):
            stored = tensor.to(dtype if tensor.dim() > 1 else torch.float32)
            if not stored.isfinite().all():
                raise CheckpointError(
                    f"{name}: it has a weight that is too large for {dtype}. Export with another "
                    "dtype"
                )
            yield name, stored

    def _compare_with_archive(self) -> None:
        """Read the written file as a conversion does, and raise CheckpointError if it differs.

        Weights, settings and the token ids of a few samples must be those of the archive.
        """
        read = GgufCheckpoint(self.scratch / _FILE)
        family = self.archive.family
        config, expected = family.to_nemo(read.config), family.to_hf(self.archive.config)
        actual = family.to_hf(config)
        for key, value in expected.items():
            # tie_word_embeddings may differ: it is about the output layer, which a reward model
            # does not have.
            if actual[key] != value and key != "tie_word_embeddings":
                raise CheckpointError(
                    f"{key}: the written file has {actual[key]}, but the archive has {value}"
                )
        for name, tensor in [*self._stored_tensors(), (HF_HEAD, self.head)]:
            if not torch.equal(read.tensors[name].read(), tensor.float()):
                raise CheckpointError(f"{name}: the written file has other values than the archive")
        save_gguf_tokenizer(self.scratch / _FILE, read.fields, self.scratch / "read")
        tokenizer = load_tokenizer(self.scratch / "read")
        for text in encode_texts(self.contract, self.tokenizer):
            (ids,) = self.contract.tokenize(tokenizer, [text.text])
            if ids != text.token_ids:
                raise CheckpointError(
                    f"the written file's tokenizer tokenizes {text.text!r} as {ids}, but the "
                    f"archive's as {text.token_ids}"
                )

    def _summarize(self, kind: str, rerank: str) -> list[str]:
        (name,) = self.contract.output_names
        lines = [
            f"{self.gguf.architecture} with rank pooling of {name}, matrices in {kind}",
            "checked: a conversion of the file gives the same weights, settings and token ids",
            f"scoring contract: {self.contract.hash}",
            "llama-server --rerank answers /rerank with the sigmoid of each document's reward as a "
            f"response to the query; they are rendered as {rerank!r}",
        ]
        if any(self.contract.label_means):
            lines.append(
                "WARNING: llama.cpp's classifier has no bias, so its logit lacks the offset "
                f"{self.contract.label_means[0]:g}. The order of responses is the same without it"
            )
        return lines


# llama.cpp's names for pre-tokenizers of byte-level BPE (``src/llama-vocab.cpp``), by the regular
# expressions that split a text into words.

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    _CONTRACTIONS + r"\p{N}" + _PUNCTUATION: "qwen2",
    _CONTRACTIONS + r"\p{N}{1,3}" + _PUNCTUATION: "llama-bpe",
}


def name_pre_tokenizer(content: Mapping[str, Any]) -> str:
    """Return llama.cpp's name (``tokenizer.ggml.pre``) for a tokenizer's splitting rules.

    ``content`` is the content of ``tokenizer.json``.

    Raises:
        CheckpointError: llama.cpp does not have these rules.
    """
    model, normalizer = content["model"], content.get("normalizer") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise CheckpointError(
            f"tokenizer.json: model: got {shown(model.get('type'))}, wanted BPE on bytes, the only "
            "kind of tokenizer that can be exported as GGUF"
        )
    # llama.cpp does not normalize texts to NFC. This is accepted, because most texts are in NFC
    # already and get the same ids.
    if normalizer.get("type", "NFC") != "NFC":
        raise CheckpointError(
            f"tokenizer.json: normalizer: got {shown(normalizer)}, wanted NFC or none"
        )
    pre_tokenizer = content.get("pre_tokenizer")
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    kinds = [step.get("type") for step in steps]
    last = steps[-1]
    name = None
    if not last.get("add_prefix_space", True):
        if kinds == ["ByteLevel"] and last.get("use_regex", True):
            name = "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
            name = "smollm"
        if kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
            name = _SPLITS.get(steps[0].get("pattern", {}).get("Regex"))
    if name is None or (name == "llama-bpe") != bool(model.get("ignore_merges")):
        raise CheckpointError(
            f"tokenizer.json: pre_tokenizer: got {shown(pre_tokenizer)}, wanted that of GPT-2, "
            "SmolLM, Qwen2 or Llama 3"
        )
    return name


def _list_vocabulary(content: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """List the tokens and their GGUF types, both by id, up to ``size``.

    An id without a token in ``tokenizer.json`` gets a placeholder of the type "unused".
    """
    import gguf

    kinds = gguf.TokenType
    by_id = {number: (token, kinds.NORMAL) for token, number in content["model"]["vocab"].items()}
    for added in content["added_tokens"]:
        kind = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
        by_id[added["id"]] = (added["content"], kind)
    filled = [by_id.get(number, (f"[PAD{number}]", kinds.UNUSED)) for number in range(size)]
    return [token for token, _ in filled], [int(kind) for _, kind in filled]
