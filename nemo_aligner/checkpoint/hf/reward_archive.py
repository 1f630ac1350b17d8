"""Read a reward model's archive for an export: tensors, head and contract in Hugging Face's form.

``RewardArchive`` reads the decoder's tensors under their Hugging Face names. The rest of this
module converts the head to the form in which an export writes it, and the scoring contract to
match.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import (
    EMBEDDING,
    HEAD_PREFIX,
    PREFIX,
    VOCABULARY_TENSORS,
)
from nemo_aligner.checkpoint.hf.families import family_of
from nemo_aligner.checkpoint.hf.families.base import HF_HEAD, ModelFamily, Rule
from nemo_aligner.checkpoint.hf.families.query_groups import add_zero_groups, remove_zero_groups
from nemo_aligner.checkpoint.hf.heads import (
    LINEAR,
    LINEAR_FORMS,
    SCORE_WITH_BIAS,
    TWO_LAYERS,
    VALUE_LAYER,
)
from nemo_aligner.checkpoint.hf.source import megatron_key, model_rules
from nemo_aligner.checkpoint.nemo.folder import NemoFolder
from nemo_aligner.checkpoint.nemo.load_weights import head_names
from nemo_aligner.checkpoint.nemo.reward_model import (
    LoadedRewardModel,
    reward_model_without_weights,
)
from nemo_aligner.checkpoint.weights.store import TensorStore
from nemo_aligner.config.common import Aggregate, Precision
from nemo_aligner.config.dtypes import format_of
from nemo_aligner.config.kernels import TORCH_KERNELS
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import SIGMOID
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.lora import fold_into_weight
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.lora import LINEARS, LORA_A, LORA_B, LoraShape, is_of_adapter
from nemo_aligner.utils.errors import CheckpointError, shown

# Keys that a NeMo config may lack; their values, or the defaults, are taken from ``ModelShape``.
_OPTIONAL_KEYS = (
    "kv_channels",
    "max_position_embeddings",
    "layernorm_epsilon",
    "rotary_base",
    "rotary_percentage",
    "qkv_bias",
    "qk_layernorm",
)


def build_reference_model(folder: NemoFolder, layout: ParallelLayout) -> LoadedRewardModel:
    """Build the model whose rewards an export is compared with; its weights are not loaded.

    It has no LoRA adapters, and computes in fp32 with torch's own operations, as transformers does.
    """
    return reward_model_without_weights(
        folder,
        layout,
        Precision.fp32,
        kernels=TORCH_KERNELS,
        with_adapters=False,
    )


@dataclass(frozen=True)
class RewardArchive:
    """An opened archive of a reward model, read with Hugging Face's names.

    LoRA adapters are folded into the weights that methods return; only ``adapters`` yields them.

    Attributes:
        store: the stored tensors.
        embedding_dtype: dtype of the embedding.
        family: the model family.
        config: NeMo config of the model, in which added query groups of zeros do not count.
        num_query_groups: number of query groups in the archive, including added groups of zeros.
        rules: rules of the decoder's tensors with their layers.
        lora: LoRA adapters in the archive; None if there are none.
        is_stacked: True if each stored tensor stacks all layers; False if each layer has its own
            tensors.
    """

    store: TensorStore
    embedding_dtype: torch.dtype
    family: ModelFamily
    config: dict[str, Any]
    num_query_groups: int
    rules: list[tuple[Rule, int | None]]
    lora: LoraShape | None
    is_stacked: bool

    @classmethod
    def of(cls, folder: NemoFolder) -> RewardArchive:
        """Read settings and rules of an opened archive.

        Raises:
            CheckpointError: the archive has a tensor that the family's models do not have.
        """
        shape = ModelShape.from_config(folder.config)
        groups = shape.num_query_groups
        # Subtract the groups of zeros: they were added for tensor parallelism, and are not
        # exported.
        model_groups = groups - int(folder.config.get("zero_query_groups") or 0)
        config = {
            "share_embeddings_and_output_weights": True,  # NeMo's default if the key is missing
            **folder.config,
            **{name: getattr(shape, name) for name in _OPTIONAL_KEYS},
            "num_attention_heads": shape.num_attention_heads // groups * model_groups,
            "num_query_groups": model_groups,
            "zero_query_groups": 0,
        }
        family = family_of(config)
        rules = model_rules(family, config, has_output_layer=False)
        exportable = {PREFIX + HEAD_PREFIX + name for name in head_names(folder)}
        exportable |= {
            megatron_key(rule, layer, is_stacked=shape.is_uniform) for rule, layer in rules
        }
        stored = folder.store.tensors
        unknown = sorted(key for key in stored.keys() - exportable if not is_of_adapter(key))
        if unknown:
            raise CheckpointError(
                f"{folder.source}: {unknown[0]}: a {family.name} reward model of Hugging Face has "
                "no such tensor, so the archive cannot be exported"
            )
        dtype = stored[PREFIX + EMBEDDING][1]
        return cls(folder.store, dtype, family, config, groups, rules, shape.lora, shape.is_uniform)

    def split(self, rule: Rule, data: Tensor) -> Sequence[Tensor]:
        """Split an unsharded Megatron tensor into Hugging Face's tensors.

        Vocabulary padding and query groups of zeros are removed.
        """
        # Rows past the vocabulary are padding.
        if rule.megatron in VOCABULARY_TENSORS:
            data = data[: self.config["vocab_size"]]
        model_groups = self.config["num_query_groups"]
        data = remove_zero_groups(rule.group_axis, data, self.num_query_groups, model_groups)
        return rule.split(data, self.config)

    def join(self, rule: Rule, parts: Sequence[Tensor]) -> Tensor:
        """Invert ``split``: join Hugging Face's tensors, but add no padding of the vocabulary."""
        data = rule.join(parts, self.config)
        model_groups = self.config["num_query_groups"]
        return add_zero_groups(rule.group_axis, data, model_groups, self.num_query_groups)

    def head(self) -> dict[str, Tensor]:
        """Read the reward head's tensors in fp32, by the names of ``HeadShape.tensors``."""
        prefix = PREFIX + HEAD_PREFIX
        names = [key for key in self.store.tensors if key.startswith(prefix)]
        return {key.removeprefix(prefix): self.store.read(key).float() for key in names}

    def read(self, rule: Rule, layer: int | None, dtype: torch.dtype | None = None) -> Tensor:
        """Read the unsharded Megatron tensor of a rule, with LoRA folded in.

        ``layer`` is the layer's number, from 0 on; None outside the layers. The result has
        ``dtype``, or that of the archive.
        """
        key = megatron_key(rule, layer, is_stacked=self.is_stacked)
        data = self.store.read(key, layer if self.is_stacked else None)
        data = data.to(dtype or data.dtype)
        matrices = self._read_lora(rule, layer)
        if matrices is None or self.lora is None:
            return data
        high, low = matrices
        return fold_into_weight(data, low, high, self.lora.scale)

    def read_unrounded(self, name: str, layer: int | None) -> Tensor:
        """Read a Megatron tensor as ``read_as_exported`` does, in fp32 and without rounding it."""
        if name.startswith(HEAD_PREFIX):
            return self.store.read(PREFIX + name)
        rule = self._rule_of(name, layer)
        return self.join(rule, self.split(rule, self.read(rule, layer, torch.float32)))

    def _rule_of(self, name: str, layer: int | None) -> Rule:
        (rule,) = (
            rule for rule, rule_layer in self.rules if (rule.megatron, rule_layer) == (name, layer)
        )
        return rule

    def _read_lora(self, rule: Rule, layer: int | None) -> tuple[Tensor, Tensor] | None:
        """Read the matrices B and A of a Megatron tensor's LoRA adapter; None if it has none."""
        linear = rule.megatron.removesuffix(".weight")
        if self.lora is None or linear not in self.lora.linears:
            return None
        prefix = megatron_key(rule, layer, is_stacked=self.is_stacked).removesuffix(".weight")
        place = layer if self.is_stacked else None
        high, low = (self.store.read(f"{prefix}.{name}", place) for name in (LORA_B, LORA_A))
        return high, low

    def adapters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield for every weight with LoRA its Hugging Face name, and the matrices A and B.

        Weights that Megatron stores in one tensor, such as q, k and v, share a matrix A.
        """
        groups, model_groups = self.num_query_groups, self.config["num_query_groups"]
        for rule, layer in self.rules:
            matrices = self._read_lora(rule, layer)
            if matrices is None:
                continue
            pair, axis = list(matrices), rule.group_axis
            if axis is not None:
                pair[axis] = remove_zero_groups(axis, pair[axis], groups, model_groups)
            for name, part in zip(rule.hf, rule.split(pair[0], self.config), strict=True):
                yield name, pair[1], part

    def base_linears(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the layers' linear modules, without LoRA, with their HF names."""
        weights = {f"{linear}.weight" for linear in LINEARS.values()}
        plain = replace(self, lora=None)
        for rule, layer in self.rules:
            if rule.megatron in weights:
                yield from zip(rule.hf, self.split(rule, plain.read(rule, layer)), strict=True)

    def read_as_exported(self, name: str, layer: int | None, dtype: torch.dtype | None) -> Tensor:
        """Read a Megatron tensor, rounded as in the exported folder.

        The check of an export uses it, so that both models that it compares have the same weights.
        """
        if name.startswith(HEAD_PREFIX):
            return self.store.read(PREFIX + name)
        rule = self._rule_of(name, layer)
        parts = self.split(rule, self.read(rule, layer))
        stored = rule.dtype or dtype
        return self.join(rule, [part.to(stored or part.dtype).float() for part in parts])

    def tensors(self, vocab_size: int, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the decoder with its Hugging Face name.

        Args:
            vocab_size: rows of the embedding. If the export adds a pad token, this is one more than
                in the archive, and the new row is zero.
            dtype: dtype of the tensors; None keeps the stored one.
        """
        for rule, layer in self.rules:
            data = self.read(rule, layer)
            for name, part in zip(rule.hf, self.split(rule, data), strict=True):
                part = part.to(rule.dtype or dtype or part.dtype)
                if rule.megatron in VOCABULARY_TENSORS:
                    part = F.pad(part, (0, 0, 0, vocab_size - part.size(0)))
                yield name, part


# The head, in the form in which an export writes it.


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        dtype: dtype of the weights; None keeps the stored one.
        merge: whether to merge the attributes into one reward, their weighted sum.
        head: form in which the head is written (see ``ExportedHead.of``); None means the default
            form.
        max_shard_bytes: size limit of a safetensors file.
        base_license: licence of the base model, for the model card.
        hub_name: name that the model will have on the hub; None if it stays a folder.
    """

    dtype: torch.dtype | None = None
    merge: bool = False
    head: str | None = None
    max_shard_bytes: int = 5 * 10**9
    base_license: str = "unknown"
    hub_name: str | None = None

    def name_card(self, output: Path) -> str:
        """Return the model's name in its card: on the hub, or that of the folder ``output``."""
        return self.hub_name or output.name


@dataclass(frozen=True)
class ExportedHead:
    """A head in the form in which an export writes it.

    Attributes:
        tensors: fp32 tensors by their names in the folder.
        form: name of the form: that of a layout in ``heads.py``, or ``score.bias``.
        means: ``[A]``, constants that a program must add to the outputs to get rewards.
        shift: ``[A]``, constants by which this head's outputs exceed those of the archive's head;
            None if there are none.
        is_pair: the head has two outputs for one reward, of which the first is always 0.
    """

    tensors: dict[str, Tensor]
    form: str
    means: list[float]
    shift: Tensor | None = None
    is_pair: bool = False

    @classmethod
    def of(
        cls,
        head: Mapping[str, Tensor],
        form: str | None,
        means: Sequence[float],
        *,
        are_rewards: bool = True,
    ) -> ExportedHead:
        """Convert the archive's head to the form in which an export writes it.

        The form ``score`` has no bias, because transformers' class has none; the bias of the
        archive's head is added to ``means`` instead. ``score.bias`` and ``v_head.summary`` have a
        bias, to which ``means`` are added. The two layers of ``Qwen2ForRewardModel`` always have
        biases, which may be zeros.

        Args:
            head: tensors by the names of ``HeadShape.tensors``.
            form: name of the form; None means ``score``, or for two layers Qwen2ForRewardModel's.
            means: label means ``[A]``.
            are_rewards: True if the outputs are rewards, so that a bias is a constant and may be
                moved to ``means``; False for logits of bins.

        Raises:
            CheckpointError: the head cannot be written in this form.
        """
        default_form = TWO_LAYERS.last if "hidden.weight" in head else LINEAR.last
        form = default_form if form is None else form
        _check_form(form, default_form, head, are_rewards=are_rewards)
        bias = head.get("bias")
        if form == LINEAR.last:
            if bias is None:
                return cls({HF_HEAD: head["weight"]}, form, list(means))
            offsets = torch.tensor(means, dtype=torch.float64) + bias.double()
            return cls({HF_HEAD: head["weight"]}, form, offsets.tolist(), -bias)
        tensors, shift = _with_biases(head), None
        if are_rewards and form != TWO_LAYERS.last:
            shift = torch.tensor(means, dtype=torch.float32)
            tensors["bias"] = tensors["bias"] + shift
            means = [0.0] * len(means)
        return cls(_rename_tensors(tensors, form), form, list(means), shift)

    @classmethod
    def of_steps(
        cls,
        head: Mapping[str, Tensor],
        form: str | None,
        means: Sequence[float],
        *,
        are_rewards: bool,
    ) -> ExportedHead:
        """Convert a head that reads steps to the form that has biases; arguments as in ``of``.

        One reward becomes two outputs, 0 and the reward, because programs for models that score
        steps expect two. Their softmax is ``1 - sigmoid(reward)`` and ``sigmoid(reward)``.
        """
        form = _require_biased_form(head, form, "steps")
        tensors, rows = _with_biases(head), head["weight"].size(0)
        shift, is_pair = None, are_rewards and rows == 1
        if are_rewards:
            shift = torch.tensor(means, dtype=torch.float32)
            tensors["bias"] = tensors["bias"] + shift
            means = [0.0] * rows
        if is_pair:
            tensors["weight"] = F.pad(tensors["weight"], (0, 0, 1, 0))
            tensors["bias"] = F.pad(tensors["bias"], (1, 0))
        return cls(_rename_tensors(tensors, form), form, list(means), shift, is_pair)


def _require_biased_form(head: Mapping[str, Tensor], form: str | None, reads: str) -> str:
    """Return the only form for a head that reads steps or means, a form with biases.

    Args:
        form: the requested form; None for any.
        reads: what the head reads, such as ``steps``, for the error.

    Raises:
        CheckpointError: another form is requested.
    """
    biased_form = TWO_LAYERS.last if "hidden.weight" in head else SCORE_WITH_BIAS
    if form not in (None, biased_form):
        raise CheckpointError(
            f"head: got {shown(form)}, but a head that reads {reads} can only be exported as "
            f"{biased_form}. Leave --head out"
        )
    return biased_form


def _with_biases(head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the head's tensors, with a bias of zeros for each matrix that has none."""
    zeros = {
        name.replace("weight", "bias"): tensor.new_zeros(tensor.size(0))
        for name, tensor in head.items()
        if name.endswith("weight")
    }
    return {**zeros, **head}


def _rename_tensors(head: Mapping[str, Tensor], form: str) -> dict[str, Tensor]:
    """Rename a head's tensors from the names of ``HeadShape.tensors`` to those of ``form``."""
    layouts = {TWO_LAYERS.last: TWO_LAYERS, VALUE_LAYER.last: VALUE_LAYER}
    names = layouts.get(form, LINEAR).names()
    return {names[head_name]: tensor for head_name, tensor in head.items()}


def _check_form(
    form: str, default_form: str, head: Mapping[str, Tensor], *, are_rewards: bool
) -> None:
    """Raise CheckpointError if the archive's head cannot be written in ``form``.

    ``default_form`` is the form that is used if the user chooses none.
    """
    has_two_layers = default_form == TWO_LAYERS.last
    supported = [TWO_LAYERS.last] if has_two_layers else [*LINEAR_FORMS]
    if form not in supported:
        layers = "two layers" if has_two_layers else "one matrix"
        raise CheckpointError(
            f"head: got {shown(form)}, but the model's head, which has {layers}, can only be "
            f"exported as {' or '.join(supported)}"
        )
    outputs = head["weight"].size(0)
    if form == VALUE_LAYER.last and outputs != 1:
        raise CheckpointError(
            f"head: got {form} for {outputs} outputs, but a value head has only one. Use --merge "
            "to merge several attributes into one"
        )
    if form == LINEAR.last and "bias" in head and not are_rewards:
        raise CheckpointError(
            f"head: got {form}, a form without biases, but this model computes a reward from "
            f"several outputs (bins), each of which needs its bias. Use --head {SCORE_WITH_BIAS}"
        )


def build_exported_head(
    archive: RewardArchive, contract: ScoringContract, options: ExportOptions
) -> tuple[ExportedHead, ScoringContract]:
    """Build the head that an export writes, and the scoring contract that belongs to it.

    Raises:
        CheckpointError: the options do not fit the head.
    """
    stored = _read_head(archive, contract, merge=options.merge)
    # The adapters are folded, so the weights are no longer those of a quantized base.
    exported = replace(contract, base_precision=None)
    if options.dtype is not None:
        exported = exported.with_dtype(format_of(options.dtype).precision)
    readout = contract.output_readout
    if readout is not None and readout.is_linear:
        exported = exported.with_readout(None)
    if options.merge:
        exported = _merge_attributes(exported)
    exported_readout = exported.output_readout
    are_rewards, form = exported_readout is None, options.head
    if contract.has_steps and exported_readout is not None and exported_readout.kind == SIGMOID:
        # The contract's readout takes the sigmoid of one logit per step. Programs for models with
        # steps instead take the softmax of two outputs. With the outputs 0 and the logit both give
        # the same probability, so the logit is exported like a reward.
        are_rewards = True
    if contract.reply_marker is not None:
        form = _require_biased_form(stored, form, "means")
    build = ExportedHead.of_steps if contract.has_steps else ExportedHead.of
    head = build(stored, form, exported.label_means, are_rewards=are_rewards)
    if contract.has_steps and head.form == TWO_LAYERS.last:
        _check_step_layers(archive, head, exported)
    return head, exported.with_label_means(head.means)


def _read_head(
    archive: RewardArchive, contract: ScoringContract, *, merge: bool
) -> dict[str, Tensor]:
    """Read the head's tensors in fp32, with only the outputs that an export writes.

    A head of quantiles is reduced to the median, and several heads to their mean, because these are
    the rewards. With ``merge``, the outputs are reduced to their weighted sum.
    """
    head, readout = archive.head(), contract.output_readout
    parts = [name for name in ("weight", "bias") if name in head]
    if readout is not None and readout.is_linear:
        head |= {name: readout.plain_rows(head[name]) for name in parts}
    elif readout is not None and merge:
        raise CheckpointError(
            f"merge: the outputs of a head of {readout.kind} are not rewards, so they cannot be "
            "summed. Export it without --merge"
        )
    if merge and contract.aggregation not in (Aggregate.last, Aggregate.mean):
        raise CheckpointError(
            f"merge: the reward of a sample is the {contract.aggregate} of its steps' rewards, "
            "which would change if the attributes of each step were summed first. Export the "
            "attributes separately, without --merge"
        )
    if merge:
        weights = torch.tensor(contract.attribute_weights)[None]
        head |= {name: weights @ head[name] for name in parts}
    return head


def _merge_attributes(contract: ScoringContract) -> ScoringContract:
    """Return the scoring contract of a model that is exported with its attributes merged."""

    def weighted_sum(values: Sequence[float]) -> tuple[float]:
        pairs = zip(contract.attribute_weights, values, strict=True)
        return (sum(weight * value for weight, value in pairs),)

    return replace(
        contract,
        attributes=("reward",),
        attribute_weights=(1.0,),
        label_means=weighted_sum(contract.label_means),
        # The standard deviation of a sum cannot be computed from those of its terms.
        reward_mean=None,
        reward_std=None,
        measured_on=None,
    )


def _check_step_layers(
    archive: RewardArchive, head: ExportedHead, exported: ScoringContract
) -> None:
    """Raise CheckpointError if a head of two layers does not fit ``Qwen2ForProcessRewardModel``.

    vLLM's other classes that read steps have a head of one layer.
    """
    model_type = archive.family.to_hf(archive.config)["model_type"]
    sizes = [head.tensors[f"{layer}.weight"].size(0) for layer in ("score.0", "score.2")]
    expected = [archive.config["hidden_size"], 2]
    if model_type != "qwen2" or sizes != expected or len(exported.attributes) > 1:
        raise CheckpointError(
            f"head: got two layers of {sizes[0]} units and {sizes[1]} outputs on a {model_type}. "
            f"With one reward per step, two layers are supported only on a qwen2, with "
            f"{expected[0]} units and one reward (or {expected[1]} bins); a head of one matrix is "
            "supported on any model"
        )


def convert_logits(
    logits: Tensor, contract: ScoringContract, head: ExportedHead, *, merge: bool
) -> Tensor:
    """Convert logits of the archive's head to those that the exported head must compute.

    Args:
        logits: ``[N, A]`` for N samples or steps and A attributes, or ``[N, A * K]`` for K bins.
        contract: scoring contract of the archive.
        head: the exported head.
        merge: whether the export merges the attributes into one reward.

    The check of an export compares the result with the logits of the exported folder.
    """
    readout = contract.output_readout
    if readout is not None and readout.is_linear:
        logits = readout.plain_rows(logits.T).T
    if merge:
        logits = logits @ torch.tensor(contract.attribute_weights)[:, None]
    if head.shift is not None:
        logits = logits + head.shift
    return F.pad(logits, (1, 0)) if head.is_pair else logits
