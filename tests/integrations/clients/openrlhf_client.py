"""OpenRLHF's own remote reward function; a stand-in replaces the engine that generates."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from tests.integrations.clients.stand_ins import StandIns

Pair = tuple[str, str]


class Engine:
    """A fake engine that always generates the same reply."""

    def __init__(self, reply_ids: list[int]) -> None:
        self._reply_ids = reply_ids

    async def generate(self, prompt_ids: list[int], params: Any, multi_modal_data: Any) -> Any:
        output = SimpleNamespace(token_ids=self._reply_ids, finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[output])


def ask(
    package: Path, url: str, tokenizer_folder: Path, pairs: list[Pair], modules: StandIns
) -> list[dict[str, Any]]:
    """Run its executor on prompts and replies; return rewards and the texts that were sent."""
    modules.add("openrlhf.utils.logging_utils", init_logger=logging.getLogger)
    (path,) = package.rglob("openrlhf/utils/agent.py")
    agent = modules.load("openrlhf.utils.agent", path)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    executor = agent.SingleTurnAgentExecutor([url])

    async def execute(prompt: str, reply: str) -> dict[str, Any]:
        params = SimpleNamespace(max_tokens=64, logprobs=None)
        engine = Engine(tokenizer(reply, add_special_tokens=False)["input_ids"])
        said = await executor.execute(prompt, "a label", params, 512, tokenizer, engine)
        return {**said, "query": tokenizer.decode(said["observation_tokens"])}

    async def execute_all() -> list[dict[str, Any]]:
        return await asyncio.gather(*(execute(*pair) for pair in pairs))

    return asyncio.run(execute_all())
