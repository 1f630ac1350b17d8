"""Completion of verbs, flags and settings with the Tab key."""

from __future__ import annotations

import argparse

import argcomplete

from nemo_aligner.cli import main
from nemo_aligner.cli.parser import PROGRAM, Parser

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
    shell = "bash" if options.shell == "zsh" else options.shell
    print(argcomplete.shellcode([PROGRAM], shell=shell))
    return 0


def complete() -> None:
    """Answer the shell, which has put the line so far into the environment; ends the process."""
    argcomplete.autocomplete(_all_verbs())


def _all_verbs() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(PROGRAM)
    groups = {"": root.add_subparsers()}
    for verb in main.VERBS:
        group, _, name = verb.rpartition(" ")
        if group not in groups:
            groups[group] = groups[""].add_parser(group).add_subparsers()
        own = main.load(verb).new_parser()
        groups[group].add_parser(name, parents=[own], add_help=False)
    return root
