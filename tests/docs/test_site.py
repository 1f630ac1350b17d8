"""The site contains every page; troubleshooting explains every error and exit code."""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys
from pathlib import Path

from nemo_aligner.cli.main import main, run_verb
from nemo_aligner.training.signals import RESUME_EXIT_CODE
from nemo_aligner.utils import errors
from tests.harness.environments import install, kept_environment, new_environment
from tests.harness.tiny import ROOT


def requirements() -> tuple[str, ...]:
    """The requirements of the extra ``docs``."""
    (line,) = re.findall(r"^docs = \[(.+)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return tuple(re.findall(r'"([^"]+)"', line))


def test_links_of_a_page_stay_among_the_pages() -> None:
    """Files outside docs/ are named, not linked, because the site does not contain them."""
    for page in (ROOT / "docs").rglob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).resolve().is_relative_to(ROOT / "docs"), page.name


def test_each_task_fits_a_screen_or_two() -> None:
    text = (ROOT / "docs" / "tasks.md").read_text()
    listed = re.findall(r"^\d+\. \[([^\]]+)\]", text, flags=re.MULTILINE)
    tasks = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert listed == [task.splitlines()[0] for task in tasks]
    assert len(tasks) > 4
    assert max(len(task.splitlines()) for task in tasks) <= 50


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        install(new_environment(folder, sys.executable), *requirements())

    mkdocs = kept_environment("docs", requirements(), make) / "bin" / "mkdocs"
    command = [str(mkdocs), "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING -" not in done.stderr
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "index.md"]
    for page in pages:
        name = page.relative_to(ROOT / "docs").with_suffix("")
        assert (tmp_path / name / "index.html").is_file()
    # An opened page loads nothing from other hosts.
    html = (tmp_path / "index.html").read_text()
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"https?://", html)


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
    codes = {
        main(["--version"]),
        main(["no-such-verb"]),
        run_verb(_fail, options),
        run_verb(_interrupt, options),
    }
    assert codes == {0, 1, 2, 130}
    codes.add(RESUME_EXIT_CODE)
    assert codes <= set(map(int, re.findall(r"^\| (\d+) \|", PAGE, flags=re.MULTILINE)))
