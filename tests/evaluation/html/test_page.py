"""The page of a report: every section is there, and what others wrote is text."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.evaluation.html.page import MOST_REPORTED, render_page, seen, write_page
from nemo_aligner.evaluation.html.reported import Reported
from nemo_aligner.evaluation.robustness import ScoredPairs, check_robustness
from nemo_aligner.evaluation.robustness_report import robustness_json
from tests.evaluation.html.folders import EVIL, SECTIONS, pair_rows, write_lines, write_run

LIMIT = 3_000_000
VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """Tags, ids and text of a page, whose tags have to nest."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.titles: list[str] = []
        self.texts: list[str] = []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [str(value) for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        self.texts.append(data)
        if self.open and self.open[-1] == "title":
            self.titles.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page(write_page([run], run / "report.html").read_text(encoding="utf-8"))


def test_every_section_is_there_and_none_twice(page: Page) -> None:
    assert [name for name in page.ids if name in SECTIONS] == list(SECTIONS)
    assert len(page.ids) == len(set(page.ids))
    links = [value for name, value in page.attributes if name == "href" and str(value)[0] == "#"]
    assert {f"#{name}" for name in SECTIONS} <= set(links)


def test_what_others_wrote_is_text(page: Page) -> None:
    assert not {"script", "img", "iframe", "object", "i"} & set(page.tags)
    assert page.tags.count("style") == 1
    # The texts and the prompt of a mistake, a setting, a path, the contract, a malformed record.
    assert page.text.count(EVIL) >= 6


def test_nothing_is_asked_for_from_anywhere(page: Page) -> None:
    for name, value in page.attributes:
        assert not name.startswith("on"), f"{name}={value}"
        if name in ("src", "href", "xlink:href", "action"):
            assert value == "data:," or str(value).startswith("#"), f"{name}={value}"
    policies = [str(value) for name, value in page.attributes if name == "content"]
    assert any("default-src 'none'" in policy and "script" not in policy for policy in policies)


def test_figures_have_texts_and_tell_values(page: Page, run: Path) -> None:
    assert page.tags.count("figure") >= 9
    assert "validation-held, step 40: 0.7" in page.titles
    assert any("of 60 pairs" in title and "all" in title for title in page.titles)
    content = (run / "report.html").read_text(encoding="utf-8")
    pointed_at = set(re.findall(r'(?:href="#|url\(#)([^")]+)', content))
    assert len(pointed_at) > 20
    assert pointed_at <= set(page.ids)


def test_what_the_numbers_say_stands_in_tables(page: Page) -> None:
    text = " ".join(page.text.split())
    assert "accuracy 0.7 at step 40 (validation-held)" in text
    assert "always the longer reply" in text
    assert "figures are of 60 of 600 records, drawn once" in text
    assert "margin -14.000: chosen -7.000, rejected 7.000" in text
    assert "host memory" in text
    assert "2.0 GB" in text
    assert "It was not checked" in text


def test_of_equal_validations_the_one_with_the_lower_loss_is_the_best(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    rows = [
        {"step": step, "validation-held/accuracy": accuracy, "validation-held/loss": loss}
        for step, accuracy, loss in ((1, 0.5, 0.1), (2, 1.0, 0.3), (3, 1.0, 0.2), (4, 1.0, 0.4))
    ]
    write_lines(run / "metrics.jsonl", rows)
    page = write_page([run], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "accuracy 1 at step 3 (validation-held)" in page


def test_lengths_of_less_than_a_decade_have_ticks_with_plain_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", words=3)  # 5 to 15 characters
    page = write_page([run], tmp_path / "page.html").read_text(encoding="utf-8")
    length = page[page.index('id="length"') : page.index('id="robustness"')]
    assert "mathdefault" not in page
    assert re.search(r">5</text>|>10</text>|>20</text>", length)


def test_the_same_run_makes_the_same_page(run: Path, tmp_path: Path) -> None:
    first, second = (write_page([run], tmp_path / f"{n}.html").read_bytes() for n in range(2))
    assert first == second


def test_two_runs_are_overlaid(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "second", seed=3)
    page = Page(write_page([run, other], tmp_path / "both.html").read_text(encoding="utf-8"))
    text = " ".join(page.text.split())
    for name in ("first", "second"):
        assert f"{name}, train" in text
        assert f"{name}, validation-held" in text
    assert "1 settings differ" in text
    assert [name for name in page.ids if name in SECTIONS] == list(SECTIONS)


def test_a_run_and_an_evaluation_stand_side_by_side(run: Path, tmp_path: Path) -> None:
    rewards = write_lines(tmp_path / "other.jsonl", pair_rows(50, seed=5))
    content = {
        "checkpoint": "m.nemo",
        "contract": "def456",
        "data": "x.jsonl",
        "kind": "comparison",
    }
    content |= {"metrics": {"accuracy": 0.71, "temperature": None}, "counts": {"kept": 50}}
    (tmp_path / "other.json").write_text(json.dumps(content))
    text = Page(write_page([run, rewards], tmp_path / "p.html").read_text(encoding="utf-8")).text
    assert "0.71" in text
    assert "The contracts differ" in text
    assert "Reward against length" in text


def test_a_run_that_was_killed_early_has_a_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "killed")
    shutil.rmtree(folder / "heldout")
    (folder / "run_facts.json").unlink()
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.7}\n{"step": 2, "tra')
    page = Page(write_page([folder], tmp_path / "p.html").read_text(encoding="utf-8"))
    assert [name for name in page.ids if name in SECTIONS] == list(SECTIONS)
    assert "There are no held-out rewards here" in page.text
    assert "loss: what is trained" in page.text


def test_robustness_is_shown_where_it_was_checked(run: Path, tmp_path: Path) -> None:
    said = [{"role": "assistant", "content": "Yes."}]
    pairs = ScoredPairs([(said, said)] * 3, np.array([[2.0, 1.0]] * 3))
    found = check_robustness(pairs, lambda texts: np.full(len(texts), 1.5), lambda text: True, 2)
    folder, evaluated = write_run(tmp_path / "robust"), tmp_path / "evaluated.json"
    content = {"metrics": {}, "data": "x.jsonl", "robustness": robustness_json(found)}
    for reported, path in ((folder, folder / "robustness.json"), (evaluated, evaluated)):
        path.write_text(json.dumps(content))
        text = Page(write_page([reported], tmp_path / "p.html").read_text(encoding="utf-8")).text
        assert "2 of 3 pairs; the standard deviation (sd) of their margins is 0.0000" in text
        assert text.count("politeness") == 2
        assert "1.000 (0.342 to 1.000)" in text
        assert ("what is trained" in text) == (reported is folder)
    (folder / "robustness.json").write_text(json.dumps({"robustness": [{"change": "x"}]}))
    with pytest.raises(DataError, match=r"robustness\.json: robustness: wanted what evaluate's"):
        write_page([folder], tmp_path / "p.html")


def test_ratings_have_figures_and_mistakes_of_their_own(tmp_path: Path) -> None:
    rows = [
        {
            "record": f"r:{n}",
            "rewards": {"helpful": n / 10, "brief": 1.0},
            "labels": {"helpful": n % 5, "brief": None},
            "texts": {"response": f"{EVIL if n == 4 else ''} reply {n}"},
        }
        for n in range(30)
    ]
    path = write_lines(tmp_path / "rated.jsonl", rows)
    page = Page(write_page([path], tmp_path / "p.html").read_text(encoding="utf-8"))
    assert "helpful: rated" in page.text
    assert "helpful: reward 0.400, label 4.000" in page.text
    assert "script" not in page.tags


def test_as_many_runs_as_colours_stay_below_the_limit(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / str(n), steps=1000, seed=n, words=20_000) for n in range(MOST_REPORTED)
    ]
    page = write_page(runs, tmp_path / "all.html")
    assert page.stat().st_size < LIMIT
    assert "The rest of it is left out here." in page.read_text(encoding="utf-8")


def test_more_runs_than_colours_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 9, wanted 1 to 8"):
        render_page([Reported("x", "evaluation")] * 9)


def test_what_cannot_be_seen_is_shown() -> None:
    assert seen("a\u202eb\x00c\nd") == "a\\u202eb\\u0000c\nd"


def test_a_text_that_is_no_unicode_is_written(tmp_path: Path) -> None:
    rows = pair_rows(20)
    rows[0]["texts"]["rejected"][-1]["content"] = "half \ud800 of it"
    path = write_lines(tmp_path / "half.jsonl", rows)
    assert "half ? of it" in write_page([path], tmp_path / "p.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("none", None, "none: it is not there, wanted the folder of a training run"),
        ("a.txt", "x", "a.txt: got a file .txt, wanted the folder"),
        ("a.jsonl", "", "a.jsonl: it is empty, wanted what evaluate's output_rewards writes"),
        (
            "a.jsonl",
            '{"prompt": 1}',
            "a.jsonl:1: got .* wanted a pair of",
        ),
        ("a.jsonl", "{", "a.jsonl"),
        ("a.json", '{"x": 1}', "a.json: got keys x, wanted the folder"),
        ("a.json", "[1]", "a.json: got list, wanted a JSON object"),
    ],
)
def test_what_is_no_run_is_refused(
    name: str, content: str | None, wanted: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=wanted):
        write_page([tmp_path / name], tmp_path / "p.html")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"got a folder without config\.yaml, wanted"):
        write_page([tmp_path], tmp_path / "p.html")
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with pytest.raises(DataError, match=r"got a folder without metrics\.jsonl, wanted"):
        write_page([tmp_path], tmp_path / "p.html")
