"""Every verb is a short file, says what it does at once, and imports torch only when it runs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_aligner.cli import key_reference
from nemo_aligner.cli.main import VERBS, load
from nemo_aligner.cli.reference import render
from tests.tiny import ROOT

MAX_LINES = 80
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
HEAVY = ("torch", "megatron", "transformers", "lightning", "pytriton")
HIDDEN = f"""
import sys
for name in {HEAVY}:
    sys.modules[name] = None
from nemo_aligner.cli.main import main
main(sys.argv[1:])
"""
every_verb = pytest.mark.parametrize("verb", VERBS)


@every_verb
def test_files_are_short(verb: str) -> None:
    assert len(Path(load(verb).__file__).read_text().splitlines()) <= MAX_LINES


@every_verb
def test_a_verb_has_a_parser_and_runs(verb: str) -> None:
    module = load(verb)
    assert module.new_parser.__annotations__ == {"return": "Parser"}
    assert module.run.__annotations__ == {"options": "argparse.Namespace", "return": "int"}


@every_verb
def test_help_waits_for_no_torch(verb: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, *verb.split(), "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: nemo-aligner {verb} ")


@every_verb
def test_every_option_says_what_it_is_for(verb: str) -> None:
    for action in load(verb).new_parser()._actions:
        assert action.help, action.option_strings or action.dest


def test_the_page_of_settings_is_what_help_prints() -> None:
    """``python -m nemo_aligner.cli.reference > docs/settings.md`` writes it anew."""
    assert (ROOT / "docs" / "settings.md").read_text() == render()


def test_the_page_of_nemo_aligners_keys_is_the_table_that_reads_them() -> None:
    """``python -m nemo_aligner.cli.key_reference`` writes it anew."""
    page = ROOT / "docs" / "migration" / "nemo_aligner_keys.md"
    assert page.read_text() == key_reference.render()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_only_runs_its_verb(path: Path) -> None:
    document, *_, imported, run = map(ast.unparse, ast.parse(path.read_text()).body)
    assert imported.startswith("try:\n    from nemo_aligner.cli.main import main\nexcept Module")
    assert run.startswith("if __name__ == '__main__':\n    sys.exit(main(['")
    assert len(document) > 20


def test_help_fits_a_terminal() -> None:
    """Of 80 columns; the page's own sentence around it may be longer."""
    shown = render().partition("```")[2]
    assert [line for line in shown.splitlines() if len(line) > 80] == []


def test_scripts_are_shell_only() -> None:
    assert [path.name for path in (ROOT / "scripts").rglob("*.py")] == []
