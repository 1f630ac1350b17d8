"""A critic over HTTP: with and without a reward model, training, killed, and restarted."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.data.rollout import Rollout
from nemo_aligner.serving.client import RewardCriticClient
from nemo_aligner.serving.protocols.critic import DEFAULT_URL
from nemo_aligner.utils.errors import ServingError
from tests.docs.pages import blocks
from tests.harness import tiny
from tests.harness.once import Once
from tests.paths.serving.test_aligner_client import run_client
from tests.paths.serving.test_attacks import attacks_on_tensors, check_survives
from tests.serving.servers import SERVE, Server, running
from tests.training.critic_steps import ROWS, SETTINGS, WIDTH, make_rollout

SERVE_CRITIC = "examples/serve_ppo_critic.py"
ROLLOUT, NEXT = make_rollout(11), make_rollout(12)
LENGTHS = [WIDTH - row for row in range(ROWS)]
TEXTS = [row[:length].tolist() for row, length in zip(ROLLOUT.tokens, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def model(once: Once) -> Path:

    def build(folder: Path) -> None:
        tiny.write_hf_reward_model(folder / "hf", max_position_embeddings=64)
        convert_hf_to_nemo(folder / "hf", folder / "rm.nemo")

    return once("served_critic", build) / "rm.nemo"


def settings(model: Path, folder: Path, *more: str) -> list[str]:
    where = [
        f"pretrained_checkpoint.restore_from_path={model}",
        f"exp_manager.explicit_log_dir={folder / 'run'}",
        "server.port=0",
    ]
    return [*SETTINGS, *where, *more]


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of critic and reward model on two pipeline stages, which offloads the idle one."""
    folder = tmp_path_factory.mktemp("both")
    more = [
        "trainer.ppo.combine_rm_and_critic_server=true",
        "trainer.ppo.offload_idle_model=true",
        "model.offload_adam_states=true",
        "model.pipeline_model_parallel_size=2",
        f"server.max_request_bytes={ServerConfig().max_request_bytes}",  # not the critic's
    ]
    with running(folder, SERVE_CRITIC, *settings(model, folder, *more), ranks=2) as server:
        yield server
        assert server.stop() == [0, 0], server.output()[-3000:]
        server.assert_nothing_is_left()


def arrays(rollout: Rollout) -> list[np.ndarray]:
    return list(vars(rollout).values())


def rewards_and_values(client: RewardCriticClient) -> tuple[np.ndarray, np.ndarray]:
    """Return rewards ``[N]`` and values ``[N, WIDTH]``, 0 after the end of each sequence."""
    found = client.infer(TEXTS)
    assert found.rewards is not None
    assert [len(row) for row in found.values] == LENGTHS
    return found.rewards, np.stack([np.pad(v, (0, WIDTH - len(v))) for v in found.values])


def test_critic_survives_what_ends_others_and_says_how_it_is(both: Server) -> None:
    """A crash would lose what a critic has learned since its last save."""
    with RewardCriticClient(both.url) as client:
        for path in ("/v2/models/critic_infer/infer", "/v2/models/critic_train/infer"):
            check_survives(
                both,
                attacks_on_tensors(path),
                lambda: b"".join(array.tobytes() for array in rewards_and_values(client)),
            )
    for path, content in (("health", "ok"), ("ready", "ready"), ("metrics", 'backend="critic"')):
        with urllib.request.urlopen(f"{both.url}/{path}", timeout=30) as page:
            assert content in page.read().decode(), path


def test_one_server_for_both_has_the_numbers_of_two_also_after_training(
    model: Path, both: Server, once: Once, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("rewards", "critic")]
    for folder in folders:
        folder.mkdir()
    of_rewards = f"rm_model_file={model}", "server.port=0", "ensemble.k=2"
    with (
        running(folders[0], SERVE, *of_rewards) as rewards,
        running(folders[1], SERVE_CRITIC, *settings(model, folders[1])) as critic,
        RewardCriticClient(critic.url, reward_url=rewards.url) as two,
        RewardCriticClient(both.url) as one,
    ):
        # A setting without effect is reported first.
        assert "note: ensemble.k does nothing\n  with ensemble.files=[]" in rewards.output()
        assert "note: model.optim.sched.min_lr does nothing" in critic.output()
        of_two = rewards_and_values(two)
        for got, wanted in zip(rewards_and_values(one), of_two, strict=True):
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
        rollout = {
            "response_tokens": ROLLOUT.tokens.tolist(),
            "response_lengths": LENGTHS,
            "returns": ROLLOUT.returns.tolist(),
            "values": ROLLOUT.prev_values.tolist(),
            "mask": ROLLOUT.mask.tolist(),
        }
        by_aligner = run_client(once, tmp_path, both, rollout=rollout)
        loss = two.train(*arrays(ROLLOUT))
        after = rewards_and_values(two)
        np.testing.assert_allclose(rewards_and_values(one)[1], after[1], rtol=0, atol=1e-5)
    assert np.abs(after[1] - of_two[1]).max() > 0.01
    np.testing.assert_allclose(by_aligner["loss_mean"], [loss], rtol=1e-5)
    for name, wanted in (("combined", of_two), ("apart", of_two), ("after", after)):
        got = by_aligner[name]
        assert got["dtype"] == "torch.float32"
        np.testing.assert_allclose(got["rewards"], of_two[0], rtol=0, atol=1e-5)
        # NeMo-Aligner's client drops the last value.
        np.testing.assert_allclose(got["values"], wanted[1][:, :-1], rtol=0, atol=1e-5)
    check_memory(both)


def check_memory(server: Server) -> None:
    """Check the memory table at the start: offloading frees bytes on the device, and undoes it."""
    lines = server.output().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Memory of rank 0"))
    rows = [line.rsplit(maxsplit=2) for line in lines[start + 1 : start + 6]]
    device = {name.strip(): float(mib.replace(",", "")) for name, mib, _ in rows}
    assert list(device) == ["before", "scoring", "values", "training", "values again"]
    assert device["before"] > device["training"] > device["values"] == device["values again"]
    assert device["scoring"] == device["values"]
    # Weights, gradients and two moments in fp32, and the weights of the reward model.
    np.testing.assert_allclose(device["before"] / device["values"], 5, rtol=0.1)


@pytest.mark.smoke
def test_what_cannot_be_learned_from_is_refused_and_changes_nothing(both: Server) -> None:
    tokens, returns, prev_values, mask = arrays(ROLLOUT)
    bad_returns = returns.copy()
    bad_returns[0, 3] = np.nan
    wrong = {
        r"returns: got shape \[7, 18\], wanted \[7, 19\]": (returns[:, 1:], mask),
        r"returns, row 0: got a number that is not finite at position 3": (bad_returns, mask),
        r"mask: got only zeros in rows 0 to 3": (returns, 0 * mask),
        r"returns: got shape \[7, 19, 1\]|unexpected shape": (returns[..., None], mask),
    }
    with RewardCriticClient(both.url) as client:
        before = rewards_and_values(client)
        for message, (some_returns, some_mask) in wrong.items():
            with pytest.raises(ServingError, match=message) as refusal:
                client.train(tokens, some_returns, prev_values, some_mask)
            assert refusal.value.status == 400  # type: ignore[attr-defined]
        with pytest.raises(ServingError, match="gradient norm of inf; the weights") as failure:
            client.train(tokens, 1e30 * returns, prev_values, mask)
        assert failure.value.status == 500  # type: ignore[attr-defined]
        after = rewards_and_values(client)
    assert all(map(np.array_equal, before, after))


def test_the_page_runs_from_its_first_line_of_python_to_its_last(
    both: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    for block in blocks(tiny.ROOT / "docs" / "critic.md", "python"):
        exec(compile(block.replace(DEFAULT_URL, both.url), "critic.md", "exec"), names)
    names["client"].close()
    lengths, shape, loss = capsys.readouterr().out.splitlines()
    assert (lengths, shape) == ("[4, 2]", "(2,)")
    assert float(loss) == pytest.approx(0.005, rel=1e-3)


def test_a_server_that_is_killed_goes_on_from_what_was_saved(model: Path, tmp_path: Path) -> None:
    arguments = settings(model, tmp_path, "model.tensor_model_parallel_size=2")
    losses, values = [], []
    for number in (signal.SIGKILL, signal.SIGTERM):
        (tmp_path / "ready").unlink(missing_ok=True)
        with running(tmp_path, SERVE_CRITIC, *arguments, ranks=2) as server:
            with RewardCriticClient(server.url) as client:
                if number == signal.SIGKILL:
                    client.train(*arrays(ROLLOUT))
                    client.save()
                losses.append(client.train(*arrays(NEXT)))
                values.append(client.infer(TEXTS).values)
            codes = server.stop(number)
            server.assert_nothing_is_left()
            assert codes == [-number if number == signal.SIGKILL else 0] * 2
    assert losses[0] == losses[1]
    assert all(map(np.array_equal, *values))
