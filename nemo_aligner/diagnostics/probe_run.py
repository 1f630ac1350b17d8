"""The probe of a training run's own settings, from them to a verdict for people."""

from __future__ import annotations

import tempfile
from pathlib import Path

from nemo_aligner.config.model import Schedule
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.console import say
from nemo_aligner.data.demo import build_demo_pairs, demo_lines
from nemo_aligner.data.write import write_lines
from nemo_aligner.diagnostics.probe import BARS, ProbeResult, few_records, probe
from nemo_aligner.errors import ConfigError
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import initialize_layout
from nemo_aligner.training.build import build_data, build_learner
from nemo_aligner.training.run import check_settings


def run_probe(config: TrainConfig, records: int, steps: int) -> ProbeResult:
    """Probe on the first ``records`` of the training files, or of the demo set if there are none.

    ``config`` is changed: every step sees all records, at a constant rate.

    Raises:
        AlignerError: settings, data or checkpoint are unfit, or a number is not finite.
    """
    check_settings(config)
    with tempfile.TemporaryDirectory() as folder:
        if not config.model.data.data_prefix.train:
            config.model.data.data_prefix.train = [str(_demo_file(Path(folder), records))]
        _set_for_probe(config, records, steps)
        with launch():
            layout = initialize_layout(
                config.model.tensor_model_parallel_size,
                config.model.pipeline_model_parallel_size,
                config.model.sequence_parallel,
                config.model.seed,
            )
            data = few_records(build_data(config), records)
            _check_bar(data.objective.main_metric)
            say(f"{len(data.train)} records, {steps} steps each way")
            return probe(lambda each: build_learner(config, each, layout)[0], data, steps)


def render_probe(result: ProbeResult) -> str:
    """The table for people, and the verdict."""
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
            "see steps and model.optim.lr)",
        )
    )


def _set_for_probe(config: TrainConfig, records: int, steps: int) -> None:
    config.model.global_batch_size = records
    config.model.optim.sched.name = Schedule.constant
    config.model.optim.sched.warmup_steps = 0
    config.trainer.rm.max_epochs = steps
    config.trainer.rm.max_steps = steps
    config.model.data.data_prefix.validation = []


def _check_bar(metric: str) -> None:
    if metric not in BARS:
        raise ConfigError(
            f"model.objective: got one that is measured by {metric}, wanted one by "
            f"{' or '.join(BARS)}, for which is known what a probe must reach"
        )


def _demo_file(folder: Path, records: int) -> Path:
    path = folder / "demo.jsonl"
    write_lines(path, demo_lines(build_demo_pairs(2400, 0.1, 1)[0][:records]))
    return path
