"""The pages' links lead somewhere, and their commands have verbs and flags that exist."""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_aligner.cli.main import load
from nemo_aligner.config.compat import FILES
from nemo_aligner.config.describe import list_keys
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.gateway import GatewayRunConfig
from nemo_aligner.config.load import load_config
from nemo_aligner.config.serving import ServeConfig, ServeCriticConfig
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.contract.messages import messages_of
from nemo_aligner.contract.templates import BUILT_IN_TEMPLATES
from nemo_aligner.data import label_summary, report
from nemo_aligner.data.formats import FORMATS
from nemo_aligner.data.readers import ReaderConfig, parse_file
from tests.config.nemo_aligner_files import write_file
from tests.docs.pages import PAGES, commands, every_block, name_of, pieces, split_verb
from tests.harness.family_cases import CASES
from tests.harness.tiny import ROOT

SCHEMAS = {
    "train": TrainConfig,
    "probe": TrainConfig,
    "quickstart": TrainConfig,
    "evaluate": EvaluateConfig,
    "serve": ServeConfig,
    "serve-critic": ServeCriticConfig,
    "gateway": GatewayRunConfig,
}
SCRIPT = re.compile(r"(?:examples|scripts|conf|deploy|tests|docs)/[\w./-]+\.(?:py|sh|sbatch|yaml)")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def mentions(page: Path) -> list[list[str]]:
    """The words of every ``nemo-aligner ...`` in a page's lines; some are incomplete commands."""
    texts = [
        code.replace("\n", " ")
        for text in pieces(page)[::2]
        for code in re.findall(r"`nemo-aligner ([^`]+)`", text)
    ]
    return [text.split() for text in texts if not text.startswith("VERB")]


def test_there_are_pages_with_commands() -> None:
    assert len(commands(ROOT / "README.md")) >= 9


@every_page
def test_commands_are_what_the_verbs_take(page: Path, tmp_path: Path) -> None:
    for words in commands(page):
        if words[:1] in ([], ["VERB"]) or {"--help", "..."} & {*words} or "...]" in words[-1]:
            continue
        verb, arguments = split_verb(words)
        options = load(verb).new_parser().parse(arguments)
        if verb in SCHEMAS:
            file = getattr(options, "config", None)
            if file is not None and file.name in FILES:
                file = write_file(tmp_path, file.name)
            load_config(SCHEMAS[verb], options.settings, file)


@every_page
def test_mentioned_verbs_have_the_flags(page: Path) -> None:
    for words in mentions(page):
        if words[0].startswith("--"):
            continue
        verb, options = split_verb(words)
        if verb == "data":
            continue
        shown = load(verb).new_parser().format_help()
        assert [flag for flag in options if flag.startswith("--") and flag not in shown] == [], (
            words
        )


@every_page
def test_named_files_are_there(page: Path) -> None:
    missing = [name for name in SCRIPT.findall(page.read_text()) if not (ROOT / name).exists()]
    assert not missing


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


BENCHMARKS = sorted(
    path
    for path in (ROOT / "benchmarks").glob("*.py")
    if "argparse.ArgumentParser(" in path.read_text()
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


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_help_of_a_benchmark_waits_for_no_torch(path: Path) -> None:
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


def test_the_architecture_page_names_every_package_and_files_that_exist() -> None:
    text, package = (ROOT / "docs" / "architecture.md").read_text(), ROOT / "nemo_aligner"
    names = {path.stem for path in package.iterdir() if path.name[0] not in "_."}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []
    named = re.findall(r"`(\w+(?:/\w+)*/?(?:\w+\.py)?)`", text)
    files = [name for name in named if name.endswith((".py", "/"))]
    gone = [n for n in files if not (package / n).exists() and not (ROOT / n).exists()]
    assert len(files) > 15
    assert gone == []
    assert len(text.splitlines()) <= 120


def test_the_page_of_decoders_has_every_family() -> None:
    text = (ROOT / "docs" / "decoders.md").read_text()
    names = {case["model_type"] for case in CASES.values()}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_the_page_of_formats_shows_every_format() -> None:
    text = (ROOT / "docs" / "formats.md").read_text()
    for data_format in FORMATS.values():
        sample = "\n".join(json.dumps(line) for line in data_format.sample)
        assert f"`{data_format.name}`: " in text
        assert f"```\n{sample}\n```" in text


def test_the_records_on_the_page_of_data_are_read(tmp_path: Path) -> None:
    (records,) = [text for _, text in every_block(ROOT / "docs" / "data.md") if text[0] == "{"]
    path = tmp_path / "pairs.jsonl"
    path.write_text(records)
    plain, with_system = parse_file(str(path), ReaderConfig()).records
    roles = [[turn["role"] for turn in messages_of(text)] for text in with_system.texts]
    assert roles == [["system", "user", "assistant"]] * 2
    assert len(messages_of(plain.texts[0])) == 2


def test_the_page_of_data_explains_every_row_of_its_table() -> None:
    text, source = (ROOT / "docs" / "data.md").read_text(), inspect.getsource(report)
    source += inspect.getsource(label_summary)
    rows = [
        row.replace("{self.unit}", "tokens") for row in re.findall(r'yield f?"([^"]+)"', source)
    ]
    assert len(rows) > 15
    assert [name for name in (*rows, *report._DROPPED) if f"`{name}`" not in text] == []


def test_the_setting_of_templates_names_every_one() -> None:
    (template,) = [key for key in list_keys(TrainConfig) if key.name == "model.data.template"]
    assert all(name in template.help_text for name in BUILT_IN_TEMPLATES)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


# Largest number of words outside code blocks.
BUDGETS = {
    "README.md": 800,
    "docs/cookbook/": 400,
    "docs/getting_started.md": 800,
    "docs/benchmarks.md": 1600,
    "docs/quality.md": 1300,
    "docs/": 2700,
}
REFERENCE = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["PAGES"]
# Words that the pages do not use, and what they say instead.
REPLACED = {
    "company": "batch",
    "mixture": "mixture-of-experts (MoE) model",
    "beside": "next to",
    "rotation": "RoPE",
    "refused": "rejected",
    "as it stands": "unchanged, as it is",
    "beginning in common": "shared prefix",
}


def prose(page: Path) -> str:
    """The text of a page without its code."""
    return re.sub(r"`[^`\n]+`", "x", "".join(pieces(page)[::2]))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if name_of(page) not in REFERENCE], ids=name_of
)
def test_pages_keep_their_budgets_and_say_plain_words(page: Path) -> None:
    name, text = name_of(page), prose(page)
    budgets = [words for start, words in BUDGETS.items() if name.startswith(start)]
    if budgets:
        assert len(text.split()) <= budgets[0]
    outdated = {old for old in REPLACED if re.search(rf"\b{old}\b", text)}
    assert not outdated, {old: REPLACED[old] for old in outdated}


def test_the_documentation_is_short() -> None:
    pages = [page for page in PAGES if name_of(page).startswith("docs/")]
    total = sum(len(prose(page).split()) for page in pages if name_of(page) not in REFERENCE)
    assert total <= 34_000


@pytest.mark.parametrize("page", REFERENCE)
def test_generated_pages_are_up_to_date(page: str) -> None:
    """``python scripts/reference.py`` updates the pages."""
    assert (ROOT / page).read_text() == REFERENCE[page]()
