"""The fixture ``run``, which runs a verb of ``nemo-aligner`` in this process."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from nemo_aligner.cli.main import main

Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return ``run("data split", path, ..., code=0)``, which checks the exit code."""

    def run(verb: str, *arguments: object, code: int = 0) -> CompletedProcess[str]:
        capsys.readouterr()
        command = [*verb.split(), *map(str, arguments)]
        ended = main(command)
        said = capsys.readouterr()
        assert ended == code, said.err
        return CompletedProcess(command, ended, said.out, said.err)

    return run
