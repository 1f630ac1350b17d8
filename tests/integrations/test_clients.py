"""Other projects' own clients against a running server and its gateway."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from nemo_aligner.contract.scorer import score_all
from nemo_aligner.serving.engine.scorer import RewardScorer
from tests.harness import tiny
from tests.harness.environments import kept_environment, make_environment, package, vllm_python
from tests.harness.scorers import score_tokens
from tests.integrations.clients import openrlhf_client, verl_client
from tests.integrations.clients.stand_ins import StandIns

CLIENTS = Path(__file__).parent / "clients"
RECORDED = Path(__file__).parent / "recorded" / "vllm_classify.json"
CLOSE = {"rtol": 0, "atol": 1e-5}
RERANKERS = (
    "litellm==1.110.2",
    "cohere==6.1.0",  # the newest version that LlamaIndex accepts
    "openai==3.57.0",
    "llama-index-postprocessor-cohere-rerank==0.10.0",
    "llama-index-postprocessor-jinaai-rerank==0.6.0",
    "llama-index-postprocessor-tei-rerank==0.6.0",
)

CHATS = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in (
        ("what is the river", "thank you the river is blue"),
        ("who sings", "the bird sings in the tree"),
        ("why", "no"),
    )
]


def printed(python: str | Path, script: str, *arguments: Any) -> Any:
    """Return what a client's script prints last."""
    done = subprocess.run(
        [str(python), str(CLIENTS / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=tiny.environment(TOKENIZERS_PARALLELISM="false"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return StandIns(monkeypatch)


def test_openrlhf_s_executor(
    gateway: str, policy: Path, scorer: RewardScorer, modules: StandIns
) -> None:
    folder = package("openrlhf==0.11.2")
    pairs = [(chat[0]["content"], " " + chat[1]["content"]) for chat in CHATS]
    found = openrlhf_client.ask(folder, f"{gateway}/get_reward", policy, pairs, modules)
    assert [each["query"] for each in found] == ["".join(pair) for pair in pairs]
    rewards = score_all(scorer, [each["query"] for each in found])
    # One reply per request, so each answer is a list of one reward.
    sums = rewards.sum(axis=1, keepdims=True)
    np.testing.assert_allclose([each["reward"] for each in found], sums, **CLOSE)
    assert [each["scores"] for each in found] == [each["reward"] for each in found]
    logged = [each["extra_logs"]["reward_verbosity"] for each in found]
    np.testing.assert_allclose(logged, rewards[:, 1:], **CLOSE)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_verl_s_reward_loop(
    engine: str, gateway: str, policy: Path, scorer: RewardScorer, modules: StandIns
) -> None:
    folder = package("verl==0.9.1")
    found = verl_client.ask(folder, urlsplit(gateway).netloc, policy, CHATS, modules, engine)
    # It writes the reward model's template itself, and removes the BOS that vLLM would add.
    assert found[2]["text"] == "user\nwhy<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
    last = score_all(scorer, [each["text"] for each in found])[
        :, -1
    ]  # of several it takes the last
    np.testing.assert_allclose([each["reward_score"] for each in found], last, **CLOSE)


def test_a_step_of_trl_s_grpo_trainer(
    server: str, policy: Path, scorer: RewardScorer, trl_python: Path, tmp_path: Path
) -> None:
    step = printed(trl_python, "trl_step.py", policy, server, tmp_path)
    texts, rewards = step["texts"], step["rewards"]
    assert len(texts) == 4
    assert all(text[-1]["role"] == "assistant" for text in texts)
    np.testing.assert_allclose(rewards, score_all(scorer, texts)[:, 0], **CLOSE)
    assert np.std(rewards) > 1e-3
    assert step["log"]["rewards/helpful/mean"] == pytest.approx(np.mean(rewards), abs=1e-5)
    assert step["log"]["rewards/helpful/refused"] == 0
    assert step["moved"] > 1e-5


CASES: list[dict[str, Any]] = [
    {"input": "a rose"},
    {"input": ["a rose", "the river is blue"]},
    {"input": [5, 6, 7]},
    {"input": [[5, 6, 7], [8, 9]]},
    {"messages": CHATS[0]},
]


def rewards_of(case: dict[str, Any], scorer: RewardScorer) -> np.ndarray:
    if "messages" in case:
        return score_all(scorer, [case["messages"]])
    given = case["input"]
    if isinstance(given, str):
        return score_all(scorer, [given])
    if isinstance(given[0], int):
        return score_tokens(scorer, [given])
    return score_all(scorer, given) if isinstance(given[0], str) else score_tokens(scorer, given)


def test_vllm_s_objects_of_classify(gateway: str, scorer: RewardScorer) -> None:
    said = printed(vllm_python(), "vllm_classify.py", f"{gateway}/classify", json.dumps(CASES))
    for case, rewards in zip(CASES, said["rewards"], strict=True):
        np.testing.assert_allclose(rewards, rewards_of(case, scorer), **CLOSE)
    assert said["recorded"] == json.loads(RECORDED.read_text())


def test_what_vllm_s_objects_have_written(gateway: str, scorer: RewardScorer) -> None:
    """The same without vLLM, with recorded bodies and answers of vLLM 0.32."""
    recorded = json.loads(RECORDED.read_text())
    wanted = {name: set(fields) for name, fields in recorded["answer"].items()}
    for case, body in zip(CASES, recorded["bodies"], strict=True):
        request = urllib.request.Request(f"{gateway}/classify", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            read = json.load(answer)
        assert wanted["required"] <= set(read)
        for each in read["data"]:
            assert wanted["required_of_data"] <= set(each) <= wanted["known_of_data"]
        rewards = [each["probs"] for each in read["data"]]
        np.testing.assert_allclose(rewards, rewards_of(case, scorer), **CLOSE)


def posted(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_every_protocol_of_a_prompt_and_its_reply_gives_the_bits_of_score(gateway: str) -> None:
    """As slime, TEI's and SGLang's clients, and NeMo Gym post them."""
    for asked, said in CHATS:
        prompt, reply = asked["content"], said["content"]
        (whole,) = posted(f"{gateway}/score", {"text_1": prompt, "text_2": reply})["data"]
        output = [{"type": "message", "content": [{"type": "output_text", "text": reply}]}]
        output[0]["role"] = "assistant"
        bodies: dict[str, Any] = {
            "/remote_rm": {"prompt": [asked], "response": reply, "label": None},
            "/rerank": {"query": prompt, "texts": ["no", reply]},
            "/compare": {"conversation_history": [asked], "response_objs": [{"output": output}]},
        }
        found = {path: posted(gateway + path, body) for path, body in bodies.items()}
        (ranked,) = (rank for rank in found["/rerank"] if rank["index"] == 1)
        rewards = [found["/remote_rm"], ranked["score"], *found["/compare"]["rewards"]]
        assert rewards == [whole["score"]] * 3, prompt
        # Each attribute, for the conversation and for the raw text that its template writes.
        (row,) = posted(f"{gateway}/classify", {"messages": [asked, said]})["data"]
        predicted = posted(f"{gateway}/predict", {"inputs": [prompt, reply]})
        named = {each["label"]: each["score"] for each in predicted}
        assert [named["helpfulness"], named["verbosity"]] == row["probs"]
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>"
        (rest,) = posted(f"{gateway}/classify", {"text": [text]})
        (embedded,) = posted(f"{gateway}/v1/embeddings", {"model": "m", "input": text})["data"]
        assert rest["embedding"] == embedded["embedding"] == row["probs"]


@pytest.fixture(scope="module")
def rerank_python() -> Path:
    """A Python with the clients of reranking services."""

    def make(folder: Path) -> None:
        make_environment(folder, *RERANKERS)

    return kept_environment("rerankers", RERANKERS, make) / "bin" / "python"


def test_rerank_clients_get_the_rewards_of_score(gateway: str, rerank_python: Path) -> None:
    """LiteLLM requests TEI's scores from 0 to 1: the sigmoids of the rewards."""
    prompt, replies = CHATS[0][0]["content"], [chat[1]["content"] for chat in CHATS]
    pairs = posted(f"{gateway}/score", {"text_1": prompt, "text_2": replies})["data"]
    rewards = [pair["score"] for pair in pairs]
    assert len(set(rewards)) == len(replies)
    found = printed(rerank_python, "rerank_clients.py", gateway, prompt, *replies)
    assert found.pop("models") == ["reward_model"]
    sigmoids = (1 / (1 + np.exp(-np.array(rewards)))).tolist()
    assert found.pop("litellm huggingface") == pytest.approx(sigmoids, abs=1e-12)
    assert len(found) == 10
    assert {name: scores for name, scores in found.items() if scores != rewards} == {}


def test_sample_in_another_template_is_told_from_the_models(gateway: str) -> None:
    """With the template of a real server; also a sample that verl has cut before its first turn."""
    body = "user\nwhy<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
    llama = "<|start_header_id|>user<|end_header_id|>\n\nwhy<|eot_id|>"
    texts = [f"<|im_start|>{body}", body, f"{llama}no<|eot_id|>", f"<|im_start|>{body[:-12]}"]
    request = urllib.request.Request(f"{gateway}/classify", json.dumps({"input": texts}).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["X-Foreign-Template-Rows"] == "1, 2"
    with urllib.request.urlopen(f"{gateway}/metrics", timeout=60) as answer:
        counted = re.search(
            r'outcome="foreign_template",route="/classify"} (.+)', answer.read().decode()
        )
    assert counted is not None
    assert float(counted[1]) >= 2
