"""A verb and its errors: one screen without traceback, and an exit code."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nemo_aligner.cli.parser import PROGRAM
from nemo_aligner.config.packaged import install_command
from nemo_aligner.errors import AlignerError, CheckpointError, ConfigError
from nemo_aligner.processes import describe_error, is_first_rank, report

Run = Callable[[argparse.Namespace], int]
# Which extra of the package brings a module.
_EXTRAS = {
    "pytriton": "serving",
    "tritonclient": "serving",
    "fastapi": "gateway",
    "uvicorn": "gateway",
    "pydantic": "gateway",
    "prometheus_client": "gateway",
    "gguf": "gguf",
    "zarr": "zarr",
    "ml_dtypes": "zarr",
    "matplotlib": "report",
    "wandb": "wandb",
    "mlflow": "mlflow",
}


def run_verb(run: Run, options: argparse.Namespace) -> int:
    """The exit code of ``run``: 1 after an error, which one rank tells, 130 after Ctrl-C.

    ``--debug`` adds the traceback.
    """
    try:
        with _errors_name_flags(options):
            return run(options)
    except KeyboardInterrupt:
        if is_first_rank():
            print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output, such as head, has seen enough.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        return 1
    except Exception as error:
        return report(error, _with_traceback if options.debug else _describe)


def _describe(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return missing_module(error)
    if isinstance(error, AlignerError):
        return describe_error(error)
    return _unexpected(error)


def _with_traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def missing_module(error: ModuleNotFoundError) -> str:
    """Which command brings the module that is missing."""
    name = str(error.name).partition(".")[0]
    extra = _EXTRAS.get(name)
    brings = f"{install_command(extra or '')} brings it"
    if extra is None:
        brings = "activate the environment that nemo_aligner is installed in"
        brings += f" (source .venv/bin/activate), or install it: {install_command()}"
    return f"the module {name} is not installed in {sys.executable}; {brings}"


def _unexpected(error: Exception) -> str:
    """One screen of an error that nobody foresaw; its traceback goes to a file."""
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"{PROGRAM}-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write(_with_traceback(error))
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"unexpected {describe_error(error)}\n"
        f"  in {last.filename}:{last.lineno}; the whole traceback is in {file.name}"
    )


@contextmanager
def _errors_name_flags(options: argparse.Namespace) -> Iterator[None]:
    """An error about the setting ``key`` is one about the flag ``--key`` where that is an option.

    Raises:
        ConfigError, CheckpointError: the same, in other words.
    """
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        key = re.match(r"(\w+):", str(error))
        if key is not None and key[1] in options.flags:
            error.args = (f"--{key[1].replace('_', '-')}{str(error)[key.end(1) :]}",)
        raise
