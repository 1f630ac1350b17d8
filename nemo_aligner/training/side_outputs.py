"""The rule for outputs that only accompany a run: their errors do not end it.

They are the loggers, the gauges of the GPU, the files for ``nemo-aligner report``, and the ids of
the run at its services. Only ``metrics.jsonl`` and checkpoints may end a run.
"""

from __future__ import annotations

from collections.abc import Callable

from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import one_line

# The setting that names the folder of a run, for the error of a file in it.
RUN_FOLDER = "exp_manager.explicit_log_dir"


def attempt_output(call: Callable[[], object], name: str, activity: str, consequence: str) -> bool:
    """Make a call that writes or reads a side output, and print its error if it fails.

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
