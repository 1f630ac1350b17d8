"""FusedAdam with TransformerEngine's state: steps by group, moments by parameter."""

from typing import Any

import torch
from torch import Tensor


def multi_tensor_applier(op: Any, noop: Tensor, lists: list[list[Tensor]], *args: Any) -> Any:
    assert noop.dtype is torch.int32
    assert noop.is_cuda
    return op(2048 * 32, noop, lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop: Tensor, lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, None]:
    return torch.stack([tensor.norm() for tensor in lists[0]]).norm().reshape(1), None


def multi_tensor_scale(
    chunk_size: int, noop: Tensor, lists: list[list[Tensor]], scale: float
) -> None:
    for source, to in zip(*lists, strict=True):
        to.copy_(source * scale)


class FusedSGD(torch.optim.SGD): ...


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas}
        super().__init__(params, {**defaults, "eps": eps, "weight_decay": weight_decay})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Create the moments anew on the parameters' devices, as TransformerEngine does."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = {
                    name: torch.empty_like(parameter, dtype=torch.float32).copy_(value.float())
                    for name, value in state_dict["state"][number].items()
                }

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], **self.state[parameter])

    def _update(self, parameter: Tensor, lr: float, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        for moment in (exp_avg, exp_avg_sq):
            assert moment.dtype is torch.float32
            assert moment.device == parameter.device
        exp_avg.lerp_(parameter.grad, 0.1)
        exp_avg_sq.lerp_(parameter.grad.square(), 0.01)
        parameter.add_(exp_avg / (exp_avg_sq.sqrt() + 1e-8), alpha=-lr)
