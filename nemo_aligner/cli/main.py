"""``nemo-aligner VERB ...``: which module a verb is in. No torch is imported until a verb runs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import nemo_aligner
from nemo_aligner.cli.parser import PROGRAM, did_you_mean
from nemo_aligner.cli.running import missing_module, run_verb
from nemo_aligner.config.packaged import find_conflict

# What a verb does, in one line; its module has ``new_parser`` and ``run``.
VERBS = {
    "quickstart": "the whole job on a small model: convert, train, evaluate, serve, score",
    "train": "train a reward model on pairs or rated replies",
    "evaluate": "measure a reward model on held-out data",
    "compare": "two reward models on the same pairs, and where they differ",
    "report": "runs and evaluations as one HTML page, several overlaid",
    "serve": "answer texts with rewards over HTTP",
    "serve-critic": "the critic of PPO over HTTP: values, training, saving",
    "gateway": "OpenRLHF, vLLM, NeMo Gym and plain JSON in front of servers",
    "score": "ask a server for rewards",
    "convert": "a Hugging Face model or GGUF file -> .nemo",
    "import": "a checkpoint of NeMo, NeMo-Aligner or Megatron -> .nemo",
    "export": "a reward model's .nemo -> a Hugging Face folder",
    "merge": "several reward models as one: an average, or past the last (ExPO)",
    "data fetch": "a data set of the Hugging Face hub -> JSON lines",
    "data inspect": "look at data as training will see it",
    "data split": "split a file by prompt",
    "data demo": "make a demo set of pairs",
    "plan": "which layouts fit on so many GPUs",
    "check": "is a reward the same at every layout and in every batch?",
    "probe": "does training follow its labels?",
    "doctor": "what this machine has, and what is missing",
    "completion": "completion of verbs, flags and settings for your shell",
}
_MODULES = {"import": "import_nemo", "serve-critic": "serve_critic"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb that the command line begins with; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:
        importlib.import_module("nemo_aligner.cli.completion").complete()
    if arguments[:1] == ["--version"]:
        print(f"{PROGRAM} {nemo_aligner.__version__}")
        return 0
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    verb, rest = _split(arguments)
    if verb is None:
        return _usage(arguments)
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


def load(verb: str) -> Any:
    """The module of a verb."""
    name = _MODULES.get(verb, verb.replace(" ", "_"))
    return importlib.import_module(f"nemo_aligner.cli.{name}")


def _split(arguments: list[str]) -> tuple[str | None, list[str]]:
    for words in (2, 1):
        verb = " ".join(arguments[:words])
        if verb in VERBS:
            return verb, arguments[words:]
    return None, arguments


def _usage(arguments: list[str]) -> int:
    """All verbs for who asks for help, or what a wrong one may have been."""
    asked, first = " ".join(arguments[:2]), arguments[0] if arguments else "--help"
    group = {verb: about for verb, about in VERBS.items() if verb.split()[0] == first}
    if first in ("-h", "--help") or (group and arguments[1:] in ([], ["-h"], ["--help"])):
        print(f"usage: {PROGRAM} VERB [--help] ...\n")
        print("\n".join(f"  {verb:<13} {about}" for verb, about in (group or VERBS).items()))
        return 0
    wrong = asked if group else first
    print(f"{PROGRAM}: {wrong} is no verb{did_you_mean(wrong, [*VERBS])}", file=sys.stderr)
    print(f"{PROGRAM} --help lists them", file=sys.stderr)
    return 2
