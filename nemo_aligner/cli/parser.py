"""Argument parsing for all verbs: options, settings as KEY=VALUE, and starting of ranks.

``Parser`` is argparse with suggestions for unknown options. ``settings_parser`` and
``read_settings`` serve the verbs whose options are settings.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from nemo_aligner.config.describe import (
    list_keys,
    peer_unit,
    render_keys,
    suggest_setting,
    suggestion,
)
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.processes import environment, find_process, is_first_rank

PROGRAM = "nemo-aligner"
T = TypeVar("T")
# A flag, or a setting that was written as one (``--model.optim.lr``).
_FLAG = re.compile(r"--[\w.-]*\w[\w.-]*")


class Parser(argparse.ArgumentParser):
    """Parser of the options of one verb.

    Args:
        setting_keys: keys of the settings that the verb accepts as ``key=value``.
        settings_are_flags: whether the verb has flags for settings: then errors about a setting
            ``key`` name the flag ``--key``.

    Attributes:
        schema: dataclass of the settings that the help text lists; None if it lists none.
    """

    schema: type | None = None

    def format_help(self) -> str:
        """Render the help text, which ends with the settings, if there are any."""
        text = super().format_help()
        if self.schema is None:
            return text
        return f"{text}\nsettings and their defaults:\n\n{render_keys(self.schema)}\n"

    def __init__(
        self,
        verb: str,
        description: str,
        setting_keys: Sequence[str] = (),
        *,
        settings_are_flags: bool = True,
    ) -> None:
        super().__init__(
            prog=f"{PROGRAM} {verb}",
            description=_wrap_paragraphs(description),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # Flags cannot be abbreviated: a new flag with the same prefix would make it ambiguous.
            allow_abbrev=False,
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")
        self._setting_keys = setting_keys
        self._settings_are_flags = settings_are_flags

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse a command line; an invalid one ends the process with exit code 2."""
        # argparse has no public list of its flags, so they are parsed from its help text.
        flags = re.findall(r"--[\w-]+", super().format_help())
        options_end = _find_end_of_options(argv)
        for word, following in pairwise([*argv[:options_end], ""]):
            flag = word.partition("=")[0]
            # Other words, such as a text to score, may also begin with dashes.
            if _FLAG.fullmatch(flag) and flag not in flags:
                hint = did_you_mean(flag, flags) or self._suggest_setting(word, following)
                self.error(f"got {word}, which is not an option{hint}")
        # Settings may come before, between and after flags; ``parse_args`` would not allow that.
        # But ``parse_intermixed_args`` takes words after ``--`` for options.
        parse = self.parse_args if options_end < len(argv) else self.parse_intermixed_args
        options = parse(argv)
        options.argv = list(argv)
        flags_in_errors = flags if self._settings_are_flags else []
        options.flags = {flag.lstrip("-").replace("-", "_") for flag in flags_in_errors}
        return options

    def _suggest_setting(self, word: str, following: str) -> str:
        """Return a hint for a setting that was written as a flag: ``--lr 3`` or ``--lr=3``.

        Args:
            word: the flag, with its value if there is an equals sign.
            following: the next word of the command line, which may be the value.
        """
        flag, _, value = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        keys = self._setting_keys
        key = name if name in keys else suggest_setting(name, keys)
        if key is None:
            return ""
        if not value and not following.startswith("-") and "=" not in following:
            value = following
        return f"; settings have no dashes: {key}={value or 'VALUE'}{peer_unit(name, key)}"

    def error(self, message: str) -> NoReturn:
        """Print the error and a line about ``--help`` to stderr, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help lists the options\n")


def _find_end_of_options(argv: Sequence[str]) -> int:
    """Return the index of ``--``, after which no word is an option; without it, that of the end."""
    return list(argv).index("--") if "--" in argv else len(argv)


def _wrap_paragraphs(text: str) -> str:
    """Wrap paragraphs to the terminal's width, at most 100 columns; commands are not wrapped."""
    width = min(shutil.get_terminal_size().columns, 100) - 2
    return "\n\n".join(
        textwrap.indent(textwrap.dedent(part), "  ")
        if part.lstrip().startswith(PROGRAM)
        else textwrap.fill(part, width)
        for part in text.strip().split("\n\n")
    )


def did_you_mean(word: str, candidates: Sequence[str]) -> str:
    """Return the end of an error about an unknown word, which suggests the nearest candidate.

    It is empty if no candidate is similar.
    """
    near = suggestion(word, candidates)
    return "" if near is None else f"; did you mean {near}?"


def names(text: str) -> tuple[str, ...]:
    """Argparse type of ``--attributes``: parse a list such as ``a, b`` to ``("a", "b")``."""
    return tuple(name.strip() for name in text.split(",")) if text.strip() else ()


def fraction(text: str) -> float:
    """Argparse type for a number between 0 and 1, both excluded."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number between 0 and 1")
    return value


def above_0(text: str) -> float:
    """Argparse type for a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number above 0")
    return value


def positive(text: str) -> int:
    """Argparse type for a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number above 0")
    return int(text)


def whole(text: str) -> int:
    """Argparse type for a whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number, 0 or more")
    return int(text)


# Verbs whose options are settings: ``--config FILE`` and ``section.key=value``.

_WIDTH = 100


def settings_parser(verb: str, description: str, schema: type, has_ranks: bool = True) -> Parser:
    """Build the parser of a verb whose options are the settings of ``schema``.

    Args:
        has_ranks: whether the verb has the option ``--processes``.
    """
    parser = Parser(
        verb,
        description,
        [key.name for key in list_keys(schema)],
        settings_are_flags=False,
    )
    parser.schema = schema
    # This default is also for verbs without --processes: ``starts_ranks`` reads ``processes``.
    parser.set_defaults(processes=None)
    if has_ranks:
        add_processes(parser)
    parser.add_argument(
        "--config", type=Path, metavar="FILE",
        help="YAML file with settings, or the name of one in the package",
    )  # fmt: skip
    settings: Any = parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="settings, which override the file's"
    )
    settings.completer = lambda prefix, **unused: complete_setting(prefix, schema)
    return parser


def add_processes(parser: Parser) -> None:
    """Add the option ``--processes``, which ``starts_ranks`` reads."""
    parser.add_argument(
        "--processes", type=positive, metavar="N",
        help="ranks to start on this machine, one per GPU (on several nodes: torchrun, srun)",
    )  # fmt: skip


def read_settings(schema: type[T], options: argparse.Namespace, needed: Sequence[str] = ()) -> T:
    """Load the settings of the command line, and print notes about NeMo-Aligner's keys.

    Raises:
        ConfigError: see ``load_config``.
        SettingsError: one of the settings ``needed`` is not set.
    """
    # Imported here, because doctor and quickstart must work with only the standard library.
    from nemo_aligner.config.load import check_needed, load_with_notes

    config, notes = load_with_notes(schema, options.settings, options.config)
    check_needed(config, schema, needed)
    should_print = options.processes in (None, 1) and is_first_rank()
    if should_print and notes:
        print(_render_notes(notes), flush=True)
    if should_print and sys.stdout.isatty():
        # After this the verb imports torch, which takes seconds.
        print("starting ...", flush=True)
    return config


def _render_notes(notes: Sequence[str]) -> str:
    """Render the notes about NeMo-Aligner's keys, wrapped for a log."""
    wrap = textwrap.TextWrapper(
        _WIDTH, "  ", "    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(["settings with NeMo-Aligner's names:", *map(wrap.fill, notes)])


def starts_ranks(options: argparse.Namespace) -> bool:
    """Return whether this process must start ranks that run the verb, because of ``--processes``.

    In an interactive shell of Slurm (``srun --pty bash``) every command is the only task of a step,
    and may start ranks. They do not read that step's variables, because ``run_ranks`` sets those of
    torchrun, which come first.

    Raises:
        ConfigError: a launcher has started this process as one of several ranks already.
    """
    if options.processes in (None, 1):
        return False
    if find_process(os.environ).world_size > 1:
        raise ConfigError(
            f"processes: got {options.processes}, but torchrun or srun has started this process "
            "already. Omit --processes"
        )
    return True


def start_ranks(verb: str, options: argparse.Namespace) -> int:
    """Run this command as ``options.processes`` ranks on this machine; return the exit code."""
    from nemo_aligner.distributed.launch import run_ranks

    # The added --processes=1 overrides the user's --processes: argparse takes the last one.
    end = _find_end_of_options(options.argv)
    rank_arguments = [*options.argv[:end], "--processes=1", *options.argv[end:]]
    command = ["-m", "nemo_aligner", verb, *rank_arguments]
    return run_ranks(command, options.processes, environment())


def complete_setting(prefix: str, schema: type) -> Iterable[str]:
    """List completions for the shell: keys or, after ``key=``, the values of an enum or bool."""
    name, is_set, _ = prefix.partition("=")
    if not is_set:
        return [f"{key.name}=" for key in list_keys(schema)]
    return [
        f"{name}={value}" for key in list_keys(schema) if key.name == name for value in key.choices
    ]
