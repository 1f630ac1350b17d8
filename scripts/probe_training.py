"""Show that training sees its labels, with your model and settings.

probe_training.py [--records 8] [--steps 20] KEY=VALUE ...

Takes the settings of examples/train_reward_model.py (``--help-settings`` lists them); without
model.data.data_prefix.train, records of the demo set are used. It learns a handful of records by
heart, begins anew with their labels swapped (chosen and rejected exchanged, ratings mirrored), and
looks at the metric on the labels as they were: it must go up with the one, and down with the other.
A trainer that is blind to its labels fails, with exit code 1. Nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_aligner.config.training import TrainConfig
    from nemo_aligner.diagnostics.probe import ProbeResult


def run_probe(config: TrainConfig, records: int, steps: int) -> ProbeResult:
    from nemo_aligner.diagnostics.probe import few_records, probe
    from nemo_aligner.parallel.collectives import say
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import initialize_layout
    from nemo_aligner.training.build import build_data, build_learner

    with launch():
        layout = initialize_layout(
            config.model.tensor_model_parallel_size,
            config.model.pipeline_model_parallel_size,
            config.model.sequence_parallel,
            config.model.seed,
        )
        data = few_records(build_data(config), records)
        say(f"{len(data.train)} records, {steps} steps each way")
        return probe(lambda each: build_learner(config, each, layout)[0], data, steps)


def settings_for_probe(config: TrainConfig, records: int, steps: int) -> None:
    """Every step sees all records, at a constant rate."""
    from nemo_aligner.config.model import Schedule

    config.model.global_batch_size = records
    config.model.optim.sched.name = Schedule.constant
    config.model.optim.sched.warmup_steps = 0
    config.trainer.rm.max_epochs = steps
    config.trainer.rm.max_steps = steps
    config.model.data.data_prefix.validation = []


def render(result: ProbeResult) -> str:
    from nemo_aligner.diagnostics.probe import BARS

    high, low = BARS[result.metric]
    (first, last), (first_swapped, last_swapped) = result.losses
    return "\n".join(
        (
            f"{result.metric} on the labels as they are{'loss, first -> last step':>42}",
            f"  untrained                {result.untrained:>8.3f}",
            f"  trained on them          {result.learned:>8.3f}   wanted {high} or more"
            f"{first:>16.4f} -> {last:.4f}",
            f"  trained on swapped ones  {result.swapped:>8.3f}   wanted {low} or less"
            f"{first_swapped:>16.4f} -> {last_swapped:.4f}",
            "passed: training follows its labels"
            if result.passed
            else "FAILED: training does not follow its labels (or is too short or slow to show it: "
            "see --steps and model.optim.lr)",
        )
    )


def _demo_file(folder: str, records: int) -> str:
    from demo_pairs import build_demo_pairs

    path = Path(folder, "demo.jsonl")
    pairs = build_demo_pairs(2400, 0.1, 1)[0][:records]
    rows = ({"prompt": p.prompt, "chosen": p.chosen, "rejected": p.rejected} for p in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--help-settings", action="store_true", help="list all settings")
    arguments, settings = parser.parse_known_args(argv)
    from nemo_aligner.config.load import load_config
    from nemo_aligner.config.training import TrainConfig
    from nemo_aligner.errors import AlignerError
    from nemo_aligner.parallel.collectives import say
    from nemo_aligner.training.run import check_settings

    try:
        config = load_config(TrainConfig, ["--help"] if arguments.help_settings else settings)
        check_settings(config)
        with tempfile.TemporaryDirectory() as folder:
            if not config.model.data.data_prefix.train:
                config.model.data.data_prefix.train = [_demo_file(folder, arguments.records)]
            settings_for_probe(config, arguments.records, arguments.steps)
            result = run_probe(config, arguments.records, arguments.steps)
    except AlignerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    say(render(result))
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
