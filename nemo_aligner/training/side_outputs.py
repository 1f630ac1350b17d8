"""Side outputs: outputs that a run can do without, so that their errors do not end it.

They are the loggers, the gauges of the GPU, the files for ``nemo-aligner report``, and the ids of
the run at W&B and MLflow. Errors in ``metrics.jsonl`` and in checkpoints do end a run.
"""

from __future__ import annotations

from collections.abc import Callable

from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import one_line

# The setting that names the folder of a run, for the error of a file in it.
RUN_FOLDER = "exp_manager.explicit_log_dir"


def attempt_output(call: Callable[[], object], name: str, activity: str, consequence: str) -> bool:
    """Run ``call``, which writes or reads a side output, and print its error if it fails.

    After an error the caller drops the output, so that the message is printed once.

    Args:
        name: name of the output, with which the message begins.
        activity: what has stopped because of the error, such as ``logging``.
        consequence: what the run does without the output.

    Returns:
        True if the call succeeded.
    """
    try:
        call()
    except Exception as error:  # any exception: each logger's package has its own
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {one_line(cause)}"
        say(f"{name}: {activity} stopped ({reason}); {consequence}")
        return False
    return True
