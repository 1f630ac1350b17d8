"""Flags that verbs of data have in common."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from nemo_aligner.cli.parser import Parser, names

_SETTING = re.compile(r"\w+(\.\w+)*=.*")


def data_file(text: str) -> str:
    """A file's name, the type of arguments; a setting is not taken for one."""
    if _SETTING.fullmatch(text) and not Path(text).exists():
        raise argparse.ArgumentTypeError(
            f"got the setting {text}, wanted a file: this verb takes options, as --format NAME or "
            "--prompt-key FIELD"
        )
    return text


def add_format(parser: Parser) -> None:
    """How a file is read: its format, and the labels of ratings."""
    parser.add_argument(
        "--format", default="auto", metavar="NAME", help="as model.data.format (default: auto)"
    )
    for flag in ("--prompt-key", "--chosen-key", "--rejected-key"):
        setting = flag[2:].replace("-", "_")
        parser.add_argument(flag, metavar="FIELD", help=f"as model.data.{setting}")
    parser.add_argument(
        "--attributes", type=names, default=(), metavar="A,B", help="label columns of ratings"
    )
    parser.add_argument(
        "--loss-mask-val", type=float, default=-100.0, metavar="NUMBER",
        help="a missing label (default: -100)",
    )  # fmt: skip
