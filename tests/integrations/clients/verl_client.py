"""verl's own reward loop; stand-ins replace what its file imports of ray and verl's trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from tests.integrations.clients.stand_ins import StandIns

_LOOP = "verl.experimental.reward_loop.reward_loop"
_PADDING = 2


class Sample:
    """One row of verl's DataProto, with the fields that the reward loop reads."""

    def __init__(self, prompt: list[dict[str, str]], reply_ids: list[int]) -> None:
        responses = torch.tensor([*reply_ids, *[0] * _PADDING])
        mask = torch.tensor([1] * (len(reply_ids) + 5) + [0] * _PADDING)  # the prompt has 5 tokens
        self.batch = {"responses": responses, "attention_mask": mask}
        self.non_tensor_batch = {"raw_prompt": prompt}

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Sample:
        return self


def ask(
    package: Path,
    address: str,
    tokenizer_folder: Path,
    chats: list[list[dict[str, str]]],
    modules: StandIns,
    engine: str,
) -> list[dict[str, Any]]:
    """Run its worker on conversations; return rewards and the texts that were sent.

    ``engine`` is the server that the worker takes ours for, ``vllm`` or ``sglang``.
    """
    _stand_in_for_verl(modules)
    loop = modules.load(_LOOP, package.joinpath(*_LOOP.split(".")).with_suffix(".py"))
    folder = str(tokenizer_folder)
    served = {"enable": True, "model_path": folder, "rollout": {"name": engine}}
    reward = {"reward_model": served, "custom_reward_function": {"path": None}}
    model = {"tokenizer_path": None, "path": folder}
    config = OmegaConf.create({"actor_rollout_ref": {"model": model}, "reward": reward})
    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def ask_all() -> list[dict[str, Any]]:
        worker = loop.RewardLoopWorker(config, address)
        found = []
        for chat in chats:
            reply_ids = tokenizer(chat[-1]["content"], add_special_tokens=False)["input_ids"]
            sample = Sample(chat[:-1], [*reply_ids, tokenizer.eos_token_id])
            text = await worker._preprocess_reward_inputs(sample)
            found.append({"text": text, **await worker.compute_score(sample)})
        return found

    return asyncio.run(ask_all())


def _stand_in_for_verl(modules: StandIns) -> None:
    modules.add("ray", remote=lambda cls: cls)
    modules.add("ray.actor", ActorHandle=object)
    modules.add("tensordict", TensorDict=dict)
    modules.add("verl.protocol", DataProto=Sample, pad_dataproto_to_divisor=None)
    modules.add("verl.single_controller.ray.base", RayResourcePool=object)
    modules.add(
        "verl.trainer.ppo.reward",
        load_reward_manager=lambda *given, **named: None,
        resolve_reward_manager_cls=None,
    )
    modules.add(
        "verl.utils",
        __path__=[],
        hf_tokenizer=lambda path, **named: AutoTokenizer.from_pretrained(path),
    )
    modules.add("verl.utils.fs", copy_to_local=lambda path: path)
    modules.add("verl.utils.ray_utils", get_event_loop=asyncio.get_event_loop)
    modules.add("verl.experimental.reward_loop.reward_model", RewardModelManager=None)
