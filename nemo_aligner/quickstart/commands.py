"""Commands as a person would type them, shown before they run."""

from __future__ import annotations

import subprocess

from nemo_aligner.errors import AlignerError
from nemo_aligner.subcommand import environment, show_command, verb_command


class StepFailed(AlignerError):
    """A command ended with an error, which it has told."""


def heading(text: str) -> None:
    """The name of a step."""
    print(f"\n== {text}", flush=True)


def run(verb: str, *arguments: str) -> None:
    """Show and run ``nemo-aligner VERB ...``; Ctrl-C is the command's, which may have to save.

    Raises:
        StepFailed: it ended with an error.
        KeyboardInterrupt: it was interrupted, and has ended.
    """
    print(show_command(verb, arguments, "$ "), flush=True)
    process = subprocess.Popen(verb_command(verb, *arguments), env=environment())
    code, interrupted = _wait(process)
    if interrupted:
        raise KeyboardInterrupt
    if code != 0:
        raise StepFailed(f"nemo-aligner {verb} ended with exit code {code}, see above")


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    interrupted = False
    while True:
        try:
            return process.wait(), interrupted
        except KeyboardInterrupt:
            interrupted = True
