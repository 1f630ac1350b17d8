"""docs/troubleshooting.md has every kind of error, and the exit codes of commands."""

from __future__ import annotations

import argparse
import inspect
import re

from nemo_aligner import errors
from nemo_aligner.cli.main import main
from nemo_aligner.cli.running import run_verb
from nemo_aligner.training.stop import GO_ON_EXIT_CODE
from tests.tiny import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def test_every_kind_of_error_has_a_section_and_no_other_has() -> None:
    kinds = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }
    headings = re.findall(r"^### (\w+Error)$", PAGE, flags=re.MULTILINE)
    assert sorted(headings) == sorted(kinds)


def _fail(options: argparse.Namespace) -> int:
    raise errors.DataError("pairs.jsonl:3: no JSON")


def _interrupt(options: argparse.Namespace) -> int:
    raise KeyboardInterrupt


def test_the_exit_codes_of_commands_have_rows() -> None:
    options = argparse.Namespace(debug=False, flags=set())
    found = {
        main(["--version"]),
        main(["no-such-verb"]),
        run_verb(_fail, options),
        run_verb(_interrupt, options),
    }
    assert found == {0, 1, 2, 130}
    found.add(GO_ON_EXIT_CODE)
    assert found <= set(map(int, re.findall(r"^\| (\d+) \|", PAGE, flags=re.MULTILINE)))
