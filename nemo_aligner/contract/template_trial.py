"""An untrusted chat template, which may not end, is first run in a process of its own.

Jinja's sandbox keeps it from files and code, but not from loops, nor from asking for all memory.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from functools import lru_cache

from nemo_aligner.utils.errors import DataError

_CPU_SECONDS = 5
_BYTES = 2**30
_TIMEOUT_SECONDS = 120  # of a machine that is busy; CPU time is what ends the trial


@lru_cache(maxsize=8)
def check_it_ends(template: str, bos_token: str, eos_token: str, kwargs: str = "") -> None:
    """Render short conversations by ``template`` elsewhere, with calls of tools, too.

    Raises:
        DataError: it cannot be, or not within 5 s and 1 GiB.
    """
    where = os.pathsep.join(filter(None, sys.path))
    try:
        trial = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps([template, bos_token, eos_token, kwargs]).encode(),
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            env={**os.environ, "PYTHONPATH": where},
        )
        problem, status = trial.stdout.decode("utf-8", "replace"), trial.returncode
    except subprocess.TimeoutExpired:
        problem, status = "", -1
    if status < 0:
        raise DataError(
            "the chat template cannot write this conversation: it takes more than "
            f"{_CPU_SECONDS} s or {_BYTES >> 20} MiB"
        )
    if problem:
        raise DataError(problem)
    if status:
        raise DataError(f"the chat template cannot be tried: {trial.stderr[-1000:]!r}")


def _main() -> None:
    from nemo_aligner.contract.template_probe import TemplateReading
    from nemo_aligner.contract.templates import find_frames, is_dated, names_in, render

    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_DATA, _BYTES),
    ):
        _, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit, most))
    given = json.load(sys.stdin)
    try:
        if not is_dated(*given):  # or it is refused for that
            template, *rest = given
            find_frames(lambda turns: render(template, turns, *rest))
            reading = TemplateReading(
                lambda text: render(template, text, *rest), names_in(template)
            )
            reading.try_all()
    except DataError as error:
        sys.stdout.buffer.write(str(error).encode("utf-8", "replace"))


if __name__ == "__main__":
    _main()
