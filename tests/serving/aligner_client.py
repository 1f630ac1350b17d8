"""NeMo-Aligner's own client, with stand-ins for what it imports of NeMo, asks a server.

``python aligner_client.py FOLDER`` with the folder of its unpacked source; this package, which has
the same name, is not loaded. The job on stdin has ``port`` and ``batches``, of which each has
tokens, lengths and ``pad_to_length``; what comes of them, in their order, is the last line.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from omegaconf import OmegaConf


def stand_in(name: str, **members: Any) -> None:
    """A module that is imported instead of the one with this name."""
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


def stand_in_for_nemo(source: Path) -> None:
    """One rank's world; packages of NeMo-Aligner lead to its files, past their ``__init__``."""
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


def main() -> None:
    stand_in_for_nemo(Path(sys.argv[1]))
    from nemo_aligner.models.nlp.gpt.reward_critic_clients import RemoteGPTRMClient

    job = json.load(sys.stdin)
    clients: dict[int | None, Any] = {}
    futures = []
    for batch in job["batches"]:
        pad = batch["pad_to_length"]
        if pad not in clients:
            server = {"name": "reward_model", "ip": "127.0.0.1", "port": job["port"]}
            clients[pad] = RemoteGPTRMClient(
                OmegaConf.create({"reward_model": server, "pad_to_length": pad})
            )
        # As generation gives them: a view of a larger buffer, not contiguous.
        tokens = torch.tensor(batch["tokens"])
        view = torch.nn.functional.pad(tokens, (0, 3))[:, : tokens.size(1)]
        rollout = {"response_tokens": view, "response_lengths": torch.tensor(batch["lengths"])}
        futures.append(clients[pad].infer_rm(rollout))
    found = [result_of(future) for future in reversed(futures)]
    print(json.dumps(found[::-1]))
    for client in clients.values():
        client.communicator.close()


def result_of(future: Any) -> dict[str, Any]:
    try:
        rewards = future.result()
    except Exception as error:
        return {"error": str(error)}
    return {"rewards": rewards.tolist(), "dtype": str(rewards.dtype)}


if __name__ == "__main__":
    main()
