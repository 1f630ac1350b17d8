"""The critic's service without a server or a model: requests share a lock and get own answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.load import load_config
from nemo_aligner.config.serving import ServeCriticConfig
from nemo_aligner.data.rollout import Rollout
from nemo_aligner.serving import critic
from nemo_aligner.serving.critic import SAVE, TRAIN, VALUES, CriticBackend, CriticService
from nemo_aligner.serving.engine.executor import RanksLostError
from nemo_aligner.serving.engine.pace import CallClock
from nemo_aligner.serving.engine.read_write_lock import ReadWriteLock
from nemo_aligner.serving.engine.running_calls import LongOperation
from nemo_aligner.serving.failures import FailureKind
from nemo_aligner.serving.front.app import Front
from nemo_aligner.serving.intake import Intake
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.serving.run import _check_same_encoding, run_critic_server
from nemo_aligner.training.critic import ValueStep
from nemo_aligner.utils.errors import CheckpointError, ConfigError, ServingError
from tests.serving.answers import Failure, answered
from tests.serving.fake_server import CONTRACT
from tests.serving.gateway_calls import call

WAIT_S = 30
ROLLOUT = {
    "tokens": np.ones((2, 3), dtype=np.int64),
    "returns": np.zeros((2, 2), dtype=np.float32),
    "prev_values": np.zeros((2, 2), dtype=np.float32),
    "mask": np.ones((2, 2), dtype=np.float32),
}
STEPS = [ValueStep(1, 0.5, 3, 1.0, 0.1, 0.0), ValueStep(2, 1.0, 1, None, 0.1, 0.0)]


class Ranks:
    """Records the operations for all ranks; the test answers them explicitly."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.clock = CallClock()
        self._answers: list[Future[Any]] = []
        self._came = threading.Condition()

    def submit(self, operation: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._came:
            self.calls.append((operation, arguments))
            self._answers.append(answer)
            self._came.notify_all()
        return answer

    def wait_for(self, count: int) -> list[str]:
        with self._came:
            assert self._came.wait_for(lambda: len(self.calls) >= count, WAIT_S), self.calls
        return [operation for operation, _ in self.calls]

    def begin(self, number: int) -> None:
        """Start call ``number``, so that it cannot be cancelled any more."""
        assert self._answers[number].set_running_or_notify_cancel()

    def finish(self, number: int, found: Any = None) -> None:
        """Answer a call: a token's value is the call's number plus an eighth per position."""
        operation, arguments = self.calls[number]
        if operation == VALUES:
            found = [number + np.arange(len(row.ids)) / 8 for row in arguments[0]]
        if isinstance(found, Exception):
            self._answers[number].set_exception(found)
        else:
            self._answers[number].set_result(found)


class Asked:
    """A service, and an event loop in which requests wait."""

    def __init__(self, *settings: str, tokens_per_call: int = 100) -> None:
        run: Any = SimpleNamespace(
            contract=CONTRACT,
            tokenizer=SimpleNamespace(vocab_size=1000),
            learner=SimpleNamespace(tokens_per_call=tokens_per_call, step=0),
            checkpoints=SimpleNamespace(folder="run", latest=lambda: None),
        )
        self.ranks: Any = Ranks()
        config = load_config(ServeCriticConfig, settings)
        self.service = CriticService(run, config, self.ranks, has_rewards=False)
        self.endpoints = {each.name: each for each in self.service.endpoints}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def ask(self, name: str, inputs: dict[str, np.ndarray]) -> Future[Any]:
        answering: Callable[..., Coroutine[Any, Any, Any]] = self.endpoints[name].answer
        return asyncio.run_coroutine_threadsafe(answered(answering(inputs)), self._loop)

    def infer(self, *lengths: int) -> Future[Any]:
        return self.ask("critic_infer", kserve.encode_tokens([[1] * each for each in lengths]))


def values(future: Future[Any]) -> list[list[float]]:
    found = future.result(WAIT_S)
    assert not isinstance(found, Failure), found
    return found["values"].tolist()


def test_critic_answers_a_request_whole_before_it_learns_and_what_comes_then_waits() -> None:
    asked = Asked(tokens_per_call=2)
    first = asked.infer(2, 2, 1)
    assert asked.ranks.wait_for(2) == [VALUES, VALUES]
    train = asked.ask("critic_train", ROLLOUT)
    save = asked.ask("critic_save", {})
    inputs = kserve.encode_tokens([[1, 2]])
    inputs["tokens"] = np.pad(inputs["tokens"], ((0, 0), (0, 2)))
    later = asked.ask("critic_infer", inputs)
    asked.ranks.finish(0)
    asked.ranks.finish(1)
    # Training that came after it begins only after its last row.
    assert asked.ranks.wait_for(3) == [VALUES] * 3
    asked.ranks.finish(2)
    assert values(first) == [[0.0, 0.125], [1.0, 1.125], [2.0, 0.0]]
    assert asked.ranks.wait_for(4)[3:] == [TRAIN]
    assert not later.done()
    asked.ranks.finish(3, STEPS)
    assert train.result(WAIT_S)["loss_mean"].tolist() == [(0.5 * 3 + 1.0) / 4]
    assert asked.ranks.wait_for(5)[4:] == [SAVE]
    asked.ranks.finish(4, "critic.nemo")
    assert save.result(WAIT_S)["status"].tolist() == [0]
    assert asked.ranks.wait_for(6)[5:] == [VALUES]
    asked.ranks.finish(5)
    # Padded to the width of its request.
    assert values(later) == [[5.0, 5.125, 0.0, 0.0]]
    assert later.result()["values"].dtype == np.float32


def test_critic_refuses_what_comes_while_it_trains_where_that_is_set() -> None:
    asked = Asked("trainer.ppo.infer_while_training=refuse")
    train = asked.ask("critic_train", ROLLOUT)
    assert asked.ranks.wait_for(1) == [TRAIN]
    refused = asked.infer(1).result(WAIT_S)
    assert refused == Failure("the critic is training; retry after 1 s", FailureKind.busy)
    asked.ranks.finish(0, STEPS)
    train.result(WAIT_S)
    answered = asked.infer(1)
    asked.ranks.wait_for(2)
    asked.ranks.finish(1)
    assert values(answered) == [[1.0]]


def test_critic_refuses_a_rollout_that_is_unfit_before_it_reaches_a_rank() -> None:
    bad, wide = FailureKind.bad_request, np.ones((2, 3), dtype=np.float32)
    unfit: dict[str, tuple[FailureKind, dict[str, np.ndarray]]] = {
        "critic_train: got no inputs, wanted tokens, returns, prev_values, mask": (bad, {}),
        "mask: got shape [2, 3], wanted [2, 2]": (bad, {**ROLLOUT, "mask": wide}),
        "tokens, row 0: got token id 5000, wanted 0 to 999": (
            bad,
            {**ROLLOUT, "tokens": np.full((2, 3), 5000)},
        ),
        "got a request of 31936032 bytes, wanted at most 1000000": (
            FailureKind.too_large,
            {name: np.zeros((999, 999)) for name in ROLLOUT},
        ),
    }
    asked = Asked("server.max_request_bytes=1000000")
    for message, (kind, inputs) in unfit.items():
        failure = asked.ask("critic_train", inputs).result(WAIT_S)
        assert failure.message.startswith(message)
        assert failure.kind is kind, message
    assert asked.ranks.calls == []


def test_critic_says_why_a_training_fails_and_begins_the_next_one() -> None:
    failed = Failure("the model failed: step 1: a loss", FailureKind.internal)
    lost = Failure("the server cannot continue: a rank died", FailureKind.busy)
    for error, said in (
        (ServingError("step 1: a loss"), failed),
        (RanksLostError("a rank died"), lost),
    ):
        asked = Asked()
        first, second = (asked.ask("critic_train", ROLLOUT) for _ in range(2))
        asked.ranks.wait_for(1)
        asked.ranks.finish(0, error)
        assert first.result(WAIT_S) == said
        asked.ranks.wait_for(2)
        asked.ranks.finish(1, STEPS)
        assert second.result(WAIT_S)["loss_mean"].size == 1


def test_values_that_nobody_waits_for_are_not_computed_and_training_goes_on() -> None:
    asked = Asked(tokens_per_call=2)
    train = asked.ask("critic_train", ROLLOUT)
    asked.ranks.wait_for(1)
    asked.ranks.begin(0)
    gone = asked.infer(*[1] * 64)
    save = asked.ask("critic_save", {})
    live = asked.infer(2)
    lock = asked.service._lock
    wait_until(lambda: len(lock._waiting) == 3)
    for cancelled in (gone, save, train):
        assert cancelled.cancel()
    wait_until(lambda: len(lock._waiting) == 1)
    # Started work is not abandoned, and values wait for its end.
    assert lock.is_exclusive
    asked.ranks.finish(0, STEPS)
    assert asked.ranks.wait_for(2) == [TRAIN, VALUES]
    asked.ranks.finish(1)
    assert values(live) == [[1.0, 1.125]]
    gone = asked.infer(*[1] * 64)
    asked.ranks.wait_for(4)
    asked.ranks.begin(2)
    save = asked.ask("critic_save", {})
    wait_until(lambda: lock.is_exclusive)
    assert gone.cancel()
    # Cancelled values release the critic, even while their call still runs.
    assert asked.ranks.wait_for(5)[2:] == [VALUES, VALUES, SAVE]
    asked.ranks.finish(2)
    asked.ranks.finish(4, "critic.nemo")
    assert save.result(WAIT_S)["status"].tolist() == [0]
    asked.service.stop()


def test_training_goes_on_and_saving_is_noted_though_their_senders_have_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = Asked()
    run: Any = asked.service._run
    train = asked.ask("critic_train", ROLLOUT)
    asked.ranks.wait_for(1)
    asked.ranks.begin(0)
    assert train.cancel()
    run.learner.step = 2
    asked.ranks.finish(0, STEPS)
    save = asked.ask("critic_save", {})
    asked.ranks.wait_for(2)
    asked.ranks.begin(1)
    assert save.cancel()
    # The server stops while saving goes on.
    stopping = threading.Thread(target=asked.service.stop)
    stopping.start()
    time.sleep(0.05)
    assert stopping.is_alive()
    asked.ranks.finish(1, "critic.nemo")
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    said = capsys.readouterr().out
    assert said == "saved critic.nemo and the state to resume from\n"


def test_training_whose_steps_cannot_be_logged_has_trained_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client would otherwise train on the same rollout again."""

    def train(rollout: Rollout, note_step: Callable[[ValueStep], object]) -> list[ValueStep]:
        for step in STEPS:
            note_step(step)
        return STEPS

    def log(metrics: dict[str, float], step: int) -> None:
        assert metrics["train/loss"] == STEPS[step - 1].loss
        raise CheckpointError(f"metrics.jsonl: the metrics of step {step} cannot be written")

    run: Any = SimpleNamespace(
        learner=SimpleNamespace(train=train), loggers=SimpleNamespace(log=log)
    )
    monkeypatch.setattr(critic, "_offload_groups", lambda *models: {})
    assert CriticBackend(run, ServeCriticConfig())._train(*ROLLOUT.values()) == STEPS
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1: loss 0.5, grad norm 1, ")
    assert lines[2].startswith("step 2: loss 1, grad norm skipped, fp16 overflowed, ")
    cause = "metrics.jsonl: the metrics of step {} cannot be written; training continues"
    assert lines[1::2] == [cause.format(1), cause.format(2)]


def test_critic_refuses_values_of_too_many_bytes_and_no_tokens_that_its_bytes_hold() -> None:
    asked = Asked("server.max_request_bytes=100")
    refused = asked.infer(7, 6).result(WAIT_S)
    assert refused == Failure(
        "got a request of 128 bytes, wanted at most 100 (server.max_request_bytes). Send fewer "
        "rows per request",
        FailureKind.too_large,
    )
    server = ServeCriticConfig().server
    num_bytes = np.dtype(np.int64).itemsize * server.max_request_tokens
    assert num_bytes == server.max_request_bytes == 2**28


def wait_until(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_turn_that_cannot_begin_ends_and_the_next_comes() -> None:
    lock, first, last = ReadWriteLock(), Future[str](), Future[str]()

    def refuse() -> Future[str]:
        raise ValueError("closed")

    failing = lock.submit(lambda: first, exclusive=True)
    refused = lock.submit(refuse, exclusive=True)
    next_one = lock.submit(lambda: last, exclusive=False)
    assert lock.is_exclusive
    first.set_exception(KeyError("a"))
    with pytest.raises(KeyError):
        failing.result(0)
    with pytest.raises(ValueError, match="closed"):
        refused.result(0)
    last.set_result("B")
    assert next_one.result(0) == "B"
    assert not lock.is_exclusive


def test_critic_offers_its_contract_and_says_at_its_end_what_was_never_saved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = Asked()
    names = ["critic_infer", "critic_train", "critic_save", "contract"]
    assert [*asked.endpoints] == names
    assert asked.endpoints["critic_train"].max_rows == 0
    run: Any = asked.service._run
    said = []
    for step, saved in [(0, 0), (1, 0), (2, 2), (5, 2)]:
        run.learner.step = step
        asked.service._saved_step = saved
        asked.service.stop()
        said.append(capsys.readouterr().out.strip())
    assert said == [
        "",
        "step 1 was never saved (critic_save); a restart begins at step 0",
        "",
        "steps 3 to 5 were never saved (critic_save); a restart continues from step 2",
    ]


def test_critic_may_train_and_save_for_any_time_and_says_what_is_lost_if_values_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Asked()
    run: Any = asked.service._run
    monkeypatch.setattr(critic, "_offload_groups", lambda *models: {})
    operations = CriticBackend(run, ServeCriticConfig()).operations
    names = {name for name, call in operations.items() if isinstance(call, LongOperation)}
    assert names == {TRAIN, SAVE}
    values_of_one = asked.infer(1)
    asked.ranks.wait_for(1)
    asked.ranks.begin(0)
    values_of_one.cancel()
    run.learner.step = 1
    stopping = threading.Thread(target=asked.service.stop, daemon=True)
    stopping.start()
    wait_until(lambda: "step 1 was never saved" in capsys.readouterr().out)
    assert stopping.is_alive()
    asked.ranks.finish(0)
    stopping.join(WAIT_S)
    assert not stopping.is_alive()


def test_critic_is_not_ready_while_its_values_or_its_encoding_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, server = Asked(), ServeCriticConfig().server
    service, delays = asked.service, ["the model may hang", None, None]
    asked.ranks.running = SimpleNamespace(find_delay=lambda: delays.pop(0))
    front = Front([], service.endpoints, server, None, service.statistics, [service.probe])
    state = {"status": "no backend answers", "backends": {"local": "the model may hang"}}
    assert call(front, "/ready").json == state
    assert call(front, "/v2/health/ready").status == 200
    monkeypatch.setattr(Intake, "problem", "16 earlier calls still hang")
    answer = call(front, "/ready")
    assert (answer.status, answer.json["backends"]) == (503, {"local": Intake.problem})


def test_critic_is_refused_a_reward_model_that_reads_other_tokens_and_no_checkpoint() -> None:
    ranking = replace(
        CONTRACT,
        attributes=("reward",),
        attribute_weights=(1.0,),
        label_means=(0.0,),
        reward_model_type="binary_ranking",
        dtype="bf16",
        scored_position="reply_mean",
        reply_marker=(1, 2),
    )
    _check_same_encoding("rm.nemo", ranking, CONTRACT)
    for change, words in (
        ({"template": "x"}, "template: '' -> 'x'"),
        ({"seq_length": 65}, "seq_length: 64 -> 65"),
        ({"add_eos": False}, "add_eos: True -> False"),
        ({"overlong": "drop"}, "overlong: 'truncate_left' -> 'drop'"),
        ({"tokenizer_fingerprint": "b"}, "tokenizer_fingerprint: 'ä' -> 'b'"),
        ({"trailing_pad_id": 5}, "trailing_pad_id: None -> 5"),
        ({"reward_token_id": 5}, "reward_token_id: None -> 5"),
        ({"template": "x", "principle_template": "{principle}"}, "principle_template: None -> "),
        ({"scored_position": "turns"}, "at every turn or step .*turns"),
    ):
        rewards = replace(CONTRACT, **change)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"^rm_model_file: rm\.nemo: .*{words}"):
            _check_same_encoding("rm.nemo", rewards, CONTRACT)
    with pytest.raises(ConfigError, match="restore_from_path: it is not set"):
        run_critic_server(ServeCriticConfig())
