"""The documents: their links lead somewhere, and their commands name what there is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.load import load_config
from nemo_aligner.config.serving import ServeConfig
from nemo_aligner.config.training import TrainConfig
from tests.tiny import ROOT

PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.md")]
    if path.is_file()
)
SCHEMAS = {
    "examples/train_reward_model.py": TrainConfig,
    "examples/evaluate_reward_model.py": EvaluateConfig,
    "examples/serve_reward_model.py": ServeConfig,
    "scripts/slurm/train_reward_model.sbatch": TrainConfig,
}
SCRIPT = re.compile(r"(?:examples|scripts|conf|tests|docs)/[\w./-]+\.(?:py|sh|sbatch|yaml)")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def commands(page: Path) -> list[list[str]]:
    """The words of every command in a page's code blocks that starts one of SCHEMAS."""
    found = []
    # Every other piece between fences is code; the first line of one may name its language.
    for block in re.split(r"^```", page.read_text(), flags=re.MULTILINE)[1::2]:
        for line in block.replace("\\\n", " ").splitlines():
            if any(script in line for script in SCHEMAS):
                found.append(shlex.split(line, comments=True))
    return found


def test_there_are_pages_with_commands() -> None:
    assert len(commands(ROOT / "README.md")) >= 4


@every_page
def test_commands_have_settings_that_load(page: Path) -> None:
    for words in commands(page):
        index = next(index for index, word in enumerate(words) if word in SCHEMAS)
        arguments = words[index + 1 :]
        if "--help" in arguments:
            continue
        load_config(SCHEMAS[words[index]], [str(argument) for argument in arguments])


@every_page
def test_named_files_are_there(page: Path) -> None:
    missing = [name for name in SCRIPT.findall(page.read_text()) if not (ROOT / name).exists()]
    assert not missing


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


HELPFUL = sorted(
    path
    for folder in ("examples", "scripts", "benchmarks")
    for path in (ROOT / folder).glob("*.py")
    if "argparse.ArgumentParser(" in path.read_text() or "run_verb(main" in path.read_text()
)
HELP = """
import runpy, sys
path, sys.argv[1:] = sys.argv[1], ["--help"]
try:
    runpy.run_path(path, run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize("path", HELPFUL, ids=lambda path: path.name)
def test_help_waits_for_no_torch(path: Path) -> None:
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{path.parent}", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", HELP, str(path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[-1] == "False"
    assert len(done.stdout.splitlines()) > 2


def test_the_architecture_page_names_every_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "nemo_aligner"
    missing = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if path.name != "__init__.py" and path.name not in text
    ]
    assert not missing


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
