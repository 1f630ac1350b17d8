"""What a run prints about itself and the model that comes out of it."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

from nemo_aligner.checkpoint.run import RunCheckpoints, RunState, Saved
from nemo_aligner.cli.main import load
from nemo_aligner.config.common import Malformed
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.load import load_config
from nemo_aligner.config.model import DataConfig, ModelConfig, RegressionConfig
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data.training_data import Imbalance
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.training.describe import (
    describe_heldout,
    describe_steps,
    next_commands,
    render_candidates,
)


def test_heldout_metrics_are_shown_with_the_length_only_baseline() -> None:
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
        train = MagicMock(file_sizes=[1], __len__=lambda self: 72)
        data = SimpleNamespace(objective=BradleyTerry(), validation=[], train=train)
        imbalance = Imbalance(*shares)
        checkpoints = RunCheckpoints("checkpoints")
        loader = SimpleNamespace(imbalance=lambda steps, i=imbalance: i)
        run = SimpleNamespace(config=config, data=data, total_steps=9, loader=loader)
        description = describe_steps(run, checkpoints)  # type: ignore[arg-type]
        lines = [line for line in description.splitlines() if "more work" in line]
        assert lines == [f"note: in the first 9 steps {note}" for note in notes], (stages, shares)


def test_next_commands_can_be_typed() -> None:
    shown = next_commands(Path("my run/checkpoints/model.nemo"), [], ModelConfig())
    heading, *commands = shown.replace("\\\n", "").splitlines()
    assert heading == "next:"
    assert max(map(len, shown.splitlines())) < 80
    assert [command.split()[1] for command in commands] == ["evaluate", "serve", "export"]
    assert "nemo-aligner export" not in next_commands(
        Path("m.nemo"), [], ModelConfig(), can_export=False
    )
    for command in commands:
        program, verb, *arguments = shlex.split(command)
        assert program == "nemo-aligner"
        parser = load(verb).new_parser()
        options = vars(parser.parse_args(arguments))
        assert any("my run/checkpoints/model.nemo" in str(value) for value in options.values())


def test_next_evaluation_reads_records_as_the_run_did() -> None:
    data = DataConfig(
        prompt_key="question",
        input_template="Q: {}\nA: ",
        neutral_label=None,
        malformed=Malformed.drop,
        seq_length=9,
    )
    config = ModelConfig(data=data, regression=RegressionConfig(loss_mask_val=-1.0))
    shown = next_commands(Path("m.nemo"), [], config)
    evaluate = shlex.split(shown.replace("\\\n", "").partition("\n  nemo-aligner serve")[0])
    assert evaluate[4:] == [
        "data.path=heldout.jsonl",
        "data.prompt_key=question",
        "data.input_template=Q: {}\nA: ",
        "data.loss_mask_val=-1.0",
        "data.neutral_label=null",
        "data.malformed=drop",
    ]
    read = load_config(EvaluateConfig, evaluate[3:]).data
    assert (read.input_template, read.neutral_label) == ("Q: {}\nA: ", None)
    note = "serve rm_model_file=m.nemo\n  # clients must send samples in the form that input_temp"
    assert note in shown


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
    assert (len(lines), lines[-1]) == (11, "  and 22 checkpoints with worse metrics")
