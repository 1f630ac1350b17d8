"""The router of a mixture-of-experts layer, which chooses each token's experts and their weights.

Its results are bit-identical for any number of tokens, and the expert with the lower number wins a
tie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd import Function

from nemo_aligner.models.layers import SequenceParallelRMSNorm, invariant_linear
from nemo_aligner.models.shapes.experts import ExpertShape

if TYPE_CHECKING:
    from nemo_aligner.models.pack_context import Balance

# Added to the sum of a token's sigmoid scores before scores are divided by it, as in DeepSeek-V3.
_LEAST_TOTAL = 1e-20
# Lower bound for the sum of the chosen experts' softmax scores, where a bias was added to the
# scores for the choice, as in ERNIE 4.5.
_LEAST_BIASED_TOTAL = 1e-12


class Router(torch.nn.Module):
    """Chooses each token's experts and their weights, in fp32.

    Its parameters have the model's dtype, except for ``weight`` if ``ExpertShape.has_fp32_router``.
    It is replicated on all ranks. Under sequence parallelism each rank routes only its own tokens,
    so its parameters are marked for Megatron to sum their gradients over the TP ranks.

    Attributes:
        aux_loss_coeff: factor of the load-balancing loss, ``E * sum(f_e * P_e)`` of a pack, with
            the fraction ``f_e`` of choices and the mean probability ``P_e`` of each of E experts
            (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6). The step's loss is the mean
            over all records, where each record has the loss of its pack. As in megatron-core, these
            are the choices that the scores alone would make, without bias and groups, and a token's
            sigmoid scores are divided by their sum to become its probabilities.
        expert_bias: ``[E]`` fp32, added to the scores for the choice of experts; a buffer, which is
            never trained. None without.
        norm: norm of the tokens, whose output is then divided by the root of the hidden size, as
            in Gemma 4; None without.
        expert_scale: ``[E]``, factors of the experts' weights, as in Gemma 4; None without.
        load: ``[E]`` int64, how often each expert was chosen on this rank in training since the
            last ``collect_load``.
    """

    aux_loss_coeff = 0.0
    expert_bias: Tensor | None
    norm: SequenceParallelRMSNorm | None

    def __init__(self, config: TransformerConfig, shape: ExpertShape) -> None:
        super().__init__()
        self._shape = shape
        # The process group of the ranks that split the tokens of one pack.
        self._group = parallel_state.get_context_parallel_group()
        self._part = 0  # index of this rank's part of the tokens under sequence parallelism
        if config.sequence_parallel:
            self._group = parallel_state.get_tensor_and_context_parallel_group()
            self._part = parallel_state.get_tensor_model_parallel_rank()
        self.load = torch.zeros(shape.count, dtype=torch.int64, device=torch.cuda.current_device())
        kind = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        of_weight = {**kind, "dtype": torch.float32} if shape.has_fp32_router else kind
        self.weight = torch.nn.Parameter(torch.empty(shape.count, config.hidden_size, **of_weight))
        self.register_parameter("shared_gate", None)
        if shape.shared_gate:
            self.shared_gate = torch.nn.Parameter(torch.empty(1, config.hidden_size, **kind))
        self.register_parameter("bias", None)
        if shape.router_bias:
            self.bias = torch.nn.Parameter(torch.empty(shape.count, **kind))
        self.register_module("norm", None)
        self.register_parameter("expert_scale", None)
        if shape.branch_norms:
            size, epsilon = config.hidden_size, config.layernorm_epsilon
            self.norm = SequenceParallelRMSNorm(config, size, epsilon, output_dtype=torch.float32)
            self.expert_scale = torch.nn.Parameter(torch.empty(shape.count, **kind))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        bias = None
        if shape.expert_bias:
            bias = torch.zeros(shape.count, dtype=torch.float32, device=torch.cuda.current_device())
        self.register_buffer("expert_bias", bias)

    def forward(
        self, tokens: Tensor, rows: int | None, balance: Balance | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose experts for ``tokens [T, hidden]``.

        Args:
            rows: rows of a batch invariant matmul; None computes all rows at once.
            balance: which tokens of the pack the router counts; needed in training.

        Returns:
            The chosen experts' numbers ``[T, k]`` int64, and their weights ``[T, k]`` in fp32. With
            a gated shared expert the weights are ``[T, k + 1]``, and the last one is that expert's
            factor.
        """
        wide = tokens.float() if self.norm is None else self.norm(tokens) * tokens.size(-1) ** -0.5
        logits = _multiply(wide, self.weight.float(), rows)
        if self.bias is not None:
            logits = logits + self.bias.float()
        scores = _sigmoid(logits) if self._shape.is_sigmoid else logits.softmax(-1)
        chosen = self._choose(scores.detach())
        # A layer that is recomputed runs first without gradients, and counts only when it runs
        # again.
        if self.training and torch.is_grad_enabled():
            assert balance is not None
            scores = self._add_balance_gradient(scores, chosen, balance)
        weights = self._weigh(scores.gather(-1, chosen))
        if self.expert_scale is not None:
            # Expand first: each element then gets a single gradient, so no sum has an undefined
            # order.
            weights = weights * self.expert_scale.float().expand_as(scores).gather(-1, chosen)
        if self.shared_gate is None:
            return chosen, weights
        factor = _sigmoid(_multiply(wide, self.shared_gate.float(), rows))
        return chosen, torch.cat([weights, factor], dim=1)

    def _choose(self, scores: Tensor) -> Tensor:
        """Choose each token's experts by ``scores [T, E]`` -> ``[T, k]`` int64, the best one first.

        The expert, or group, with the lower number wins a tie.
        """
        shape = self._shape
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if shape.num_groups > 1:
            by_group = scores.unflatten(-1, (shape.num_groups, -1))
            best = by_group.topk(2 if shape.is_sigmoid else 1, dim=-1).values.sum(-1)
            groups = _rank(best)[:, : shape.group_topk]
            is_excluded = torch.ones_like(best, dtype=torch.bool).scatter_(1, groups, False)
            scores = by_group.masked_fill(is_excluded[..., None], -torch.inf).flatten(1)
        return _rank(scores)[:, : shape.top_k].contiguous()

    def _weigh(self, scores: Tensor) -> Tensor:
        """Compute the weights of the chosen experts from their ``scores [T, k]``.

        In some models they are divided by their sum, or multiplied by a constant.
        """
        shape, weights = self._shape, scores
        if shape.renormalized:
            total, *lower_ranked = scores.unbind(-1)
            for score in lower_ranked:  # a loop, because it sums in the same order for any T
                total = total + score
            if shape.is_sigmoid:  # all scores of a token can be 0
                total = total + _LEAST_TOTAL
            elif shape.expert_bias:  # all chosen experts' scores can be 0
                total = total.clamp(min=_LEAST_BIASED_TOTAL)
            weights = scores / total[:, None]
        return weights if shape.scaling_factor == 1 else weights * shape.scaling_factor

    def _add_balance_gradient(self, scores: Tensor, chosen: Tensor, balance: Balance) -> Tensor:
        """Return ``scores [T, E]``, whose gradient will include that of the load-balancing loss.

        Also add to ``load`` how often each expert is in ``chosen [T, k]``, for real tokens only.
        """
        counted = min(max(0, balance.tokens - self._part * len(chosen)), len(chosen))
        counts = count_choices(chosen[:counted], self._shape.count)
        self.load += counts
        if not self.aux_loss_coeff:
            return scores
        if self.expert_bias is not None or self._shape.num_groups > 1:
            by_score = _rank(scores.detach()[:counted])[:, : self._shape.top_k]
            counts = count_choices(by_score, self._shape.count)
        # Append the number of tokens; a tensor of it would be a copy for which the host waits.
        counts = F.pad(counts, (0, 1), value=counted)
        if self._group.size() > 1:
            dist.all_reduce(counts, group=self._group)
        count, top_k = self._shape.count, self._shape.top_k
        factor = self.aux_loss_coeff * balance.losses_per_record * balance.records * count / top_k
        slope = counts[:-1] * (factor / counts[-1].clamp(min=1).float() ** 2)
        if self._shape.is_sigmoid:
            # Here ``slope`` is the loss's derivative with respect to the probabilities, which are
            # the scores divided by their sum. Convert it to the derivative with respect to the
            # scores.
            values = scores.detach()[:counted]
            total = values.sum(-1, keepdim=True) + _LEAST_TOTAL
            slope = (slope - (values / total * slope).sum(-1, keepdim=True)) / total
        return _WithSlope.apply(scores, slope, counted)


def _sigmoid(logits: Tensor) -> Tensor:
    """Compute the sigmoid as ``softmax((x, 0))``, which is bit-identical for any number of rows.

    torch's sigmoid on a CPU is not: it computes the last elements of a tensor in another way.
    """
    return F.pad(logits.unsqueeze(-1), (0, 1)).softmax(-1)[..., 0]


def _rank(scores: Tensor) -> Tensor:
    """Return the indices that sort each row of ``scores [T, N]``, the highest score first.

    The sort is stable: topk does not define which of two equal values comes first.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices


def count_choices(chosen: Tensor, count: int) -> Tensor:
    """Count how often each of ``count`` experts was ``chosen [T, k]`` -> ``[count]`` int64.

    ``bincount`` would make the host wait for the GPU, because it needs the largest number.
    """
    numbers = chosen.flatten()
    return numbers.new_zeros(count).scatter_add_(0, numbers, torch.ones_like(numbers))


class _WithSlope(Function):
    """Return ``scores [T, E]`` unchanged; the backward pass adds ``slope`` to their gradient.

    It adds to the first ``counted`` rows, which are real tokens rather than filler; ``slope`` is
    ``[counted, E]``, or ``[E]`` if it is the same for all tokens. This is the gradient of the
    load-balancing loss, computed without the loss.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, slope: Tensor, counted: int) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.counted = counted
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].clone()
        grad[: ctx.counted] += ctx.saved_tensors[0]
        return grad, None, None


def _multiply(input: Tensor, weight: Tensor, rows: int | None) -> Tensor:
    if rows is None:
        return F.linear(input, weight)
    return invariant_linear(input, weight, None, rows)
