"""Damaged bodies at every path of the gateway: the answer is rewards or a reason, never a 500."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("hypothesis")
from hypothesis import given

from nemo_aligner.config.common import Overlong
from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.text_encoder import TextEncoder
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.client.partial_requests import (
    Capacity,
    PartialRequest,
    encode_rows,
    requests_of_texts,
    requests_of_tokens,
)
from nemo_aligner.serving.client.reward import OnError, RowCollector
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.failures import FailureKind, RefusedError, failure_of
from nemo_aligner.serving.front.app import PLAIN_ROUTES, ROUTES, Front
from nemo_aligner.serving.front.models import HostedModel
from nemo_aligner.serving.protocols import ScoredRows, kserve
from nemo_aligner.serving.reward import RewardBackend
from nemo_aligner.serving.scoring import TemplateParts
from tests.harness.contracts import Contracts
from tests.harness.fuzzing import Faults, damaged, fuzz_settings
from tests.serving.fake_server import FakeScorer
from tests.serving.gateway_calls import call_async, gateway_front
from tests.serving.test_reward import Immediate

BODIES, IN_A_BATCH = 10_000, 20
USER, REPLY = (
    {"role": "user", "content": "is it raining"},
    {"role": "assistant", "content": "no\nit is not"},
)
FUNCTION = {
    "name": "weather",
    "description": "Of a city",
    "parameters": {"type": "object", "maximum": 3},
}
TOOL = {"type": "function", "function": FUNCTION}
CALLED = {"name": "weather", "arguments": '{"city": "Bonn", "days": [1, 2.5, null]}'}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": CALLED}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "dry"}]}
CHAT = [{"role": "system", "content": "be kind"}, USER, CALLING, RESULT, REPLY]
WHOLE = {"messages": CHAT, "tools": [TOOL], "documents": [{"title": "a", "text": "b"}]}
OUTPUT = [
    {"type": "reasoning", "summary": []},
    {"type": "function_call", "call_id": "1", **CALLED},
    {"type": "function_call_output", "call_id": "1", "output": "dry"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "no"}]},
]
ASKED = {"input": [USER], "instructions": "be kind", "tools": [{"type": "function", **FUNCTION}]}
ROLLOUT = {
    "reward": 0.5,
    "mask_sample": False,
    "_ng_task_index": 0,
    "_ng_rollout_index": 1,
    "tokens": 10,
}
RERANKED = {
    "model": "m",
    "query": "a",
    "documents": ["b", {"text": "c"}],
    "top_n": 1,
    "return_documents": True,
}
SCORED = [
    {"queries": "a", "documents": ["b", {"content": [{"type": "text", "text": "c"}]}]},
    {"text_1": ["a"], "text_2": ["b"], "truncate_prompt_tokens": None, "tools": [TOOL]},
]
SAMPLES: dict[str, list[Any]] = {
    "/v1/rewards": [
        {"texts": ["a rose", "b"], "outputs": True},
        {"conversations": [[USER, REPLY], WHOLE], "steps": True},
        {"tokens": [[1, 2, 3], [4]], "steps": False},
    ],
    "/get_reward": [{"query": ["a<|im_end|>", "b"], "prompts": ["a"], "labels": [None]}],
    "/remote_rm": [
        {"prompt": "a", "response": "b", "label": None},
        {"prompt": [USER], "response": "b", "label": "c"},
    ],
    "/classify": [
        {"model": "m", "input": ["a", "b"]},
        {"input": [[1, 2], [3]]},
        {"messages": CHAT, "tools": [TOOL]},
        {"text": ["a", "b"], "rid": ["1", "2"]},
        {"input_ids": [1, 2], "image_data": None},
    ],
    "/pooling": [
        {"input": [1, 2], "task": "classify", "dimensions": None},
        {**WHOLE, "priority": 0},
    ],
    "/v1/classify": [{"model": "m", "input": ["a", "b"]}, {"messages": CHAT, "tools": [TOOL]}],
    "/v1/embeddings": [
        {"model": "m", "input": "a"},
        {"input": [[1, 2], [3]], "encoding_format": "base64", "dimensions": None},
    ],
    "/score": SCORED,
    "/v1/score": SCORED,
    "/predict": [
        {"inputs": [["a"], ["b", "c"]], "truncate": False},
        {"inputs": "a", "raw_scores": True},
    ],
    "/rerank": [{"query": "a", "texts": ["b", "c"], "return_text": True}, RERANKED],
    "/v1/rerank": [RERANKED],
    "/v2/rerank": [RERANKED],
    "/verify": [
        {"responses_create_params": ASKED, "response": {"output": OUTPUT}, "_ng_task_index": 3},
        {"responses_create_params": {"input": "a"}, "response": {"output": [REPLY]}},
    ],
    "/compare": [
        {"conversation_history": [USER], "response_objs": [{"output": OUTPUT}, {"output": [REPLY]}]}
    ],
    "/seed_session": [{"resources_session_id": "s", "task_data": {"a": 1}}],
    "/close_session": [{"resources_session_id": None}],
    "/aggregate_metrics": [
        {"verify_responses": [ROLLOUT, {**ROLLOUT, "mask_sample": True, "passed": True}]}
    ],
}
MOST_BYTES = 100_000
FEW_ROWS = 3  # most rows of a request to the server, so that a body becomes several requests


class LastIdScorer(FakeScorer):
    """A scorer without a model: the reward is the last token id of a sample, or of each step."""

    def __init__(self, contract: ScoringContract, tokenizer: Tokenizer) -> None:
        super().__init__(0, 1)
        encoder = TextEncoder(contract, tokenizer)
        self.contract = contract
        self.encode, self.encode_tokens = encoder.encode, encoder.encode_tokens  # type: ignore[method-assign, assignment]
        self.count_reply_tokens = encoder.count_reply_tokens  # type: ignore[method-assign, assignment]

    def compute(self, rows: Sequence[Row]) -> list[np.ndarray]:
        return [row.ids[[*row.positions]].astype(np.float32).reshape(-1, 1) for row in rows]


class Engine:
    """A client and its server in this process, complete except for the model and the sockets.

    ``front`` is the front of that server, without the client.
    """

    def __init__(self, contract: ScoringContract, tokenizer: Tokenizer) -> None:
        scorer: Any = LastIdScorer(contract, tokenizer)
        config = ServerConfig(max_request_bytes=MOST_BYTES)
        ranks: Any = Immediate(scorer.compute)
        self._turn_end = TurnEnd.of(contract.chat_template(tokenizer), tokenizer)
        self._sample_frame = SampleFrame.of(contract, tokenizer)
        parts = TemplateParts(self._turn_end, self._sample_frame)
        service = RewardBackend(scorer, config, template_parts=parts).start(ranks)
        self._contract = contract
        self._endpoint = service.endpoints[1]
        self.front = Front(
            [HostedModel(service, service.endpoints)],
            service.endpoints,
            config,
            None,
            service.statistics,
        )
        self.fingerprint = service.fingerprint
        self.faults: list[str] = []

    async def capacity(self) -> Capacity:
        return Capacity(FEW_ROWS, 1)

    async def scores_jointly(self) -> bool | None:
        return False

    async def infer(
        self, part: PartialRequest, marks: Collection[str] = (), prefix: bytes | None = None
    ) -> ScoredRows:
        inputs = encode_rows(part)
        try:
            outputs = await self._endpoint.answer(inputs)
        except Exception as error:
            failure = failure_of(error)
            if failure.kind is FailureKind.internal:
                self.faults.append(failure.message)
            said = failure.message.encode().decode()  # a message must be valid UTF-8
            raise RefusedError("engine", failure.kind.status, said) from error
        return kserve.decode_rewards(outputs)

    async def score_rows_async(
        self, texts: Sequence[Text], *, on_error: OnError = "nan", is_probe: bool = False
    ) -> ScoredRows:
        return await self._collect(len(texts), requests_of_texts(texts), on_error)

    async def score_token_rows_async(
        self,
        token_lists: Sequence[Sequence[int]],
        *,
        on_error: OnError = "nan",
        is_probe: bool = False,
    ) -> ScoredRows:
        requests = requests_of_tokens(token_lists)
        return await self._collect(len(token_lists), requests, on_error)

    async def _collect(
        self, total: int, requests: list[PartialRequest], on_error: OnError
    ) -> ScoredRows:
        collector = RowCollector(self, on_error)  # type: ignore[arg-type]
        return await collector.collect(total, requests, 1)

    async def contract_async(self) -> ScoringContract:
        return self._contract

    async def turn_end_async(self) -> TurnEnd | None:
        return self._turn_end

    async def sample_frame_async(self) -> SampleFrame | None:
        return self._sample_frame


def as_bytes(body: Any, number: int) -> tuple[bytes, dict[str, str]]:
    """Draw a body and its headers: compressed, with a byte order mark, or truncated."""
    content, headers = json.dumps(body).encode(), {}
    if number % 10 == 3:
        content, headers = gzip.compress(content, 1), {"Content-Encoding": "gzip"}
    elif number % 10 == 7:
        content = b"\xef\xbb\xbf" + content
    return content[: len(content) - (number % 40 in (3, 7))], headers


def test_damaged_body_at_any_path_gets_an_answer_and_never_a_500(
    contracts: Contracts, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    assert set(SAMPLES) == {each.path for each in (*ROUTES, *PLAIN_ROUTES)} - {"/reverify_mode"}
    contract = contracts(template="chatml", seq_length=64, overlong=Overlong.truncate_left)
    stepped = replace(contract, scored_position="step_ends", step_separator="\n")
    engines = [Engine(each, tokenizer) for each in (contract, stepped)]
    apps = [gateway_front(engine, max_request_bytes=MOST_BYTES) for engine in engines]
    apps += [engine.front for engine in engines]
    statuses: Counter[tuple[str, int]] = Counter()
    faults = Faults()
    loop = asyncio.new_event_loop()

    @fuzz_settings(BODIES // IN_A_BATCH)
    @given(damaged(SAMPLES, IN_A_BATCH))
    def send_batch(batch: list[tuple[str, Any]]) -> None:
        for number, (path, body) in enumerate(batch):
            content, headers = as_bytes(body, faults.tries)
            with faults.noting((path, body)):
                answer = loop.run_until_complete(
                    call_async(apps[number % 4], path, content, headers)
                )
                statuses[path, answer.status] += 1
                assert answer.status in (200, 400, 413), answer.body
                assert isinstance(answer.json, dict | list | float)
                assert [engine.faults for engine in engines] == [[], []]

    with caplog.at_level(logging.ERROR):
        send_batch()
    loop.close()
    faults.check()
    assert not caplog.records
    assert faults.tries == BODIES
    assert min(statuses[path, status] for path in SAMPLES for status in (200, 400)) > 5
