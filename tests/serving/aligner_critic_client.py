"""NeMo-Aligner's own RemoteGPTRMCriticClient, with stand-ins for what it imports of NeMo.

``python aligner_critic_client.py FOLDER`` as ``aligner_client.py``. The job on stdin has ``port``
and ``rollout``, with what a rollout of its PPO has. The last line is what comes of each of: values
and rewards with one server for both and with one for each, a step of training, a save, values.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aligner_client import stand_in_for_nemo
from omegaconf import OmegaConf


def stand_in_for_one_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = sys.modules["nemo_aligner.utils.parallel_state"]
    vars(state).update(get_data_parallel_src_rank=lambda: 0, get_data_parallel_group=lambda: None)
    distributed = sys.modules["nemo_aligner.utils.distributed"]
    vars(distributed)["gather_tensor"] = lambda tensor, dst, group, dtype: [tensor.to(dtype)]


def client(port: int, combined: bool, pad_to_length: int | None) -> Any:
    from nemo_aligner.models.nlp.gpt.reward_critic_clients import RemoteGPTRMCriticClient

    names = {"train": "critic_train", "infer": "critic_infer", "save": "critic_save"}
    server = {"ip": "127.0.0.1", "port": port}
    config = {
        "critic": {**server, "name": names},
        "reward_model": {**server, "name": "reward_model"},
        "combine_rm_and_critic_server": combined,
        "pad_to_length": pad_to_length,
    }
    return RemoteGPTRMCriticClient(OmegaConf.create(config))


def as_lists(future: Any) -> dict[str, Any]:
    rewards, values = future.result()
    return {"rewards": rewards.tolist(), "values": values.tolist(), "dtype": str(values.dtype)}


def main() -> None:
    stand_in_for_nemo(Path(sys.argv[1]))
    stand_in_for_one_rank()
    job = json.load(sys.stdin)
    rollout = {name: torch.tensor(rows) for name, rows in job["rollout"].items()}
    combined, apart = client(job["port"], True, None), client(job["port"], False, 40)
    try:
        print(json.dumps(ask(rollout, combined, apart)))
    finally:
        for each in (combined, apart):
            each.communicator.close()


def ask(rollout: dict[str, torch.Tensor], combined: Any, apart: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "combined": as_lists(combined.infer_rm_critic(rollout)),
        "apart": as_lists(apart.infer_rm_critic(rollout)),
    }
    found["loss_mean"] = combined.train(rollout).result()["loss_mean"].tolist()
    combined.save().result()
    found["after"] = as_lists(combined.infer_rm_critic(rollout))
    return found


if __name__ == "__main__":
    main()
