"""The site of the docs: mkdocs makes it of every page, without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.environments import install, kept_environment, new_environment
from tests.tiny import ROOT


def requirements() -> tuple[str, ...]:
    """What the extra ``docs`` asks for."""
    (line,) = re.findall(r"^docs = \[(.+)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return tuple(re.findall(r'"([^"]+)"', line))


def test_links_of_a_page_stay_among_the_pages() -> None:
    """A file outside docs/ is named, not linked: the site has it not."""
    for page in (ROOT / "docs").rglob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).resolve().is_relative_to(ROOT / "docs"), page.name


def test_each_of_the_ten_tasks_fits_a_screen_or_two() -> None:
    text = (ROOT / "docs" / "tasks.md").read_text()
    listed = re.findall(r"^\d+\. \[([^\]]+)\]", text, flags=re.MULTILINE)
    tasks = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert listed == [task.splitlines()[0] for task in tasks]
    assert len(tasks) == 10
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
    # Nothing is fetched from other hosts when a page is opened.
    html = (tmp_path / "index.html").read_text()
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"https?://", html)
