"""Every verb is a short file with one ``main``, and imports torch only when it runs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import ROOT

CLI = ROOT / "nemo_aligner" / "cli"
NO_VERBS = {"__init__", "common", "plan_flags"}
VERBS = sorted(path.stem for path in CLI.glob("*.py") if path.stem not in NO_VERBS)
MAX_LINES = 80
ENTRY_POINTS = sorted([*(ROOT / "scripts").glob("*.py"), *(ROOT / "examples").glob("*.py")])
HIDDEN = """
import sys
for name in ("torch", "megatron", "transformers", "lightning"):
    sys.modules[name] = None
import importlib
for verb in sys.argv[1:]:
    importlib.import_module(f"nemo_aligner.cli.{verb}")
"""


@pytest.mark.parametrize("path", sorted(CLI.glob("*.py")), ids=lambda path: path.stem)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_takes_its_arguments_and_gives_an_exit_code(verb: str) -> None:
    annotations = importlib.import_module(f"nemo_aligner.cli.{verb}").main.__annotations__
    assert annotations == {"argv": "Sequence[str]", "return": "int"}


def test_verbs_are_imported_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, *VERBS],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", ENTRY_POINTS, ids=lambda path: path.stem)
def test_an_entry_point_only_runs_its_verb(path: Path) -> None:
    statements = [
        node for node in ast.parse(path.read_text()).body if not isinstance(node, ast.ImportFrom)
    ]
    document, imported, run = map(ast.unparse, statements)
    assert imported == "import sys"
    assert run.startswith("if __name__ == '__main__':\n    sys.exit(run_verb(main")
    assert len(document) > 20
