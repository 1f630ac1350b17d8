"""Runs of MoE models, and of other kinds of attention, that are resumed at several layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.files import rows_of
from tests.distributed.layouts import archive
from tests.harness import families, tiny
from tests.models.layouts import MIXTURES

# The learning rate depends only on the step, wherever a run ends. With the default epsilon Adam
# would enlarge the rounding of gradients near 0; see tests/models/layouts.py.
SETTINGS = (
    "model.optim.sched.name=constant",
    "model.train_router=true",
    "trainer.rm.save_interval=2",
    "model.optim.eps=1e-4",
)
TP2 = (2, ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true"))
PP2 = (2, ("model.pipeline_model_parallel_size=2",))
LAYOUTS: list[tuple[int, tuple[str, ...]]] = [
    (2, ("model.expert_model_parallel_size=2",)),
    TP2,
    (2, ("model.expert_model_parallel_size=2", "model.context_parallel_size=2")),
]


@pytest.mark.parametrize(
    ("case", "architecture", "lora"),
    [("deepseek_v3", "DeepseekV3", 0), ("qwen2_moe", "Qwen2Moe", 4)],
)
def test_mixture_goes_on_at_other_layouts_as_in_one_process(
    case: str, architecture: str, lora: int, tmp_path: Path
) -> None:
    """With experts sharded, then split by TP, then sharded over a context parallel group.

    DeepSeek-V3 has latent attention, a router with groups and a bias, and a first layer without
    experts.
    """
    base = families.write_base_nemo(tmp_path / "base.nemo", case)
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 24)
    settings = SETTINGS[:1] + SETTINGS[2:] if lora else SETTINGS

    def train(folder: Path, steps: int, processes: int, *more: str) -> None:
        arguments = (*tiny.training(base, folder, pairs), *settings, *more)
        rank, last = f"model.lora.rank={lora}", f"trainer.rm.max_steps={steps}"
        tiny.run_verb("train", *arguments, rank, last, processes=processes)

    train(tmp_path / "one", 2 * len(LAYOUTS), 1)
    for number, (processes, sizes) in enumerate(LAYOUTS, 1):
        train(tmp_path / "other", 2 * number, processes, *sizes)
    one, other = (tiny.logged(tmp_path / name) for name in ("one", "other"))
    for name in ("train/loss", "train/grad_norm", "train/expert_load_mean_max"):
        assert other[name] == pytest.approx(one[name], rel=2e-5), name
    assert len(one["train/loss"]) == 2 * len(LAYOUTS)

    rewards = []
    for processes, sizes in ((1, ()), LAYOUTS[1]):
        given = (f"rm_model_file={archive(tmp_path / 'other')}", f"data.path={pairs}")
        files = (f"output={tmp_path / 'report'}", f"output_rewards={tmp_path / 'rewards.jsonl'}")
        tiny.run_verb("evaluate", *given, *files, *sizes, processes=processes)
        rewards.append([row["rewards"]["chosen"] for row in rows_of(tmp_path / "rewards.jsonl")])
    assert rewards[1] == pytest.approx(rewards[0], abs=1e-5)
    tiny.run_verb(
        "export",
        f"--input={archive(tmp_path / 'other')}",
        f"--output={tmp_path / 'out'}",
        "--base-license=apache-2.0",
    )
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == [f"{architecture}ForSequenceClassification"]


LAYOUTS_OF = {
    "qwen3_5_moe": [TP2, PP2, LAYOUTS[0]],
    "nemotron_h_moe": [TP2, PP2, LAYOUTS[0]],
}


@pytest.mark.parametrize("case", LAYOUTS_OF)
def test_decoder_goes_on_at_other_layouts_as_in_one_process(case: str, tmp_path: Path) -> None:
    """Split by TP, then by pipeline stages, whose layers differ, then with experts sharded."""
    base = families.write_base_nemo(tmp_path / "base.nemo", case)
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 24)
    layouts = LAYOUTS_OF[case]
    settings = [line for line in SETTINGS if case in MIXTURES or "router" not in line]

    def train(folder: Path, steps: int, processes: int, *more: str) -> None:
        arguments = (*tiny.training(base, folder, pairs), *settings, *more)
        tiny.run_verb("train", *arguments, f"trainer.rm.max_steps={steps}", processes=processes)

    train(tmp_path / "one", 2 * len(layouts), 1)
    for number, (processes, sizes) in enumerate(layouts, 1):
        train(tmp_path / "other", 2 * number, processes, *sizes)
    one, other = (tiny.logged(tmp_path / name) for name in ("one", "other"))
    for name in ("train/loss", "train/grad_norm"):
        assert len(one[name]) == 2 * len(layouts)
        assert other[name] == pytest.approx(one[name], rel=2e-5), name
