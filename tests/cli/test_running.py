"""A verb ends with an exit code, and an error of one screen."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_aligner.cli.running import run_verb
from nemo_aligner.errors import CheckpointError, ConfigError, DataError
from tests.cli.test_parser import options_of

Captured = pytest.CaptureFixture[str]


def failing(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        raise error

    return run


def test_an_error_is_one_line_and_exit_code_1(capsys: Captured) -> None:
    assert run_verb(failing(DataError("got a")), options_of()) == 1
    assert capsys.readouterr().err == "DataError: got a\n"
    assert run_verb(lambda options: 7, options_of()) == 7


def test_debug_shows_the_traceback(capsys: Captured) -> None:
    for error in (DataError("got a"), ZeroDivisionError("by zero")):
        assert run_verb(failing(error), options_of("--debug")) == 1
        told = capsys.readouterr().err
        assert told.startswith("Traceback")
        assert told.endswith(f"{type(error).__name__}: {error}\n")


def test_what_nobody_foresaw_is_one_screen_and_a_file(capsys: Captured) -> None:
    assert run_verb(failing(ZeroDivisionError("by zero")), options_of()) == 1
    error = capsys.readouterr().err
    assert error.startswith("unexpected ZeroDivisionError: by zero\n")
    assert error.count("\n") == 2
    assert "test_running.py:" in error
    (path,) = re.findall(r"traceback is in (\S+)", error)
    assert Path(path).read_text().startswith("Traceback")
    Path(path).unlink()


def test_an_interruption_has_its_exit_code(capsys: Captured) -> None:
    assert run_verb(failing(KeyboardInterrupt()), options_of()) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "brings"),
    [
        ("pytriton.client", "pip install 'nemo_aligner[serving]' brings it"),
        ("omegaconf", "activate the environment"),
    ],
)
def test_a_missing_module_comes_with_its_command(name: str, brings: str, capsys: Captured) -> None:
    assert run_verb(failing(ModuleNotFoundError("no", name=name)), options_of()) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"the module {name.partition('.')[0]} is not installed in ")
    assert brings in error


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("gpu_memory: got 3", "--gpu-memory: got 3"),
        ("model.optim.lr: got 3", "model.optim.lr: got 3"),
        ("things: got 3", "things: got 3"),
        ("other: got 3", "other: got 3"),
        ("nothing fits", "nothing fits"),
    ],
)
def test_an_error_names_the_flag_where_the_key_has_one(
    said: str, shown: str, capsys: Captured
) -> None:
    for kind in (ConfigError, CheckpointError):
        assert run_verb(failing(kind(said)), options_of()) == 1
        assert capsys.readouterr().err == f"{kind.__name__}: {shown}\n"
