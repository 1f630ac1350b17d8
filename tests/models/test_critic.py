"""A reward model as a critic: the value of a token is the reward of the text that ends with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import tiny


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("critic") / "rm.nemo"
    tiny.write_reward_nemo(path)
    return path


@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize(
    ("processes", "layouts"), [(1, ("one",)), (2, ("tp2", "tp2_sp", "pp2"))], ids=["one", "two"]
)
def test_a_value_is_the_reward_of_the_prefix(
    processes: int, layouts: tuple[str, ...], archive: Path, tmp_path: Path
) -> None:
    result = tmp_path / "values.pt"
    names = ",".join(layouts)
    tiny.run_script("tests/models/critic.py", str(archive), names, str(result), processes=processes)
    found = {}
    for rank in range(processes):
        found.update(torch.load(f"{result}.{rank}"))
    assert set(found) == set(layouts)
    for got in found.values():
        first, second = got["values"]
        # Every prefix of every sequence, laid out as the packed tokens are.
        rewards = got["rewards"]
        assert first.shape == rewards.shape == (5 + 21 + 1 + 12, 2)
        assert first.dtype is torch.float32
        assert rewards.std(0).min() > 0.1
        torch.testing.assert_close(first, rewards, rtol=0, atol=1e-5)
        # 20 tokens that both replies begin with are there once; the ends are the rewards.
        assert second.shape == (20 + 1 + 2, 2)
        torch.testing.assert_close(second[[20, 22]], got["with_prefix"], rtol=0, atol=1e-5)
