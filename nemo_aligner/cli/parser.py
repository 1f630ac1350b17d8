"""Parsers of verbs: options with a suggestion for an unknown one, and settings as KEY=VALUE."""

from __future__ import annotations

import argparse
import math
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
from nemo_aligner.utils.processes import environment, is_first_rank, is_launched

PROGRAM = "nemo-aligner"
T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Parser of the options of one verb.

    Args:
        setting_keys: settings that the verb takes as ``key=value``.
        settings_are_flags: errors about a setting ``key`` name the flag ``--key`` instead.
    """

    def __init__(
        self,
        verb: str,
        description: str,
        setting_keys: Sequence[str] = (),
        *,
        settings_are_flags: bool = True,
        epilog: str | None = None,
    ) -> None:
        super().__init__(
            prog=f"{PROGRAM} {verb}",
            description=_wrapped(description),
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # An abbreviation would mean something else with the next flag that begins so.
            allow_abbrev=False,
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")
        self._setting_keys = setting_keys
        self._settings_are_flags = settings_are_flags

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options of a command line; an unfit one ends the process with exit code 2."""
        # argparse has no public list of its flags, but its help has them.
        known = re.findall(r"--[\w-]+", self.format_help())
        for word, following in pairwise([*argv, ""]):
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in known:
                hint = did_you_mean(flag, known) or self._as_setting(word, following)
                self.error(f"got {word}, which is not an option{hint}")
        # Settings may stand before, between and behind flags.
        options = self.parse_intermixed_args(argv)
        options.argv = list(argv)
        flags = known if self._settings_are_flags else []
        options.flags = {flag.lstrip("-").replace("-", "_") for flag in flags}
        return options

    def _as_setting(self, word: str, following: str) -> str:
        """Word the hint for a setting that was given as a flag, ``--lr 3`` or ``--lr=3``."""
        flag, _, value = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        known = self._setting_keys
        key = name if name in known else suggest_setting(name, known)
        if key is None:
            return ""
        if not value and not following.startswith("-") and "=" not in following:
            value = following
        return f"; settings have no dashes: {key}={value or 'VALUE'}{peer_unit(name, key)}"

    def error(self, message: str) -> NoReturn:
        """End the process: two lines on stderr, and exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help lists the options\n")


def _wrapped(text: str) -> str:
    """Paragraphs as wide as the terminal, at most 100 columns; commands stay as they are."""
    width = min(shutil.get_terminal_size().columns, 100) - 2
    return "\n\n".join(
        textwrap.indent(textwrap.dedent(part), "  ")
        if part.lstrip().startswith(PROGRAM)
        else textwrap.fill(part, width)
        for part in text.strip().split("\n\n")
    )


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return the end of an error about ``word``; empty if nothing is near."""
    near = suggestion(word, known)
    return "" if near is None else f"; did you mean {near}?"


def names(text: str) -> tuple[str, ...]:
    """``a, b`` as ``("a", "b")``, the type of ``--attributes``.

    Whether they fit is checked where it is known what they name.
    """
    return tuple(name.strip() for name in text.split(",")) if text.strip() else ()


def fraction(text: str) -> float:
    """A number between 0 and 1, neither of them."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number between 0 and 1")
    return value


def above_0(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number above 0")
    return value


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number above 0")
    return int(text)


# Verbs whose options are settings: ``--config FILE`` and ``section.key=value``.

_WIDTH = 100


def settings_parser(verb: str, description: str, schema: type, has_ranks: bool = True) -> Parser:
    """Build a parser of the settings of ``schema``, which its help lists."""
    parser = Parser(
        verb,
        description,
        [key.name for key in list_keys(schema)],
        settings_are_flags=False,
        epilog=f"settings and their defaults:\n\n{render_keys(schema)}",
    )
    # Also for verbs without --processes: their options are read by the same functions.
    parser.set_defaults(processes=None)
    if has_ranks:
        parser.add_argument(
            "--processes", type=positive, metavar="N",
            help="ranks to start on this machine, one per GPU (on several nodes: torchrun, srun)",
        )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, metavar="FILE",
        help="YAML file with settings, or the name of one in the package",
    )  # fmt: skip
    settings: Any = parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="settings, which override the file's"
    )
    settings.completer = lambda prefix, **unused: complete_setting(prefix, schema)
    return parser


def read_settings(schema: type[T], options: argparse.Namespace, needed: Sequence[str] = ()) -> T:
    """Read the settings of the command line; on a terminal, print a line while libraries load.

    Raises:
        ConfigError: see ``load_config``.
        SettingsError: one of ``needed`` is not set.
    """
    # Not above: doctor and quickstart parse their options by the standard library alone.
    from nemo_aligner.config.load import check_needed, load_with_notes

    config, notes = load_with_notes(schema, options.settings, options.config)
    check_needed(config, schema, needed)
    is_speaker = options.processes in (None, 1) and is_first_rank()
    if is_speaker and notes:
        print(_render_notes(notes), flush=True)
    if is_speaker and sys.stdout.isatty():
        # The libraries that come next take seconds to import.
        print("starting ...", flush=True)
    return config


def _render_notes(notes: Sequence[str]) -> str:
    """List what became of NeMo-Aligner's keys, in lines that fit a log."""
    wrap = textwrap.TextWrapper(
        _WIDTH, "  ", "    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(["settings with NeMo-Aligner's names:", *map(wrap.fill, notes)])


def starts_ranks(options: argparse.Namespace) -> bool:
    """Return True if this command must start several ranks to run on.

    Raises:
        ConfigError: it is a rank already.
    """
    if options.processes in (None, 1):
        return False
    if is_launched():
        raise ConfigError(f"processes: got {options.processes}, but a launcher started this one")
    return True


def start_ranks(verb: str, options: argparse.Namespace) -> int:
    """Run this command as ``options.processes`` ranks of this machine; its exit code."""
    from nemo_aligner.distributed.launch import run_ranks

    # Of a flag that is given twice the last counts.
    again = [*options.argv, "--processes=1"]
    return run_ranks(["-m", "nemo_aligner", verb, *again], options.processes, environment())


def complete_setting(prefix: str, schema: type) -> Iterable[str]:
    """List keys to complete, or the values of a key that has few."""
    name, is_set, _ = prefix.partition("=")
    if not is_set:
        return [f"{key.name}=" for key in list_keys(schema)]
    return [
        f"{name}={value}" for key in list_keys(schema) if key.name == name for value in key.choices
    ]
