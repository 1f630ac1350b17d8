from __future__ import annotations

import importlib
import shlex
from pathlib import Path

from nemo_aligner.training.describe import describe_heldout, next_commands


def test_held_out_figures_stand_beside_what_length_alone_gives() -> None:
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


def test_a_model_that_was_not_validated_says_so() -> None:
    assert describe_heldout({}) == "held out: it was not validated"


def test_the_next_commands_can_be_typed() -> None:
    shown = next_commands(Path("my run/checkpoints/model.nemo"), [])
    heading, *commands = shown.replace("\\\n", "").splitlines()
    assert heading == "next:"
    assert max(map(len, shown.splitlines())) < 80
    assert [command.split()[1] for command in commands] == ["evaluate", "serve", "export"]
    for command in commands:
        program, verb, *arguments = shlex.split(command)
        assert program == "nemo-aligner"
        parser = importlib.import_module(f"nemo_aligner.cli.{verb}").new_parser()
        given = vars(parser.parse_args(arguments))
        assert any("my run/checkpoints/model.nemo" in str(value) for value in given.values())
