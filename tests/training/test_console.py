"""What a run shows, in a log file of 80 columns, and says of the model that comes out of it."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_aligner.checkpoint.run import RunCheckpoints, RunState, Saved
from nemo_aligner.cli.main import load
from nemo_aligner.config.common import Precision
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data.training_data import Imbalance
from nemo_aligner.distributed.launch import launch
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.training.describe import (
    describe_heldout,
    describe_steps,
    next_commands,
    render_candidates,
)
from nemo_aligner.training.loggers import Gauges, StepProgress, render_best, render_validation

STEP = {
    "train/loss": 0.693147,
    "train/accuracy": 0.875,
    "train/grad_norm": 12.3456,
    "train/lr": 1.97e-05,
    "train/tokens_per_second": 123456.7,
}


def steps_shown(total: int, output: str) -> list[int]:
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert all(f"/{total}" in line for line in lines)
    return [int(line.split()[1].partition("/")[0]) for line in lines]


def test_steps_of_a_short_run_are_shown_each(capsys: pytest.CaptureFixture[str]) -> None:
    for total, start, shown in (
        (5, 0, [1, 2, 3, 4, 5]),
        (100, 95, [96, 97, 98, 99, 100]),
        (100, 0, [1, 100]),
        (100, 40, [41, 100]),
    ):
        progress = StepProgress(total, start, 10)
        for step in range(start + 1, total + 1):
            progress.show(step, STEP)
        progress.close()
        assert steps_shown(total, capsys.readouterr().out) == shown


def test_line_of_a_step_wraps_and_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    saved = Saved(Path("step_00000500"), RunState(500, 4000, {"validation-heldout/accuracy": 0.71}))
    best = render_best(saved, "validation-heldout/accuracy")
    gauges = {"train/mfu": 0.4123, "train/gpu_memory_gb": 61.23, "train/gpu_power_watts": 652.4}
    for more, ending in (
        (({},), ""),
        (({**gauges}, best), " MFU 41.2% GPU 61.2 GB 652 W best accuracy 0.71 at step 500"),
    ):
        StepProgress(1000, 0, 10).show(1, {**STEP, **more[0]}, *more[1:])
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith("step 1/1000  ")
        assert lines[1].startswith("  ")
        shown = " ".join(" ".join(lines).split())
        fields = "left loss 0.6931 accuracy 0.875 grad_norm 12.35 lr 1.97e-05 123457 tokens/s"
        assert shown.endswith(fields + ending)
    assert render_best(None, "validation-heldout/accuracy") is None


def test_time_left_counts_steps_and_validations() -> None:
    """Also one before the first step."""
    now = 100.0
    progress = StepProgress(10, 0, 4)
    progress._now = lambda: now
    progress.begin()
    now += 4.0
    assert progress.seconds_left(2) == 16.0
    now += 4.0 + 30.0  # two steps, and a validation
    progress.add_validation(30.0)
    assert progress.seconds_left(4) == 6 * 2.0 + 2 * 30.0
    progress = StepProgress(10, 0, None)
    progress._now = lambda: now
    now += 30.0
    progress.add_validation(30.0)
    progress.begin()
    now += 5.0
    assert progress.seconds_left(5) == 5.0 + 30.0


def test_validation_is_told_set_by_set() -> None:
    names = ("loss", "accuracy", "ties", "reward_margin", "ece", "brier")
    lengths = ("accuracy_longer_chosen", "accuracy_shorter_chosen")
    metrics = {f"validation-pairs/{name}": 0.25 for name in (*names, *lengths)}
    metrics |= {f"validation-pairs/by_source/source {n}/accuracy": 0.5 for n in range(5)}
    metrics |= {"validation-pairs/by_source/source 1/loss": 0.1, "validation-more/loss": 0.75}
    assert render_validation(24, metrics).splitlines() == [
        "step 24: validation-pairs",
        "  loss 0.25  accuracy 0.25  ties 0.25  reward_margin 0.25  ece 0.25",
        "  accuracy_longer_chosen 0.25  accuracy_shorter_chosen 0.25",
        "  accuracy by source:  source 0 0.500  source 1 0.500  source 2 0.500",
        "    source 3 0.500  source 4 0.500",
        "step 24: validation-more",
        "  loss 0.75",
    ]


def test_heldout_figures_stand_beside_what_length_alone_gives() -> None:
    pairs = {"accuracy": 0.712, "longer_reply_accuracy": 0.548, "loss": 0.58, "ece": 0.04}
    ratings = {"pearson_mean": 0.61, "length_only_pearson_mean": 0.3, "loss": 0.9}
    metrics = {f"validation-a/{name}": value for name, value in pairs.items()}
    metrics |= {f"validation-b/{name}": value for name, value in ratings.items()}
    assert describe_heldout(metrics).splitlines() == [
        "held out: validation-a",
        "  accuracy 0.712 (always the longer reply: 0.548)  loss 0.58",
        "held out: validation-b",
        "  pearson_mean 0.61 (length of the reply alone: 0.3)  loss 0.9",
    ]
    assert describe_heldout({}) == "held out: not validated"


def test_uneven_work_is_a_note_where_ranks_wait_for_it() -> None:
    for stages, shares, notes in (
        (1, (1.04, 1.5), []),
        (2, (1.0, 1.04), []),
        (1, (1.17, 1.5), ["the busiest rank has 17% more work than the mean"]),
        (2, (1.0, 1.5), ["the largest micro-batch has 50% more work than the mean"]),
    ):
        config = TrainConfig()
        config.model = config.model.with_learning_rate(hidden_size=64)
        config.model.pipeline_model_parallel_size = stages
        train = SimpleNamespace(file_sizes=[1])
        data = SimpleNamespace(objective=BradleyTerry(), validation=[], train=train)
        imbalance = Imbalance(*shares)
        checkpoints = RunCheckpoints("checkpoints")
        loader = SimpleNamespace(imbalance=lambda steps, i=imbalance: i)
        run = SimpleNamespace(config=config, data=data, total_steps=9, loader=loader)
        description = describe_steps(run, checkpoints)  # type: ignore[arg-type]
        lines = [line for line in description.splitlines() if "more work" in line]
        assert lines == [f"note: in the first 9 steps {note}" for note in notes], (stages, shares)


def test_next_commands_can_be_typed() -> None:
    shown = next_commands(Path("my run/checkpoints/model.nemo"), [])
    heading, *commands = shown.replace("\\\n", "").splitlines()
    assert heading == "next:"
    assert max(map(len, shown.splitlines())) < 80
    assert [command.split()[1] for command in commands] == ["evaluate", "serve", "export"]
    assert "nemo-aligner export" not in next_commands(Path("m.nemo"), [], can_export=False)
    for command in commands:
        program, verb, *arguments = shlex.split(command)
        assert program == "nemo-aligner"
        parser = load(verb).new_parser()
        options = vars(parser.parse_args(arguments))
        assert any("my run/checkpoints/model.nemo" in str(value) for value in options.values())


def saved(step: int, **metrics: float) -> Saved:
    named = {f"validation-pairs/{name}": value for name, value in metrics.items()}
    return Saved(Path(f"step_{step:08d}"), RunState(step, step * 8, named))


def test_candidates_are_listed_with_what_decided_have_a_loss_once_and_are_cut() -> None:
    """Without a validation the newest is chosen."""

    def shown(monitor: str | None, ranked: list[Saved], newest: Saved) -> list[str]:
        checkpoints = RunCheckpoints("checkpoints", monitor, save_top_k=2)
        return render_candidates(checkpoints, ranked, newest).splitlines()

    ranked = [saved(24, accuracy=1.0, loss=0.07), saved(5, accuracy=1.0, loss=0.565)]
    assert shown("validation-pairs/accuracy", ranked, saved(30)) == [
        "checkpoints, the best first by validation-pairs/accuracy,",
        "  ties by validation-pairs/loss:",
        "  step 24      accuracy 1  loss 0.07  (chosen)",
        "  step 5       accuracy 1  loss 0.565",
        "  step 30      not validated",
    ]
    newest = saved(9, loss=0.25, accuracy=0.5)
    assert shown("validation-pairs/loss", [newest], newest) == [
        "checkpoints, the best first by validation-pairs/loss:",
        "  step 9       loss 0.25  (chosen)",
    ]
    assert shown(None, [], saved(9)) == ["checkpoints:", "  step 9       not validated  (chosen)"]
    many = [saved(step, accuracy=1 / step, loss=0.5) for step in range(1, 31)]
    lines = shown("validation-pairs/accuracy", many, many[29])
    assert (len(lines), lines[-1]) == (11, "  and 22 that are not as good")


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, power: int | Exception) -> None:
    def power_draw(device: torch.device) -> int:
        if isinstance(power, Exception):
            raise power
        return power

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60e9, 141e9))
    monkeypatch.setattr(torch.cuda, "power_draw", power_draw)


def test_gauges_of_a_known_gpu_an_unknown_one_and_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for a GPU; what it does not say is left out."""
    with launch():
        assert Gauges.of("cpu", Precision.fp32).read(1e12, 1.0) == {}
        pretend(monkeypatch, "NVIDIA H200", 652_000)
        assert Gauges.of("cuda:0", Precision.bf16).read(989e12, 4.0) == {
            "mfu": pytest.approx(0.25),
            "gpu_memory_gb": 81.0,
            "gpu_power_watts": 652.0,
        }
        pretend(monkeypatch, "NVIDIA something new", ModuleNotFoundError("pynvml"))
        assert Gauges.of("cuda:0", Precision.bf16).read(1e12, 1.0) == {"gpu_memory_gb": 81.0}
