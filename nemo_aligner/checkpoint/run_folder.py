"""Names of the files in a training run's folder, and the error for a run passed as a model."""

from __future__ import annotations

import re
from pathlib import Path

from nemo_aligner.utils.errors import CheckpointError

CHECKPOINTS_NAME = "checkpoints"
CONFIG_NAME = "config.yaml"
FACTS_NAME = "run_facts.json"
HELDOUT_NAME = "heldout"
METRICS_NAME = "metrics.jsonl"
MODEL_NAME = "megatron_gpt.nemo"
REPORT_NAME = "report.html"
ROBUSTNESS_NAME = "robustness.json"
RUN_STATE_NAME = "run_state.json"
STATE_NAME = "state"
STEP_NAME = re.compile(r"step_(\d{8,})")
TRACKING_NAME = "tracking.json"


def refuse_run(folder: Path, source: Path) -> None:
    """Raise CheckpointError if ``folder`` is a training run or a part of a run, not a model.

    Args:
        source: name of the folder in errors.

    Raises:
        CheckpointError: the message has the path of the finished model, or tells how to finish the
            run.
    """
    description, checkpoints = _find_run(folder)
    if checkpoints is None:
        return
    model = checkpoints / MODEL_NAME
    if model.is_file():
        raise CheckpointError(
            f"{source}: this is {description}, not a model. Pass the run's model instead: {model}"
        )
    steps = sorted(_list_steps(checkpoints))
    advice = "it has no checkpoint yet"
    if steps:
        advice = (
            f"start the same training again with trainer.rm.max_steps={steps[-1]}, which writes "
            f"{model}"
        )
    raise CheckpointError(
        f"{source}: this is {description}, not a model. The run has not finished: {advice}"
    )


def _find_run(folder: Path) -> tuple[str, Path | None]:
    """Find the training run that a folder belongs to.

    Returns:
        A description of ``folder`` for an error, and the folder with the run's checkpoints, which
        is None if ``folder`` does not belong to a run.
    """
    if (folder / RUN_STATE_NAME).is_file():
        return "a checkpoint of a training run", folder.parent
    if folder.name == STATE_NAME and (folder.parent / RUN_STATE_NAME).is_file():
        return "a part of a checkpoint of a training run", folder.parent.parent
    if _holds_checkpoints(folder):
        return "the checkpoints of a training run", folder
    inside = folder / CHECKPOINTS_NAME
    is_run = (folder / CONFIG_NAME).is_file() and inside.is_dir()
    return "a training run", inside if is_run or _holds_checkpoints(inside) else None


def _holds_checkpoints(folder: Path) -> bool:
    is_named = folder.name == CHECKPOINTS_NAME and (folder / MODEL_NAME).is_file()
    return is_named or bool(_list_steps(folder))


def _list_steps(checkpoints: Path) -> list[int]:
    complete = (path for path in step_folders(checkpoints) if (path / RUN_STATE_NAME).is_file())
    return [int(path.name.removeprefix("step_")) for path in complete]


def step_folders(checkpoints: Path) -> list[Path]:
    """List the folders of a run's checkpoints, complete or damaged, in any order."""
    paths = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return [path for path in paths if STEP_NAME.fullmatch(path.name) and path.is_dir()]
