"""A conversation with tools gets the same token ids through every protocol and integration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.formats import FORMATS
from nemo_aligner.data.texts import labelled_conversation, labelled_texts
from nemo_aligner.integrations.nemo_rl import RewardModelEnvironment
from nemo_aligner.integrations.trl import RewardFunction
from nemo_aligner.serving.client import ScoredRows
from nemo_aligner.serving.front.app import ROUTES
from nemo_aligner.serving.protocols import kserve
from tests.data.files import read, write
from tests.harness.contracts import Contracts
from tests.serving.protocols.bodies import parsed

TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city"}}
ARGUMENTS = '{"city": "Köln", "days": [1, 2.5, null]}'
FUNCTION = {"name": "weather", "arguments": ARGUMENTS}
CALLING = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}],
}
PROMPT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "is it raining"}]
RESULT = {"role": "tool", "tool_call_id": "1", "content": "dry"}
REPLY = {"role": "assistant", "content": "no", "tool_calls": None}
OTHER = {"role": "assistant", "content": "yes"}
CHAT = [*PROMPT, CALLING, RESULT, REPLY]
WHOLE = {"messages": CHAT, "tools": [TOOL]}
# The same conversation in the form of the Responses API.
ITEMS = [
    {"type": "function_call", "call_id": "1", "name": "weather", "arguments": ARGUMENTS},
    {"type": "function_call_output", "call_id": "1", "output": "dry"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "no"}]},
]
ASKED = {"input": PROMPT, "tools": [{"type": "function", **TOOL["function"]}]}  # type: ignore[dict-item]


class Asked:
    """A fake client that keeps the samples that it gets."""

    def __init__(self, contract: ScoringContract) -> None:
        self.contract = contract
        self.texts: list[Any] = []

    def score_rows(self, texts: Any) -> ScoredRows:
        self.texts += texts
        rewards = np.zeros((len(texts), 1), dtype=np.float32)
        return ScoredRows(rewards, {}, np.zeros(len(texts), dtype=bool), None)

    def close(self) -> None:
        pass


class AskedClient:
    """A fake ``RewardClient``, which also has a contract."""

    def __init__(self, asked: Asked) -> None:
        self.contract = lambda: asked.contract
        self.score_rows = asked.score_rows


def by_http() -> dict[str, Text]:
    bodies: dict[str, Any] = {
        "/v1/rewards": {"conversations": [WHOLE]},
        "/classify": WHOLE,
        "/pooling": WHOLE,
        "/verify": {"responses_create_params": ASKED, "response": {"output": ITEMS}},
    }
    routes = {route.path: route for route in ROUTES if not route.marks}
    found = {}
    for path, body in bodies.items():
        ((found[path]),) = routes[path].read(parsed(routes[path], body)).texts or ()
    return found


def by_trainers(contract: ScoringContract) -> dict[str, Text]:
    asked = Asked(contract)
    completion = [CALLING, RESULT, REPLY]
    RewardFunction(AskedClient(asked), None, "r")(
        [PROMPT], [completion], tools=[json.dumps([TOOL])]
    )  # type: ignore[arg-type]
    environment = RewardModelEnvironment({}, asked)
    environment.step([CHAT], [{"tools": [TOOL]}])
    environment.step([[REPLY]], [{"messages": CHAT[:-1], "tools": [TOOL]}])
    return dict(zip(("TRL", "NeMo RL, a log", "NeMo RL, messages"), asked.texts, strict=True))


def by_files(folder: Path) -> dict[str, Text]:
    pair = {"chosen": [CALLING, RESULT, REPLY], "rejected": [OTHER]}
    openai = {
        "input": {"messages": PROMPT, "tools": [TOOL]},
        "preferred_output": pair["chosen"],
        "non_preferred_output": pair["rejected"],
    }
    records = {
        "chat_pairs": {"prompt": PROMPT, **pair, "tools": json.dumps([TOOL])},
        "openai_preference": openai,
    }
    assert set(records) <= set(FORMATS)
    found: dict[str, Text] = {
        name: read(folder, record).records[0].texts[0] for name, record in records.items()
    }
    [(_, found["a file of score"])] = labelled_texts(write(folder / "asked.jsonl", WHOLE))
    _, found["score --conversation"] = labelled_conversation(json.dumps(WHOLE))
    return found


def test_conversation_with_tools_has_the_same_ids_by_every_door(
    contracts: Contracts, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    contract = contracts(template="chatml", seq_length=4096)
    texts = {**by_http(), **by_trainers(contract), **by_files(tmp_path)}
    wanted = contract.encode(tokenizer, WHOLE).token_ids  # type: ignore[arg-type]
    said = tokenizer.decode(wanted)
    assert json.dumps(TOOL) in said
    assert '{"city": "Köln", "days": [1, 2.5, null]}' in said
    wrong = {}
    for door, text in texts.items():
        # As our client sends it to a server.
        inputs = kserve.encode_conversations([text])  # type: ignore[list-item]
        (sent,) = kserve.decode_request(inputs).texts or ()
        for how, each in {"as it is": text, "sent on": sent}.items():
            ids = contract.encode(tokenizer, each).token_ids
            if ids != wanted:
                wrong[door, how] = tokenizer.decode(ids)
    assert not wrong, wrong
