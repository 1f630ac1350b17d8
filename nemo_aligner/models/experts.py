"""Mixture-of-experts (MoE) layers, in place of a decoder layer's MLP.

megatron-core's own MoE layer (0.16 to 0.19) allocates on CUDA, and a token's output depends on its
neighbours: an expert multiplies the rows of all tokens that chose it together. Here the router
(``router.py``) computes in fp32, tokens are sorted by expert but keep their order within an expert,
matmuls are those of ``layers.py``, and a token's expert outputs are added in the order in which the
router ranks the experts.

Expert parallelism splits the experts over data parallel ranks, which exchange tokens. Tensor
parallelism splits every expert. Its ranks sum their partial results only after a token's expert
outputs are combined into one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd import Function

from nemo_aligner.cpu.matmuls import add_weight_gradient, linear_on_cpu
from nemo_aligner.models.expert_rows import AddBiases, Exchange, RowCounts
from nemo_aligner.models.layers import free_weight, invariant_linear, rows_now, sum_partial
from nemo_aligner.models.pointwise.operations import EAGER, PointwiseKernels
from nemo_aligner.models.router import Router, count_choices
from nemo_aligner.models.shapes.experts import ExpertShape

if TYPE_CHECKING:
    from nemo_aligner.models.pack_context import Balance


class MixtureOfExperts(MegatronModule):
    """MoE layer ``[T, 1, hidden] -> [T, 1, hidden]``; sequence parallelism splits T over TP.

    Attributes:
        shape: the layer's experts; set on the class, because megatron-core's constructor call does
            not pass it.
        activation: class of the activation between an expert's two matmuls; also set on the class.
        invariant_rows: fixed number of rows of a matmul in evaluation mode; None means no fixed
            number.
        pointwise: the kernels that sum the outputs of a token's experts.
    """

    shape: ExpertShape
    activation: type[MegatronModule]
    invariant_rows: int | None = None
    pointwise: PointwiseKernels = EAGER

    def __init__(self, config: TransformerConfig, **unused: Any) -> None:
        super().__init__(config)
        self._group = parallel_state.get_tensor_model_parallel_group()
        self.router = Router(config, self.shape)
        sizes = self.shape.width, self.shape.count, self.shape.has_biases
        self.experts = ExpertMLP(config, self.activation, *sizes)
        self.shared_experts = None
        if self.shape.shared_width is not None:
            self.shared_experts = ExpertMLP(config, self.activation, self.shape.shared_width)

    def forward(
        self, hidden: Tensor, balance: Balance | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """Compute ``[T, 1, hidden] -> [T, 1, hidden]``; the second output, a bias, is always None.

        Args:
            balance: which rows are real tokens, for the router's load and its load-balancing loss;
                needed in training.
        """
        return self._compute(hidden.squeeze(1), rows_now(self), balance).unsqueeze(1), None

    def infer(self, hidden: Tensor) -> Tensor:
        """Compute ``[T, 1, hidden] -> [T, 1, hidden]`` without gradients.

        Matmuls run in chunks of ``invariant_rows`` rows, if that is set.
        """
        return self._compute(hidden.squeeze(1), self.invariant_rows, None).unsqueeze(1)

    def _compute(self, tokens: Tensor, rows: int | None, balance: Balance | None) -> Tensor:
        """Choose experts for the tokens and run them: ``[T, hidden] -> [T, hidden]``.

        Args:
            rows: fixed number of rows of a matmul; None means no fixed number.
            balance: which rows are real tokens, which the router counts; needed in training.
        """
        chosen, weights = self.router(tokens, rows, balance)
        tokens, weights = self._share(tokens), self._share(weights)
        total = self._run_experts(tokens, self._share(chosen), weights[:, : self.shape.top_k], rows)
        if self.shared_experts is not None:
            added = self.shared_experts(tokens, RowCounts(None, [len(tokens)]), rows)
            if self.shape.shared_gate:
                added = added * weights[:, -1:]
            total = total + added
        return self._sum(total.to(tokens.dtype), rows)

    def _share(self, tensor: Tensor) -> Tensor:
        """Return all rows of ``tensor``; gather them if sequence parallelism has split them.

        The backward pass sums gradients over the TP ranks, each of which has a part of every
        expert.
        """
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(tensor, group=self._group)
        if self._group.size() == 1 or not tensor.is_floating_point():
            return tensor
        return copy_to_tensor_model_parallel_region(tensor, group=self._group)

    def _sum(self, partial: Tensor, rows: int | None) -> Tensor:
        """Sum ``partial`` over the TP ranks; with sequence parallelism, keep this rank's rows."""
        return sum_partial(partial, self._group, self.config.sequence_parallel, rows)

    def _run_experts(
        self, tokens: Tensor, chosen: Tensor, weights: Tensor, rows: int | None
    ) -> Tensor:
        """Compute the weighted sum of each token's expert outputs, ``[T, hidden]``, in fp32.

        ``chosen [T, k]`` has the numbers of a token's experts, and ``weights [T, k]`` their
        weights.
        """
        by_expert = chosen.flatten().sort(stable=True).indices
        places = torch.empty_like(by_expert)
        places[by_expert] = torch.arange(len(places), device=places.device)
        places = places.view_as(chosen)
        counts = count_choices(chosen, self.shape.count)
        rows_of_experts = _Spread.apply(tokens, by_expert // self.shape.top_k, places)
        group = self.experts.group
        if group.size() == 1:
            outputs = self.experts(rows_of_experts, RowCounts(counts), rows)
            return self.pointwise.sum_outputs(outputs, weights, places)
        exchange = Exchange.of(counts, group)
        # Assign to the same name, so that the rows are freed once they have been sent.
        rows_of_experts = exchange.send(rows_of_experts)
        rows_of_experts = exchange.send_back(self.experts(rows_of_experts, exchange.counts, rows))
        return self.pointwise.sum_outputs(rows_of_experts, weights, places)


def routers(model: Any) -> dict[int, Router]:
    """Return the routers of this pipeline stage by the number of their layer, from 1."""
    layers = [layer for layer in model.decoder.layers if isinstance(layer.mlp, MixtureOfExperts)]
    return {layer.layer_number: layer.mlp.router for layer in layers}


def collect_load(model: Any, num_layers: int, num_experts: int) -> Tensor:
    """Sum the routers' ``load`` over all ranks, and reset it to 0; collective.

    Returns:
        ``[L, E]`` int64 on the CPU: how many tokens were sent to each expert since the last call; 0
        in layers without experts.

    Args:
        num_layers: L, the number of layers of the whole model.
        num_experts: E, the number of experts in a layer.
    """
    device = torch.cuda.current_device()
    total = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
    is_copy = parallel_state.get_tensor_model_parallel_rank() > 0
    for number, router in routers(model).items():
        if not is_copy or model.config.sequence_parallel:
            total[number - 1] = router.load
        router.load.zero_()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.cpu()


def describe_load(load: Tensor) -> dict[str, float]:
    """Compute the metrics of ``load [L, E]``, how often each expert of each layer was chosen.

    Layers without experts are skipped. So is the last layer, because only the tokens that the head
    reads go through its MLP; it counts only if no other layer has experts.

    Returns:
        ``expert_load_max``: the load of a layer's busiest expert over the layer's mean load, in the
        worst layer; ``expert_load_mean_max``: the same ratio averaged over the layers;
        ``experts_unused``: the fraction of experts that no token chose.
    """
    counted = load[:-1][load[:-1].any(1)].double()
    if len(counted) == 0:
        counted = load[-1:].double()
    busiest = counted.amax(1) / counted.mean(1).clamp(min=1e-9)
    return {
        "expert_load_max": float(busiest.max()),
        "expert_load_mean_max": float(busiest.mean()),
        "experts_unused": float((counted == 0).double().mean()),
    }


class ExpertMLP(MegatronModule):
    """MLPs of experts, ``[N, hidden] -> [N, hidden]``; with TP the result is a partial sum.

    Args:
        width: ffn channels of each expert.
        count: experts of the layer, which expert parallelism splits over the ranks; None is the
            shared expert, which every rank has.
        has_biases: both linear layers have biases.

    Attributes:
        group: process group of the expert parallel ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        activation: type[MegatronModule],
        width: int,
        count: int | None = None,
        has_biases: bool = False,
    ) -> None:
        super().__init__(config)
        self.group = parallel_state.get_expert_model_parallel_group()
        hidden = config.hidden_size
        size = (2, width, hidden) if config.gated_linear_unit else (width, hidden)
        self.linear_fc1 = ExpertLinear(config, size, count, len(size) - 1, has_bias=has_biases)
        self.activation_func = activation(config=config)
        self.linear_fc2 = ExpertLinear(config, (hidden, width), count, has_bias=has_biases)
        if getattr(config, "frees_expert_weights", False):
            free_weight(self.linear_fc1)
            free_weight(self.linear_fc2)

    def forward(self, inputs: Tensor, counts: RowCounts, rows: int | None) -> Tensor:
        """Compute the experts' MLPs of ``inputs [N, hidden]``, whose rows are sorted by expert."""
        inner = self.activation_func(self.linear_fc1(inputs, counts, rows))
        return self.linear_fc2(inner, counts, rows)


class ExpertLinear(torch.nn.Module):
    """One matrix for each expert of this rank, ``weight [experts, ..., in]``.

    Args:
        size: unsharded size of one expert's matrix.
        count: experts of the layer, which expert parallelism splits; None is the shared expert.
        axis: the axis of ``weight`` that TP splits, by default the axis of the ffn channels.
        has_bias: each expert also has a bias of its outputs.

    Attributes:
        bias: ``[experts, ...]``; None if there is none. Where TP splits the inputs, the outputs are
            partial sums, and every rank has the whole bias.
        first: number of this rank's first expert.
        adapter: LoRA's adapter, whose output is added; None without LoRA.
    """

    adapter: Any

    def __init__(
        self,
        config: TransformerConfig,
        size: tuple[int, ...],
        count: int | None = None,
        axis: int = 2,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        group = parallel_state.get_tensor_model_parallel_group()
        expert_group = parallel_state.get_expert_model_parallel_group()
        local_count = 1 if count is None else count // expert_group.size()
        shape = [local_count, *size]
        shape[axis] //= group.size()
        kind = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.empty(shape, **kind))
        set_tensor_model_parallel_attributes(self.weight, True, axis, 1)
        # Megatron keeps gradients and optimizer states of parameters with ``allreduce=False`` in
        # separate buffers, which are reduced over the ranks that have the same experts. The mark is
        # set even without expert parallelism, so that a run can be resumed with expert parallelism.
        self.weight.allreduce = count is None  # type: ignore[attr-defined]
        self._is_shared = count is None
        self.group, self._expert_group, self.axis = group, expert_group, axis
        self.size, self.first = size, 0 if count is None else local_count * expert_group.rank()
        self.register_module("adapter", None)
        self.register_parameter("bias", None)
        if has_bias:
            self.bias = torch.nn.Parameter(torch.empty(shape[:-1], **kind))
            if self.splits_outputs:
                set_tensor_model_parallel_attributes(self.bias, True, axis, 1)
            self.bias.allreduce = self.weight.allreduce  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor, counts: RowCounts, rows: int | None) -> Tensor:
        """Multiply each row by its expert's matrix, ``[N, in] -> [N, out]``.

        The rows are sorted by expert, and ``counts`` has the number of each expert's rows.
        """
        product = self._multiply(inputs, counts, rows)
        if self.bias is not None:
            # Only the first of the ranks with partial sums adds the bias. All compute its gradient.
            is_added = self.splits_outputs or self.group.rank() == 0
            product = AddBiases.apply(product, self.bias.flatten(1), counts, is_added)
        return product if self.adapter is None else product + self.adapter(inputs, counts, rows)

    @property
    def splits_outputs(self) -> bool:
        return self.axis < len(self.size)

    def take_part(self, full: Tensor) -> Tensor:
        """Cut this rank's experts, and its TP shard of each, out of ``full [count, *size]``."""
        local = full[self.first : self.first + len(self.weight)]
        return local.chunk(self.group.size(), self.axis)[self.group.rank()]

    def gather(self) -> Tensor:
        """Gather the full weights of this rank's experts from the TP ranks; collective."""
        parts = [torch.empty_like(self.weight) for _ in range(self.group.size())]
        dist.all_gather(parts, self.weight.detach().contiguous(), group=self.group)
        return torch.cat(parts, self.axis)

    def _multiply(self, inputs: Tensor, counts: RowCounts, rows: int | None) -> Tensor:
        if rows is None:
            return _GroupedMatmul.apply(inputs, self.weight, counts)
        inputs_of_experts = inputs.split(counts.on_host())
        outputs = [
            invariant_linear(rows_of_expert, matrix.flatten(0, -2), None, rows)
            for rows_of_expert, matrix in zip(inputs_of_experts, self.weight, strict=True)
            if len(rows_of_expert)
        ]
        if not outputs:
            return _GroupedMatmul.apply(inputs, self.weight, counts)
        return torch.cat(outputs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        prepended, key = len(sharded_offsets), f"{prefix}weight"
        offsets = [(prepended + self.axis, self.group.rank(), self.group.size())]
        copies = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if not self._is_shared:
            offsets.append((prepended, self._expert_group.rank(), self._expert_group.size()))
            copies = parallel_state.get_expert_data_parallel_group()
        entry = ShardedTensor.from_rank_offsets(
            key,
            self.weight,
            *sharded_offsets,
            *offsets,
            replica_id=(0, 0, copies.rank()),
            prepend_axis_num=prepended,
        )
        entries = {key: entry}
        if self.bias is not None:
            # Copies of a bias on several TP ranks differ in the second number of ``replica_id``.
            tp_copy = 0 if self.splits_outputs else self.group.rank()
            entries[f"{prefix}bias"] = ShardedTensor.from_rank_offsets(
                f"{prefix}bias",
                self.bias,
                *sharded_offsets,
                *offsets[0 if self.splits_outputs else 1 :],
                replica_id=(0, tp_copy, copies.rank()),
                prepend_axis_num=prepended,
            )
        return entries | self._adapter_state_dict(prefix, sharded_offsets, metadata)

    def _adapter_state_dict(self, prefix: str, *arguments: Any) -> dict[str, Any]:
        if self.adapter is None:
            return {}
        return self.adapter.sharded_state_dict(f"{prefix}adapter.", *arguments)


class _GroupedMatmul(Function):
    """Autograd function that multiplies each row of ``inputs [N, in]`` by its expert's matrix.

    The backward pass adds the weight's gradient to its ``main_grad``, if Megatron's wrapper made
    one.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, counts: RowCounts) -> Tensor:
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None)
        # Keep the weight as an attribute: hooks on saved tensors would return an alias without
        # Megatron's attributes.
        ctx.weight, ctx.counts = weight, counts
        return _multiply_by_expert(inputs, weight.flatten(1, -2).mT, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,), (inputs,), weight = grads, ctx.saved_tensors, ctx.weight
        to_given = to_weight = None
        if ctx.needs_input_grad[0]:
            to_given = _multiply_by_expert(grad, weight.flatten(1, -2), ctx.counts)
        if ctx.needs_input_grad[1]:
            main = getattr(weight, "main_grad", None)
            summed = torch.zeros_like(weight) if main is None else main
            _add_gradients(summed.flatten(1, -2), inputs, grad, ctx.counts)
            if main is None:
                to_weight = summed
            else:
                # Megatron's hooks require a gradient, but do not read its values. An expanded
                # scalar takes no memory.
                weight.grad_added_to_main_grad = True
                weight.grad = weight.new_empty(()).expand_as(weight)
        return to_given, to_weight, None


def _multiply_by_expert(rows: Tensor, matrices: Tensor, counts: RowCounts) -> Tensor:
    """Multiply each expert's rows of ``[N, i]`` by its matrix in ``[E, i, o]`` -> ``[N, o]``."""
    ends = counts.group_ends(rows, matrices)
    if ends is not None:
        return F.grouped_mm(rows, matrices, offs=ends)
    outputs = rows.new_empty(rows.size(0), matrices.size(2))
    multiply = linear_on_cpu if rows.is_cpu else F.linear
    for rows_of_expert, matrix, output in _split_by_expert(counts, rows, matrices, outputs):
        output.copy_(multiply(rows_of_expert, matrix.t()))
    return outputs


def _add_gradients(to: Tensor, inputs: Tensor, grad: Tensor, counts: RowCounts) -> None:
    """Add the weight gradients of all experts to ``to [E, o, i]``.

    An expert's gradient is ``grad.T @ inputs``, with its rows of ``grad [N, o]`` and ``inputs [N,
    i]``.
    """
    if len(inputs) == 0:
        # CUDA's grouped matmul rejects a sum over no rows (pytorch/pytorch#192497).
        return
    ends = counts.group_ends(inputs, to)
    if ends is not None:
        gradients = F.grouped_mm(grad.mT, inputs, offs=ends)
        # For an expert without rows the gradient is zero on Hopper, but uninitialised memory on
        # Blackwell (pytorch/pytorch#172439).
        has_rows = ends.diff(prepend=ends.new_zeros(1)) > 0
        to.add_(gradients.masked_fill_(~has_rows[:, None, None], 0))
        return
    for rows_of_expert, grad_of_expert, sum_of_expert in _split_by_expert(counts, inputs, grad, to):
        add_weight_gradient(sum_of_expert, rows_of_expert, grad_of_expert)


def _split_by_expert(counts: RowCounts, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield each expert's part of ``tensors``, which are matrices ``[E, o, i]`` or rows ``[N, c]``.

    Experts without rows are skipped.
    """
    rows = counts.on_host()
    parts = [tensor.unbind() if tensor.dim() == 3 else tensor.split(rows) for tensor in tensors]
    for parts_of_expert, count in zip(zip(*parts, strict=True), rows, strict=True):
        if count:
            yield parts_of_expert


class _Spread(Function):
    """Copy tokens ``[T, c]`` to the rows ``[T * k, c]`` of their experts.

    ``sources [T * k]`` is the token of each row, and ``places [T, k]`` are the rows of each token.
    This class replaces torch's indexing, whose backward pass sums in an undefined order on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return tokens[sources]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,), (grad,) = ctx.saved_tensors, grads
        # An embedding bag sums given rows of a table, in the order of ``places`` and in fp32.
        return F.embedding_bag(places, grad, mode="sum"), None, None
