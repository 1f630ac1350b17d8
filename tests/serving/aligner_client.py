"""NeMo-Aligner's own clients query a server; stand-ins replace what they import from NeMo.

``python aligner_client.py FOLDER`` gets the folder of their unpacked source. Our package, which has
the same name, is not loaded. A job is read from stdin. For ``RemoteGPTRMClient`` it has ``port``
and ``batches`` with tokens, lengths and ``pad_to_length``; the last line of the output has their
answers in the same order. For ``RemoteGPTRMCriticClient`` it has a ``rollout`` of their PPO; the
last line has values and rewards from one server, the same from two servers, the result of a
training step, of a save, and values again.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf


def stand_in(name: str, **members: Any) -> None:
    """Register an empty module that is imported under this name."""
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


def stand_in_for_nemo(source: Path) -> None:
    """Stand in for NeMo with a world of one rank, and skip NeMo-Aligner's ``__init__`` files."""
    torch.cuda.current_device = lambda: "cpu"
    stand_in("nemo")
    stand_in("nemo.utils", logging=logging.getLogger("nemo"))
    for package in ("", ".servers", ".utils", ".models", ".models.nlp", ".models.nlp.gpt"):
        folder = source.joinpath("nemo_aligner", *package.split(".")[1:])
        stand_in(f"nemo_aligner{package}", __path__=[str(folder)])
    stand_in("nemo_aligner.utils.parallel_state")
    vars(sys.modules["nemo_aligner.utils"])["parallel_state"] = sys.modules[
        "nemo_aligner.utils.parallel_state"
    ]
    stand_in(
        "nemo_aligner.utils.distributed",
        broadcast_2d_tensor_within_mp=lambda tensor: tensor,
        gather_tensor=None,
        run_if_model_parallel_src=lambda send, *given, **named: send(*given, **named),
    )


def stand_in_for_one_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = sys.modules["nemo_aligner.utils.parallel_state"]
    vars(state).update(get_data_parallel_src_rank=lambda: 0, get_data_parallel_group=lambda: None)
    distributed = sys.modules["nemo_aligner.utils.distributed"]
    vars(distributed)["gather_tensor"] = lambda tensor, dst, group, dtype: [tensor.to(dtype)]


def make_client(kind: str, port: int, pad_to_length: int | None, **config: Any) -> Any:
    from nemo_aligner.models.nlp.gpt import reward_critic_clients

    server = {"ip": "127.0.0.1", "port": port}
    names = {"train": "critic_train", "infer": "critic_infer", "save": "critic_save"}
    config |= {
        "critic": {**server, "name": names},
        "reward_model": {**server, "name": "reward_model"},
        "pad_to_length": pad_to_length,
    }
    return getattr(reward_critic_clients, kind)(OmegaConf.create(config))


def ask_for_rewards(port: int, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pads = {batch["pad_to_length"] for batch in batches}
    clients = {pad: make_client("RemoteGPTRMClient", port, pad) for pad in pads}
    futures = []
    for batch in batches:
        # Like the output of generation: a view of a larger buffer, not contiguous.
        tokens = torch.tensor(batch["tokens"])
        view = torch.nn.functional.pad(tokens, (0, 3))[:, : tokens.size(1)]
        rollout = {"response_tokens": view, "response_lengths": torch.tensor(batch["lengths"])}
        futures.append(clients[batch["pad_to_length"]].infer_rm(rollout))
    found = [result_of(future) for future in reversed(futures)]
    for client in clients.values():
        client.communicator.close()
    return found[::-1]


def result_of(future: Any) -> dict[str, Any]:
    try:
        rewards = future.result()
    except Exception as error:
        return {"error": str(error)}
    return {"rewards": rewards.tolist(), "dtype": str(rewards.dtype)}


def ask_the_critic(port: int, rows: dict[str, Any]) -> dict[str, Any]:
    stand_in_for_one_rank()
    rollout = {name: torch.tensor(each) for name, each in rows.items()}
    combined, apart = (
        make_client("RemoteGPTRMCriticClient", port, pad, combine_rm_and_critic_server=is_one)
        for is_one, pad in ((True, None), (False, 40))
    )
    try:
        found: dict[str, Any] = {
            "combined": as_lists(combined.infer_rm_critic(rollout)),
            "apart": as_lists(apart.infer_rm_critic(rollout)),
        }
        found["loss_mean"] = combined.train(rollout).result()["loss_mean"].tolist()
        combined.save().result()
        return {**found, "after": as_lists(combined.infer_rm_critic(rollout))}
    finally:
        for each in (combined, apart):
            each.communicator.close()


def as_lists(future: Any) -> dict[str, Any]:
    rewards, values = future.result()
    return {"rewards": rewards.tolist(), "values": values.tolist(), "dtype": str(values.dtype)}


def main() -> None:
    stand_in_for_nemo(Path(sys.argv[1]))
    job = json.load(sys.stdin)
    is_critic = "rollout" in job
    found = (ask_the_critic if is_critic else ask_for_rewards)(*job.values())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
