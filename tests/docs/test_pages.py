"""The documents: their links lead somewhere, and their commands name what there is."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from nemo_aligner import errors
from nemo_aligner.cli.main import load, main
from nemo_aligner.cli.running import run_verb
from nemo_aligner.config.critic import ServeCriticConfig
from nemo_aligner.config.describe import list_keys
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.gateway import GatewayRunConfig
from nemo_aligner.config.load import load_config
from nemo_aligner.config.nemo_aligner_keys import FILES
from nemo_aligner.config.serving import ServeConfig
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data import report
from nemo_aligner.data.formats import FORMATS
from nemo_aligner.errors import AlignerError
from nemo_aligner.text.templates import BUILT_IN_TEMPLATES
from nemo_aligner.training.stop import GO_ON_EXIT_CODE
from tests.config.nemo_aligner_files import write_file
from tests.docs.pages import PAGES, commands, name_of, pieces, split_verb
from tests.environments import install, kept_environment, new_environment
from tests.tiny import ROOT

SCHEMAS = {
    "train": TrainConfig,
    "probe": TrainConfig,
    "quickstart": TrainConfig,
    "evaluate": EvaluateConfig,
    "serve": ServeConfig,
    "serve-critic": ServeCriticConfig,
    "gateway": GatewayRunConfig,
}
FILE = re.compile(r"(?:examples|scripts|conf|deploy|tests|docs)/[\w./-]+\.(?:py|sh|sbatch|yaml)")


def mentions(page: Path) -> list[list[str]]:
    """The words of every ``nemo-aligner ...`` within a page's lines; some are a beginning."""
    texts = [
        code.replace("\n", " ")
        for text in pieces(page)[::2]
        for code in re.findall(r"`nemo-aligner ([^`]+)`", text)
    ]
    return [text.split() for text in texts if not text.startswith("VERB")]


def test_page_commands_are_what_the_verbs_take(tmp_path: Path) -> None:
    given = [(page, words) for page in PAGES for words in commands(page)]
    assert len(given) > 60
    for page, words in given:
        if words[:1] in ([], ["VERB"]) or {"--help", "..."} & {*words} or "...]" in words[-1]:
            continue
        verb, arguments = split_verb(words)
        try:
            options = load(verb).new_parser().parse(arguments)
            if verb in SCHEMAS:
                file = getattr(options, "config", None)
                if file is not None and file.name in FILES:
                    file = write_file(tmp_path, file.name)
                load_config(SCHEMAS[verb], options.settings, file)
        except (SystemExit, AlignerError) as error:
            raise AssertionError(f"{name_of(page)}: {shlex.join(words)}: {error}") from error


def test_page_mentions_of_verbs_have_flags_that_there_are() -> None:
    wrong = []
    for page in PAGES:
        for words in mentions(page):
            if words[0].startswith("--"):
                continue
            verb, rest = split_verb(words)
            if verb == "data":
                continue
            shown = load(verb).new_parser().format_help()
            if any(flag.startswith("--") and flag not in shown for flag in rest):
                wrong.append((name_of(page), words))
    assert wrong == []


def test_page_links_and_names_of_files_lead_somewhere() -> None:
    """A page of docs/ links pages alone: the site has no other files."""
    missing = []
    for page in PAGES:
        text = page.read_text()
        missing += [
            (name_of(page), name) for name in FILE.findall(text) if not (ROOT / name).exists()
        ]
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            path, docs = (page.parent / target).resolve(), ROOT / "docs"
            if "://" in target:
                continue
            if not path.exists() or (page.is_relative_to(docs) and not path.is_relative_to(docs)):
                missing.append((name_of(page), target))
    assert missing == []


BENCHMARKS = sorted(
    path
    for path in (ROOT / "benchmarks").glob("*.py")
    if "argparse.ArgumentParser(" in path.read_text()
)
HELP = """
import os, runpy, sys
sys.modules["torch"] = None
for path in sys.argv[1:]:
    sys.argv, sys.path[0] = [path, "--help"], os.path.dirname(path)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (path, end.code)
"""


def test_help_of_benchmarks_waits_for_no_torch() -> None:
    """Of all in one process, in which torch cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", HELP, *map(str, BENCHMARKS)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in BENCHMARKS if f"usage: {path.name}" not in done.stdout] == []


def test_page_of_architecture_names_every_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "nemo_aligner"
    missing = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if path.name != "__init__.py" and path.name not in text
    ]
    assert not missing


def test_page_of_data_shows_every_format() -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    for each in FORMATS.values():
        sample = "\n".join(json.dumps(line) for line in each.sample)
        assert f"`{each.name}`: " in text
        assert f"```\n{sample}\n```" in text


def test_page_of_data_explains_every_row_of_its_table() -> None:
    text, source = (ROOT / "docs" / "data.md").read_text(), inspect.getsource(report)
    rows = [
        row.replace("{self.unit}", "tokens") for row in re.findall(r'yield f?"([^"]+)"', source)
    ]
    assert len(rows) > 15
    assert [name for name in (*rows, *report._DROPPED) if f"`{name}`" not in text] == []


def test_setting_of_templates_names_every_one() -> None:
    (template,) = [key for key in list_keys(TrainConfig) if key.name == "model.data.template"]
    assert all(name in template.about for name in BUILT_IN_TEMPLATES)


def test_page_of_ten_tasks_has_each_on_a_screen_or_two() -> None:
    text = (ROOT / "docs" / "tasks.md").read_text()
    listed = re.findall(r"^\d+\. \[([^\]]+)\]", text, flags=re.MULTILINE)
    tasks = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert listed == [task.splitlines()[0] for task in tasks]
    assert len(tasks) == 10
    assert max(len(task.splitlines()) for task in tasks) <= 50


def _fail(options: argparse.Namespace) -> int:
    raise errors.DataError("pairs.jsonl:3: no JSON")


def _interrupt(options: argparse.Namespace) -> int:
    raise KeyboardInterrupt


def test_page_of_troubleshooting_has_every_kind_of_error_and_exit_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    kinds = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }
    assert sorted(re.findall(r"^### (\w+Error)$", text, flags=re.MULTILINE)) == sorted(kinds)
    options = argparse.Namespace(debug=False, flags=set())
    found = {
        main(["--version"]),
        main(["no-such-verb"]),
        run_verb(_fail, options),
        run_verb(_interrupt, options),
    }
    assert found == {0, 1, 2, 130}
    found.add(GO_ON_EXIT_CODE)
    assert found <= set(map(int, re.findall(r"^\| (\d+) \|", text, flags=re.MULTILINE)))


def test_site_of_the_docs_is_built_without_a_warning(tmp_path: Path) -> None:
    (line,) = re.findall(r"^docs = \[(.+)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    wanted = tuple(re.findall(r'"([^"]+)"', line))

    def make(folder: Path) -> None:
        install(new_environment(folder, sys.executable), *wanted)

    mkdocs = kept_environment("docs", wanted, make) / "bin" / "mkdocs"
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
