"""Verbs whose options are settings: ``--config FILE`` and ``section.key=value``."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nemo_aligner.cli.parser import Parser, positive
from nemo_aligner.config.describe import list_keys, render_keys
from nemo_aligner.config.load import check_needed, load_with_notes
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.processes import environment, is_first_rank, is_launched

T = TypeVar("T")
_WIDTH = 100


def settings_parser(verb: str, description: str, schema: type, has_ranks: bool = True) -> Parser:
    """Build a parser of the settings of ``schema``; its help lists all of them."""
    parser = Parser(
        verb,
        description,
        [key.name for key in list_keys(schema)],
        settings_are_flags=False,
        epilog=f"settings and their defaults:\n\n{render_keys(schema)}",
    )
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
