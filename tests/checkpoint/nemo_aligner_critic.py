"""``nemo_aligner_critic.py GIVEN FOUND``: NeMo-Aligner's own critic, on given hidden states.

Runs in a process whose ``nemo_aligner`` is NVIDIA's. Of it this executes ``GPTRewardModel`` and
``RewardModelHead`` (gpt_reward_model.py), ``MegatronGPTRewardModel.infer`` and
``MegatronGPTCriticModel`` with ``get_loss_and_metrics`` and ``infer_rm_critic``, on megatron-core's
own schedules and ``RowParallelLinear``. NeMo, which does not install beside our torch, is replaced:
what a class only inherits or imports by nothing, what is called by the few lines below. So is the
decoder, by hidden states that were computed elsewhere, and CUDA by the CPU.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Context in which tensors for CUDA or pinned memory are created in plain memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


class Nothing:
    """Stands for a class or function of NeMo that is never called."""


class Decoder(nn.Module):
    """Replaces megatron-core's GPTModel: returns the given hidden states of a row of tokens."""

    states: dict[tuple[int, ...], Tensor]

    def __init__(self, config: Any, post_process: bool, **unused: Any) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config, self.post_process = config, post_process
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, tensor: Any) -> None:
        """Ignore the input; the first pipeline stage has none."""

    def forward(self, input_ids: Tensor, **unused: Any) -> Tensor:
        """Return the hidden states ``[S, B, D]`` of tokens ``[B, S]``."""
        return torch.stack([self.states[tuple(row)] for row in input_ids.tolist()], dim=1)


class MegatronGPTModel(nn.Module):
    """NeMo's base class, without training, loading and logging."""

    with_distributed_adam = use_mcore_dist_optim = False
    tokenizer = SimpleNamespace(eos_id=0)
    padded_vocab_size, spec_name, autocast_dtype = 1024, "", torch.float32

    def __init__(self, cfg: Any, trainer: Any) -> None:
        from megatron.core.transformer.transformer_config import TransformerConfig

        super().__init__()
        self.cfg = cfg
        self.transformer_config = TransformerConfig(
            num_layers=1,
            hidden_size=cfg.hidden_size,
            num_attention_heads=1,
            use_cpu_initialization=True,
        )
        self.model = self.model_provider_func(pre_process=True, post_process=True)

    def get_model_module_list(self) -> list[nn.Module]:
        return [self.model]

    def _make_data_iterator_list(self, data: Iterator[Any]) -> Iterator[Any]:
        return data


def split(batch: Any, parts: int) -> Iterator[Any]:
    """Replace NeMo's ``get_iterator_k_split``: split a list or a mapping into equal parts."""
    if isinstance(batch, dict):
        columns = [value.tensor_split(parts) for value in batch.values()]
        return iter([dict(zip(batch, rows, strict=True)) for rows in zip(*columns, strict=True)])
    return iter(list(zip(*[tensor.tensor_split(parts) for tensor in batch], strict=True)))


def masks_and_positions(tokens: Tensor, *unused: Any) -> tuple[Tensor, None, Tensor]:
    """Replace NeMo's ``get_ltor_masks_and_position_ids``, whose results the decoder ignores."""
    rows, width = tokens.shape
    positions = torch.arange(width).expand(rows, width)
    return torch.ones(rows, 1, width, width, dtype=torch.bool), None, positions


NEMO: dict[str, Any] = {
    "MegatronGPTModel": MegatronGPTModel,
    "AppState": lambda: SimpleNamespace(global_rank=0),
    "average_losses_across_data_parallel_group": lambda losses: torch.stack(losses).detach(),
    "get_iterator_k_split": split,
    "get_last_rank": lambda: 0,
    "get_ltor_masks_and_position_ids": masks_and_positions,
    "logging": logging.getLogger("nemo"),
    "get_specs": lambda *unused: None,
    "str_to_dtype": lambda dtype: dtype,
}


class Nemo(MetaPathFinder, Loader):
    """Imports every module ``nemo...``; its names are those in ``NEMO``, or ``Nothing``."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "nemo" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: Any = ModuleType(spec.name)
        module.__getattr__ = lambda name: NEMO.get(name) or type(name, (Nothing,), {})
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the module is empty."""


def run_case(critics: Any, cfg: dict[str, Any], head: dict[str, Tensor], inputs: Any) -> Any:
    """Compute rewards, values and the loss of one model with NeMo-Aligner's code."""
    model = critics.MegatronGPTCriticModel(OmegaConf.create({**inputs["cfg"], **cfg}), trainer=None)
    model.load_state_dict({f"model.{name}": tensor for name, tensor in head.items()})
    model.rm_state_dict_cpu = model.critic_state_dict_cpu = model.state_dict()
    model.prepare_for_training()
    loss, _ = model.get_loss_and_metrics(dict(inputs["batch"]), forward_only=False)
    with torch.no_grad():
        rewards, values = model.infer_rm_critic((inputs["batch"]["tokens"], inputs["lengths"]))
    return {"rewards": rewards, "values": values, "loss": loss}


def main(given_path: str, found_path: str) -> None:
    """Read the cases from one file, and write their results to the other."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models import gpt

    inputs = torch.load(given_path)
    gpt.GPTModel = Decoder
    sys.meta_path.insert(0, Nemo())
    torch.cuda.synchronize = lambda: None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    critics = importlib.import_module("nemo_aligner.models.nlp.gpt.megatron_gpt_critic")
    rows: Sequence[Any] = inputs["batch"]["tokens"].tolist()
    Decoder.states = {
        tuple(row): states for row, states in zip(rows, inputs["hidden"], strict=True)
    }
    with OnCpu():
        results = {
            name: run_case(critics, cfg, head, inputs)
            for name, (cfg, head) in inputs["cases"].items()
        }
    torch.save({"ran": critics.__file__, **results}, found_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
