"""What a critic's client sends, how often, and how it reads the answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nemo_aligner.serving.client import RewardCriticClient
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.utils.errors import ConfigError, ServingError
from tests.harness.launching import free_port
from tests.serving.client.misbehaving import Answer, Die, Misbehaving, output, seconds

ROLLOUT = [np.ones((2, 3), dtype=np.int64), *np.zeros((3, 2, 2), dtype=np.float32)]


class MisbehavingCritic(Misbehaving):
    """Records paths and the shapes of inputs; ``said`` is the next answer, or what fails."""

    said: Answer | Die

    def _post(self, path: str, body: bytes, headers: Any) -> Answer:
        header = json.loads(body[: int(headers["Inference-Header-Content-Length"])])
        shapes = {each["name"]: each["shape"] for each in header["inputs"]}
        self.asked.append([path.split("/")[-2], shapes])
        if isinstance(self.said, Die):
            raise self.said
        return self.said


@pytest.fixture
def critic() -> Iterator[MisbehavingCritic]:
    server = MisbehavingCritic()
    server.come()
    yield server
    server.go()


def answer(*outputs: dict[str, Any]) -> Answer:
    return 200, {"outputs": list(outputs)}


def test_critic_client_cuts_values_to_each_sequence_and_splits_long_calls(
    critic: MisbehavingCritic,
) -> None:
    critic.limit = 2
    values = output("values", "FP32", [2, 3], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    critic.said = answer(values, output("rewards", "FP32", [2, 1], [7.0, 8.0]))
    with RewardCriticClient(critic.url) as client:
        found = client.infer([[1, 2, 3], [4], [5, 6], [7, 8, 9]])
    assert [row.tolist() for row in found.values] == [[0, 1, 2], [3], [0, 1], [3, 4, 5]]
    assert found.rewards is not None
    assert found.rewards.tolist() == [7, 8, 7, 8]
    assert [name for name, _ in critic.asked] == ["critic_infer"] * 2


def test_critic_client_sends_too_many_bytes_at_once_in_parts(critic: MisbehavingCritic) -> None:
    large = "got a request of 9 bytes, wanted at most 8 (server.max_request_bytes)"

    def post(path: str, body: bytes, headers: Any) -> Answer:
        header = json.loads(body[: int(headers["Inference-Header-Content-Length"])])
        rows, width = next(each["shape"] for each in header["inputs"] if each["name"] == "tokens")
        critic.asked.append(rows)
        if rows > 1:
            return 400, {"error": large}
        return answer(output("values", "FP32", [1, width], [float(width)] * width))

    critic._post = post  # type: ignore[method-assign]
    with RewardCriticClient(critic.url) as client:
        found = client.infer([[1, 2, 3], [4], [5, 6]])
    assert [row.tolist() for row in found.values] == [[3, 3, 3], [1], [2, 2]]
    assert sorted(critic.asked) == [1, 1, 1, 2, 3]


def test_critic_client_encodes_a_request_when_it_is_sent_and_fits_it_to_a_restarted_server(
    critic: MisbehavingCritic, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, encoded = kserve.encode_tokens, []
    monkeypatch.setattr(
        kserve, "encode_tokens", lambda rows: encoded.append(len(rows)) or encode(rows)
    )

    def post(path: str, body: bytes, headers: Any) -> Answer:
        header = json.loads(body[: int(headers["Inference-Header-Content-Length"])])
        rows, width = next(each["shape"] for each in header["inputs"] if each["name"] == "tokens")
        critic.asked.append([len(encoded), rows])
        if critic.limit < rows:
            raise Die
        return answer(output("values", "FP32", [rows, width], [1.0] * rows * width))

    critic._post = post  # type: ignore[method-assign]
    critic.limit = 4
    with RewardCriticClient(critic.url, max_connections=1) as client:
        client.infer([[1]] * 12)
        assert critic.asked == [[1, 4], [2, 4], [3, 4]]
        critic.limit = 3
        assert len(client.infer([[1, 2]] * 4).values) == 4
        assert [rows for _, rows in critic.asked[3:]] == [4, 3, 1]


def test_critic_client_sends_nothing_more_once_a_part_has_failed(
    critic: MisbehavingCritic,
) -> None:
    def post(path: str, body: bytes, headers: Any) -> Answer:
        header = json.loads(body[: int(headers["Inference-Header-Content-Length"])])
        _, width = next(entry["shape"] for entry in header["inputs"] if entry["name"] == "tokens")
        critic.asked.append(width)
        return (400, {"error": "no"}) if width == 1 else (503, {"error": "full; retry after 0.1 s"})

    critic._post = post  # type: ignore[method-assign]
    critic.limit = 1
    with RewardCriticClient(critic.url) as client:
        assert "no" in seconds(client.infer, [[1], [2, 3]])[1]
        while 2 not in critic.asked:  # the other part's request is on its way
            time.sleep(0.01)
        count = len(critic.asked)
        time.sleep(0.4)
    assert len(critic.asked) == count


def test_critic_client_asks_a_server_of_rewards_where_there_is_one(
    critic: MisbehavingCritic, lone: Misbehaving
) -> None:
    critic.said = answer(output("values", "FP32", [1, 2], [0.5, 1.5]))
    rewards = answer(output("rewards", "FP32", [1, 1], [7.0]))
    lone._post = lambda path, body, headers: rewards  # type: ignore[method-assign]
    with RewardCriticClient(critic.url, reward_url=lone.url) as client:
        found = client.infer([[5, 6]])
    assert found.rewards is not None
    assert (found.rewards.tolist(), [row.tolist() for row in found.values]) == ([7], [[0.5, 1.5]])


def test_critic_client_weighs_the_one_attribute_of_a_server_of_rewards(
    critic: MisbehavingCritic, lone: Misbehaving
) -> None:
    critic.said = answer(output("values", "FP32", [1, 1], [0.5]))
    lone.contract = replace(
        lone.contract, attributes=("harm",), attribute_weights=(-1.0,), label_means=(0.0,)
    )
    rewards = output("rewards", "FP32", [1, 1], [7.0])
    hashes = output("contract_hash", "BYTES", [1, 1], [lone.contract.hash])
    publish = lone._post

    def post(path: str, body: bytes, headers: Any) -> Answer:
        return publish(path, body, headers) if "/contract/" in path else answer(rewards, hashes)

    lone._post = post  # type: ignore[method-assign]
    with RewardCriticClient(critic.url, reward_url=lone.url) as client:
        found = client.infer([[5]]).rewards
    assert found is not None
    assert found.tolist() == [-7]


def test_critic_client_sends_once_what_changes_a_critic_though_its_answer_is_lost(
    critic: MisbehavingCritic,
) -> None:
    lost = [(status, {"error": "gone; retry after 0.1 s"}) for status in (502, 504)]
    for critic.said in (Die(), *lost):
        for verb, given in (("train", ROLLOUT), ("save", [])):
            critic.asked.clear()
            with RewardCriticClient(critic.url, retry_s=30) as client:
                took, error = seconds(getattr(client, verb), *given)
            assert "the request is not sent again" in error, critic.said
            assert took < 5
            assert [name for name, _ in critic.asked] == [f"critic_{verb}"]


def test_critic_client_sends_a_rollout_as_it_is_and_wants_its_answer(
    critic: MisbehavingCritic,
) -> None:
    critic.said = answer(output("loss_mean", "FP32", [1], [0.25]))
    with RewardCriticClient(critic.url) as client:
        assert client.train_future(*ROLLOUT).result(30) == 0.25
        half = [2, 2]
        shapes = {"tokens": [2, 3], "returns": half, "prev_values": half, "mask": half}
        assert critic.asked == [["critic_train", shapes]]
        critic.said = answer(output("other", "FP32", [1], [0.0]))
        with pytest.raises(ServingError, match="the answer has no values"):
            client.infer([[1]])
        with pytest.raises(ServingError, match="the answer has no loss_mean"):
            client.train(*ROLLOUT)


def test_critic_client_does_not_wait_for_a_server_of_other_models(
    critic: MisbehavingCritic,
) -> None:
    critic.not_ready = 404, {"error": "unknown model 'critic_save'. Models: reward_model"}
    with RewardCriticClient(critic.url, wait_s=20) as client:
        elapsed, error = seconds(client.save)
    assert elapsed < 5
    assert error == (
        f"{critic.url}, critic_save: unknown model 'critic_save'. Models: reward_model. Pass the "
        "URL of a server of critic_save"
    )


def test_critic_client_says_that_nobody_listens_or_a_url_is_none() -> None:
    with RewardCriticClient(f"http://127.0.0.1:{free_port()}") as client:
        _, error = seconds(client.save)
    assert "connection refused" in error
    with pytest.raises(ConfigError, match="wanted http://host:port"):
        RewardCriticClient("ftp://nobody")
    with pytest.raises(ConfigError, match="expect: got 'abc'"):
        RewardCriticClient(expect="abc")


def test_critic_client_does_not_send_what_is_no_rollout_or_list_of_tokens(
    critic: MisbehavingCritic,
) -> None:
    critic.limit = 1
    critic.said = answer(output("values", "FP32", [1, 1], [0.0]))
    with RewardCriticClient(critic.url) as client:
        assert client.infer([]).values == []
    assert critic.asked == []
    tokens, *others = ROLLOUT
    with RewardCriticClient(critic.url) as client:
        with pytest.raises(ServingError, match=r"tokens: got shape \[3\], wanted"):
            client.train(tokens[0], *others)
        with pytest.raises(ServingError, match=r"tokens: got float64, wanted .* \(integers\)"):
            client.train(tokens + 0.5, *others)
        ragged: Any = [[0.0, 1.0], [1.0]]
        with pytest.raises(ServingError, match="mask: got rows of different lengths"):
            client.train(tokens, *others[:2], ragged)
        for wrong in ([5, 6], ["text"], "text", 5, np.array([5, 6])):
            with pytest.raises(TypeError, match="wanted a list of lists of token ids"):
                client.infer(wrong)  # type: ignore[arg-type]
        with pytest.raises(ServingError, match=r"row 0: got \['a'\], wanted token ids"):
            client.infer([["a"]])  # type: ignore[list-item]
        assert critic.asked == []
        # Earlier rows may already be on their way.
        with pytest.raises(ServingError, match="row 1: it has no tokens"):
            client.infer([[1], []])
