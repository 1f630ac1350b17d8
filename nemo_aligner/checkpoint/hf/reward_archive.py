"""A reward model's archive in Hugging Face's terms, for exports: tensors, head and contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import EMBEDDING, HEAD_PREFIX, LAYERS, PREFIX
from nemo_aligner.checkpoint.hf.families import family_of
from nemo_aligner.checkpoint.hf.families.base import (
    HF_HEAD,
    ModelFamily,
    Rule,
    add_zero_groups,
    remove_zero_groups,
)
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
from nemo_aligner.checkpoint.weights.store import TensorStore
from nemo_aligner.config.common import Aggregate
from nemo_aligner.config.dtypes import format_of
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import SIGMOID
from nemo_aligner.models.lora import fold_into_weight
from nemo_aligner.models.shape import LORA_A, LORA_B, LoraShape, ModelShape, is_of_adapter
from nemo_aligner.utils.errors import CheckpointError, shown

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
        # Groups of zeros are for tensor parallelism here; an export has the model's own.
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
        rules = model_rules(family, config, has_output_layer=False)
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
        # Rows past the vocabulary are padding.
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
        return fold_into_weight(data, low, high, self.lora.scale)

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
        # Out and back: so the archive's rewards in the check have the export's rounding.
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


# The head, in the form that it is written in.


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        dtype: None keeps the stored one.
        merge: merge the attributes into one reward.
        head: form of the head (``HeadOut.of``); None is its own.
    """

    dtype: torch.dtype | None = None
    merge: bool = False
    head: str | None = None
    max_shard_bytes: int = 5 * 10**9
    base_license: str = "unknown"


@dataclass(frozen=True)
class HeadOut:
    """A head in Hugging Face's terms.

    Attributes:
        tensors: fp32, by their names in the folder.
        form: name of a layout, or ``score.bias``.
        means: ``[A]``, the label means that its outputs still lack.
        shift: ``[A]``, what its outputs are more than the archive's; None: nothing.
        is_pair: before its only output there is one that is always 0.
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
    ) -> HeadOut:
        """Put a head (by our names) into a form; None is its own.

        ``score`` has no place for a bias, as transformers' class has none: it joins the means.
        ``score.bias`` and ``v_head.summary`` have one, which the means join. The two layers of
        ``Qwen2ForRewardModel`` have biases, of zeros if need be.

        Args:
            means: label means ``[A]``.
            are_rewards: its outputs are rewards, of which a bias may be left out as a constant.
        """
        own = TWO_LAYERS.last if "hidden.weight" in head else LINEAR.last
        form = own if form is None else form
        _check_form(form, own, head, are_rewards=are_rewards)
        bias = head.get("bias")
        if form == LINEAR.last:
            if bias is None:
                return cls({HF_HEAD: head["weight"]}, form, list(means))
            more = torch.tensor(means, dtype=torch.float64) + bias.double()
            return cls({HF_HEAD: head["weight"]}, form, more.tolist(), -bias)
        whole, shift = _with_biases(head), None
        if are_rewards and form != TWO_LAYERS.last:
            shift = torch.tensor(means, dtype=torch.float32)
            whole["bias"] = whole["bias"] + shift
            means = [0.0] * len(means)
        return cls(_named(whole, form), form, list(means), shift)

    @classmethod
    def of_steps(
        cls,
        head: Mapping[str, Tensor],
        form: str | None,
        means: Sequence[float],
        *,
        are_rewards: bool,
    ) -> HeadOut:
        """Put a head that reads steps into its only form, which has biases; see ``of``.

        One reward becomes two outputs, 0 and the reward, as readers of such models take two: the
        softmax of them is ``1 - sigmoid(reward)`` and ``sigmoid(reward)``.
        """
        own = _form_with_biases(head, form, "steps")
        whole, rows = _with_biases(head), head["weight"].size(0)
        shift, is_pair = None, are_rewards and rows == 1
        if are_rewards:
            shift = torch.tensor(means, dtype=torch.float32)
            whole["bias"] = whole["bias"] + shift
            means = [0.0] * rows
        if is_pair:
            whole["weight"] = F.pad(whole["weight"], (0, 0, 1, 0))
            whole["bias"] = F.pad(whole["bias"], (1, 0))
        return cls(_named(whole, own), own, list(means), shift, is_pair)


def _form_with_biases(head: Mapping[str, Tensor], form: str | None, read: str) -> str:
    """The only form of a head by what is ``read``, as steps, if ``form`` asks for no other."""
    own = TWO_LAYERS.last if "hidden.weight" in head else SCORE_WITH_BIAS
    if form not in (None, own):
        raise CheckpointError(f"head: got {shown(form)} for a head of {read}, wanted {own}")
    return own


def _with_biases(head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A head with zeros for the biases that it lacks."""
    zeros = {
        name.replace("weight", "bias"): tensor.new_zeros(tensor.size(0))
        for name, tensor in head.items()
        if name.endswith("weight")
    }
    return {**zeros, **head}


def _named(head: Mapping[str, Tensor], form: str) -> dict[str, Tensor]:
    """A head by the names of a form."""
    layouts = {TWO_LAYERS.last: TWO_LAYERS, VALUE_LAYER.last: VALUE_LAYER}
    names = layouts.get(form, LINEAR).names()
    return {names[ours]: tensor for ours, tensor in head.items()}


def _check_form(form: str, own: str, head: Mapping[str, Tensor], *, are_rewards: bool) -> None:
    """Refuse a form that a head, which has the form ``own`` by itself, does not fit into."""
    fitting = [TWO_LAYERS.last] if own == TWO_LAYERS.last else [*LINEAR_FORMS]
    if form not in fitting:
        layers = "two layers" if own == TWO_LAYERS.last else "one matrix"
        raise CheckpointError(
            f"head: got {shown(form)} for a head of {layers}, wanted {' or '.join(fitting)}"
        )
    outputs = head["weight"].size(0)
    if form == VALUE_LAYER.last and outputs != 1:
        raise CheckpointError(
            f"head: got {form} for {outputs} outputs, wanted one: a value head has no more "
            "(--merge makes one of several attributes)"
        )
    if form == LINEAR.last and "bias" in head and not are_rewards:
        raise CheckpointError(
            f"head: got {form} for bins with a bias, wanted {SCORE_WITH_BIAS}: transformers' class "
            "has no bias, and that of a bin is no constant of the reward"
        )


def head_of(
    archive: RewardArchive, contract: ScoringContract, options: ExportOptions
) -> tuple[HeadOut, ScoringContract]:
    """The head to write, and the contract that goes with it: of rewards, with attributes merged."""
    stored = _read_head(archive, contract, merge=options.merge)
    exported = contract
    if options.dtype is not None:
        exported = exported.with_dtype(format_of(options.dtype).precision)
    readout = contract.output_readout
    if readout is not None and readout.is_linear:
        exported = exported.with_readout(None)
    if options.merge:
        exported = _merged_contract(exported)
    exported_readout = exported.output_readout
    are_rewards, form = exported_readout is None, options.head
    if contract.has_steps and exported_readout is not None and exported_readout.kind == SIGMOID:
        are_rewards = True  # its readers take the softmax of two outputs, which is the probability
    if contract.reply_marker is not None:
        form = _form_with_biases(stored, form, "means")
    put = HeadOut.of_steps if contract.has_steps else HeadOut.of
    head = put(stored, form, exported.label_means, are_rewards=are_rewards)
    if contract.has_steps and head.form == TWO_LAYERS.last:
        _check_step_layers(archive, head, exported)
    return head, exported.with_label_means(head.means)


def _read_head(
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
    if merge and contract.aggregation not in (Aggregate.last, Aggregate.mean):
        raise CheckpointError(
            f"merge: got rewards of steps whose {contract.aggregate} is the reward of a text, and "
            "it is another one of weighted sums. Export the attributes apart, without merge"
        )
    if merge:
        weights = torch.tensor(contract.attribute_weights)[None]
        head |= {name: weights @ head[name] for name in parts}
    return head


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


def _check_step_layers(archive: RewardArchive, head: HeadOut, exported: ScoringContract) -> None:
    """Refuse two layers that do not fit into the only class that reads steps with them."""
    found = archive.family.to_hf(archive.config)["model_type"]
    sizes = [head.tensors[f"{layer}.weight"].size(0) for layer in ("score.0", "score.2")]
    wanted = [archive.config["hidden_size"], 2]
    if found != "qwen2" or sizes != wanted or len(exported.attributes) > 1:
        raise CheckpointError(
            f"head: got two layers of {sizes[0]} units and {sizes[1]} outputs on a {found}, wanted "
            f"{wanted[0]} units and one reward (or {wanted[1]} bins) on a qwen2: no other model "
            "with two layers is read at its steps (a head of one matrix is, on any)"
        )


def as_exported(logits: Tensor, contract: ScoringContract, head: HeadOut, *, merge: bool) -> Tensor:
    """Logits of the exported head, ``[N, A]`` or of bins ``[N, A * K]``, from the archive's."""
    readout = contract.output_readout
    if readout is not None and readout.is_linear:
        logits = readout.plain_rows(logits.T).T
    if merge:
        logits = logits @ torch.tensor(contract.attribute_weights)[:, None]
    if head.shift is not None:
        logits = logits + head.shift
    return F.pad(logits, (1, 0)) if head.is_pair else logits
