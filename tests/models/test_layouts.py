"""Families, a critic and pipeline messages on two ranks, against one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_aligner.config.common import Precision
from tests.harness import families, tiny
from tests.models import layouts
from tests.models.layouts import IN_BF16, LAYOUTS


# Before there is a layout: the reward model is made in one of its own.
@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of all archives, and what two ranks found of them, in one launch.

    ``weights`` are those of both ranks, by the layout and the archive.
    """
    folder = tmp_path_factory.mktemp("layouts")
    reward_model = tiny.write_reward_nemo(folder / "rm.nemo")
    paths = [families.write_base_nemo(folder / f"{case}.nemo", case) for case in layouts.CASES]
    script = "tests/models/layouts.py"
    files = [str(path) for path in (folder, reward_model, *paths)]
    tiny.run_script(script, *files, processes=2, timeout=900)
    ranks = [torch.load(folder / f"rank{rank}") for rank in (0, 1)]
    found = {**ranks[1], **ranks[0]}
    found["weights"] = {
        name: layouts.whole_weights([of_rank["weights"][name] for of_rank in ranks])
        for name in found["weights"]
    }
    return folder, found


@pytest.fixture
def alone(there: Any, layout: Any) -> Any:
    """The layout of this process, made after what is to be found at others."""
    return layout


@pytest.mark.parametrize("case", layouts.CASES)
def test_family_at_every_layout_scores_and_trains_alike(case: str, there: Any, alone: Any) -> None:
    """Rewards, gradient norm, and every weight after a step, against one process.

    In bf16 rewards are bit-identical between pipeline stages; tensor parallel products are summed
    in another order, and are compared with the same experts chosen. Some layouts have not all cases
    (``ATTENTIONS`` in layouts.py).
    """
    folder, found = there
    path = folder / f"{case}.nemo"
    wanted, parts = layouts.step_with_weights(path, alone)
    weights = layouts.whole_weights([parts])
    assert wanted["after"] != pytest.approx(wanted["before"], abs=1e-3)
    names = [name for name in LAYOUTS if case in found["families"][name]]
    one = {"tp": 1, "ep": 1, "cp": 1, "pp": 1, "ring": False, "sequence_parallel": False}
    sizes = {name: SimpleNamespace(**{**one, **layout}) for name, layout in LAYOUTS.items()}
    fitting = [name for name in LAYOUTS if layouts.is_split_by(sizes[name], case)]
    assert names == fitting
    for name in names:
        got = found["families"][name][case]
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5), name
        # Gemma 4's scores, which are not scaled, enlarge differences of the weights.
        for when, near in (("before", 1e-5), ("after", 2e-5)):
            size = max(map(abs, wanted[when]))
            assert got[when] == pytest.approx(wanted[when], abs=near * size), (name, when)
        trained = found["weights"][name, case]
        assert trained.keys() == weights.keys()
        for key, tensor in trained.items():
            where = f"{name}: {key}"
            if "embedding" in key:  # padded for two ranks
                tensor = tensor[: len(weights[key])]
            torch.testing.assert_close(tensor, weights[key], rtol=0, atol=1e-6, msg=where)
    model = layouts.load(path, alone, Precision.bf16)
    for name, near in zip(IN_BF16, (0.05, 0.0), strict=True):
        if name not in names:
            continue
        got = found["families"][name][case]
        with layouts.replayed_choices(model, got["choices"]):
            in_bf16 = layouts.rewards(model, alone)
        size = max(map(abs, in_bf16))
        assert got["bf16"] == pytest.approx(in_bf16, abs=near * size, rel=0), name


@pytest.mark.parametrize("case", layouts.LORA_CASES)
def test_lora_at_layouts_trains_alike(case: str, there: Any, alone: Any) -> None:
    """The gradients of all adapters, and what two steps make of the rewards."""
    folder, found = there
    wanted = layouts.lora_steps(folder / f"{case}.nemo", alone)
    at_layouts = {name: found["lora"][name].get(case) for name in layouts.LORA_LAYOUTS}
    without_experts = [] if case in layouts.MIXTURES else ["EP=2"]
    of_one_stage = ["PP=2"] if case in layouts.OF_ONE_STAGE else []
    missing = {name for name, got in at_layouts.items() if got is None}
    assert missing == {*without_experts, *of_one_stage}
    for name in at_layouts.keys() - missing:
        for key, near in (("grad_norms", 1e-5), ("after", 2e-5)):
            size = max(map(abs, wanted[key]))
            assert at_layouts[name][key] == pytest.approx(wanted[key], abs=near * size), (name, key)


def test_critic_at_every_layout_values_a_token_as_the_text_that_ends_with_it(
    there: Any, alone: Any
) -> None:
    folder, found = there
    at_all = {name: found[name] for name in LAYOUTS if "EP" not in name} | {
        "one": layouts.critic(folder / "rm.nemo", alone)
    }
    for name, got in at_all.items():
        first, second = got["values"]
        # Every prefix of every sequence, laid out as the packed tokens are.
        rewards = got["rewards"]
        assert first.shape == rewards.shape == (5 + 21 + 1 + 12, 2), name
        assert first.dtype is torch.float32
        assert rewards.std(0).min() > 0.1
        torch.testing.assert_close(first, rewards, rtol=0, atol=1e-5, msg=name)
        # 20 tokens that both replies begin with are there once; the ends are the rewards.
        assert second.shape == (20 + 1 + 2, 2)
        torch.testing.assert_close(second[[20, 22]], got["with_prefix"], rtol=0, atol=1e-5)


def test_pipeline_stage_goes_on_before_its_messages_are_received(there: Any) -> None:
    folder, _ = there
    assert torch.load(folder / "rank1")["received"] == [True, True]


def test_more_than_two_ranks_are_summed_in_their_order() -> None:
    done = tiny.run_script("tests/models/rank_order.py", processes=3, timeout=120)
    assert done.stdout.splitlines()[-1] == "differs: []"
