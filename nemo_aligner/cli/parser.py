"""Parser of a verb's options, which suggests a name for an unknown one."""

from __future__ import annotations

import argparse
import math
import re
import shutil
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

from nemo_aligner.config.describe import peer_unit, suggest_setting, suggestion

PROGRAM = "nemo-aligner"


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
            allow_abbrev=False,
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")
        self._setting_keys = setting_keys
        self._settings_are_flags = settings_are_flags

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options of a command line; an unfit one ends the process with exit code 2."""
        known = re.findall(r"--[\w-]+", self.format_help())
        for word, following in pairwise([*argv, ""]):
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in known:
                hint = did_you_mean(flag, known) or self._as_setting(word, following)
                self.error(f"got {word}, which is not an option{hint}")
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
