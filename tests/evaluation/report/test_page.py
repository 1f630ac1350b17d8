"""The page of a report: all sections and figures are there, and untrusted text is escaped."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_aligner.cli.evaluate import report_parser, run_report
from nemo_aligner.contract.messages import reply_of
from nemo_aligner.data.records import Comparison, Origin, Rating
from nemo_aligner.evaluation.evaluate import evaluate_comparisons, evaluate_ratings
from nemo_aligner.evaluation.predictions import Prediction, Predictions
from nemo_aligner.evaluation.report.figures import heldout_sets
from nemo_aligner.evaluation.report.page import (
    MAX_REPORTS,
    _judge_pairs,
    escape_invisible,
    render_page,
    write_page,
)
from nemo_aligner.evaluation.report.run_report import RunReport, read_report
from nemo_aligner.evaluation.report.training_sections import build_summary
from nemo_aligner.evaluation.robustness import check_robustness, robustness_json
from nemo_aligner.evaluation.run import report_evaluation
from nemo_aligner.evaluation.run_task import run_task
from nemo_aligner.evaluation.tasks import find_task
from nemo_aligner.metrics.table import find_metric
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.data.files import write
from tests.evaluation.refusals import refusal
from tests.evaluation.report.folders import EVIL, SECTIONS, pair_rows, write_run
from tests.harness.contracts import Contracts
from tests.harness.scorers import measured, source_of

LIMIT = 3_000_000
VOID = {"meta", "link", "br", "img", "wbr"}


def written_page(runs: Sequence[Path], output: Path) -> Path:
    """Write the report of runs to ``output``, and return its path."""
    write_page(runs, output)
    return output


class Page(HTMLParser):
    """Collects the tags, ids and texts of a page, and checks that its tags are nested correctly."""

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
    def sections(self) -> list[str]:
        """The ids of all sections, in order; ids in the figures have a hyphen or a number."""
        return [name for name in self.ids if name.isalpha()]

    @property
    def text(self) -> str:
        return "".join(self.texts)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page(written_page([run], run / "report.html").read_text(encoding="utf-8"))


def test_page_has_every_section_and_figures_that_tell_values(page: Page, run: Path) -> None:
    assert page.sections == list(SECTIONS)
    assert len(page.ids) == len(set(page.ids))
    links = [str(value)[1:] for name, value in page.attributes if name == "href"]
    assert links[1 : 1 + len(SECTIONS)] == list(SECTIONS)
    assert page.tags.count("figure") >= 9
    assert "validation-held, step 40: 70.0%" in page.titles
    assert any("of 60 pairs" in title and "all" in title for title in page.titles)
    content = (run / "report.html").read_text(encoding="utf-8")
    pointed_at = set(re.findall(r'(?:href="#|url\(#)([^")]+)', content))
    assert len(pointed_at) > 20
    assert pointed_at <= set(page.ids)


def test_page_shows_what_others_wrote_as_text_and_asks_for_nothing(page: Page) -> None:
    assert not {"script", "img", "iframe", "object", "i"} & set(page.tags)
    assert page.tags.count("style") == 1
    # The texts and the prompt of a mistake, a setting, a path, the contract, a malformed record.
    assert page.text.count(EVIL) >= 6
    assert escape_invisible("a\u202eb\x00c\nd") == "a\\u202eb\\u0000c\nd"
    for name, value in page.attributes:
        assert not name.startswith("on"), f"{name}={value}"
        if name in ("src", "href", "xlink:href", "action"):
            assert value == "data:," or str(value).startswith("#"), f"{name}={value}"
    policies = [str(value) for name, value in page.attributes if name == "content"]
    assert any("default-src 'none'" in policy and "script" not in policy for policy in policies)


def test_page_has_tables_of_what_the_numbers_say(page: Page) -> None:
    text = " ".join(page.text.split())
    assert "accuracy 70.0% at step 40 (validation-held)" in text
    assert "base modelmodels/base.nemo" in text
    assert "(chat_pairs), 60 of 60 records used" in text
    assert text.count("abc123") == 1  # the hash of the contract
    assert "always the longer reply" in text
    assert "margin -14.000: chosen -7.000, rejected 7.000" in text
    assert "host memory" in text
    assert "2.0 GB" in text
    reason = "Robustness (not checked; evaluate with robustness_pairs to check it)."
    assert text.endswith(f"Not in this report: {reason}")


def test_page_says_why_a_run_did_not_keep_all_records(run: Path) -> None:
    report = read_report(run)
    heading = "validation-held: figures are over 60 of {} records: {}"
    ties = "tied ones, and those whose text is unknown, are left out"
    for total, expected in (
        (60, []),
        (600, [heading.format(600, ties)]),
        (9000, [heading.format(9000, f"5000 were drawn at random; {ties}")]),
    ):
        facts = {**report.facts, "validation_records": {"validation-held": total}}
        counted = replace(report, facts=facts)
        assert build_summary([counted], heldout_sets([counted])).notes == expected


def test_page_of_short_replies_and_of_equal_validations(tmp_path: Path) -> None:
    """Ticks within one decade are plain numbers; of equal validations the lower loss is best."""
    run = write_run(tmp_path / "run", steps=1, words=3)  # 5 to 15 characters
    rows = [
        {"step": step, "validation-held/accuracy": accuracy, "validation-held/loss": loss}
        for step, accuracy, loss in ((1, 0.5, 0.1), (2, 1.0, 0.3), (3, 1.0, 0.2), (4, 1.0, 0.4))
    ]
    write(run / "metrics.jsonl", *rows)
    held_out = pair_rows(60, words=3)
    held_out[0]["texts"]["rejected"][-1]["content"] = "half \ud800 of it"
    write(run / "heldout" / "validation-held.jsonl", *held_out)
    page = written_page([run], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "accuracy 100.0% at step 3 (validation-held)" in page
    length = page[page.index('id="length"') : page.index('id="mistakes"')]
    assert "mathdefault" not in page
    assert re.search(r">5</text>|>10</text>|>20</text>", length)
    # A text that UTF-8 cannot encode is written with a replacement.
    assert "half ? of it" in page


def test_page_has_no_figure_of_one_step_and_no_column_without_a_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rows = [
        {"step": 1, "train/loss": 0.7},
        {"step": 2, "train/loss": 0.6},
        {"step": 2, "validation-held/accuracy": 0.7, "validation-held/length_correlation": 0.25},
        {"step": 2, "validation-held/longer_reply_accuracy": 0.6},
        {"step": 2, "validation-held/reward_mean/reward": 0.1},
        {"step": 2, "validation-held/step_position/1/labels": 7},
        *({"step": 2, f"validation-held/by_{kind}/x/loss": 1} for kind in ("source", "principle")),
    ]
    write(run / "metrics.jsonl", *rows)
    content = written_page([run], tmp_path / "p.html").read_text(encoding="utf-8")
    figures = re.findall(r"<figure>\s*<h3>([^<]*)", content[: content.index('id="accuracy"')])
    assert figures == ["loss", "loss"]  # in the overview, and among the learning curves
    assert ">0.7000<" in content  # The single validation is in the table.
    by_source = content[content.index('id="accuracy"') : content.index('id="rewards"')]
    headings = re.findall(r'<th scope="col">([^<]*)', by_source)
    assert headings == ["source", "pairs", "accuracy", "95% interval"]
    # A metric has the same value in every section, and its meaning next to it.
    assert re.search(r"length_correlation</td><td[^>]*>0\.2500</td>", content)
    of_length = content[content.index('id="length"') : content.index('id="mistakes"')]
    assert re.search(r"<td[^>]*>0\.2500</td>", of_length)
    reward_mean = find_metric("reward_mean")
    assert reward_mean is not None
    assert reward_mean.meaning in content
    of_sets, of_parts = content.split("Metrics of each principle")
    assert not re.search(">(step_position|by_)", of_sets)
    assert re.findall(">((?:step_position|by_)[^<]*)", of_parts) == ["by_principle/x/loss"]


def test_page_says_why_there_is_no_temperature(tmp_path: Path) -> None:
    """A metric that the last validation lacks has no value, not that of an earlier validation."""
    run = write_run(tmp_path / "run")
    for margin, reason in ((2.0, "no pair is ordered wrongly"), (-1.0, "mean margin is not pos")):
        rows: list[dict[str, Any]] = [
            {"step": 1, "validation-held/temperature": 0.5, "validation-held/brier": 0.1},
            {"step": 2, "validation-held/temperature": None, "validation-held/brier": 0.2},
            {"step": 2, "validation-held/reward_margin": margin},
        ]
        write(run / "metrics.jsonl", *rows)
        held_out = pair_rows(20)
        for row in held_out:
            row["rewards"] = {"chosen": margin, "rejected": 0.0}
        write(run / "heldout" / "validation-held.jsonl", *held_out)
        content = written_page([run], tmp_path / "p.html").read_text(encoding="utf-8")
        # In the tables of all metrics, and of calibration.
        assert len(re.findall(f"<td[^>]*>none: no T fits[^<]*{reason}", content)) == 2
        assert "0.5000</td>" not in content


def test_page_has_a_light_and_a_dark_scheme(page: Page, run: Path) -> None:
    """All colours of the figures are variables, which both schemes define."""
    content = (run / "report.html").read_text(encoding="utf-8")
    variables = set(re.findall(r"var\(--([a-z0-9-]+)\)", content))
    light, dark = re.findall(r":root \{([^}]*)\}", content)
    for scheme in (light, dark):
        assert variables <= set(re.findall(r"--([a-z0-9-]+): ", scheme))
    figures = content[content.index("<body>") :]
    assert {"series-0", "ink", "grid", "axis", "ticks"} <= variables
    assert set(re.findall(r": (#[0-9a-f]{6})", figures)) == set()


def test_page_of_the_same_run_is_the_same(page: Page, run: Path, tmp_path: Path) -> None:
    again = written_page([run], tmp_path / "again.html").read_bytes()
    assert again == (run / "report.html").read_bytes()


def test_page_of_two_runs_and_an_evaluation_overlays_them(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "second", seed=3)
    rewards = write(tmp_path / "other.jsonl", *pair_rows(50, seed=5))
    content = {
        "checkpoint": "m.nemo",
        "contract": "def456",
        "data": "x.jsonl",
        "kind": "comparison",
        "metrics": {"accuracy": 0.71, "temperature": None},
        "counts": {"kept": 50},
    }
    (tmp_path / "other.json").write_text(json.dumps(content))
    made = written_page([run, other, rewards], tmp_path / "all.html")
    page = Page(made.read_text(encoding="utf-8"))
    text = " ".join(page.text.split())
    for name in ("first", "second"):
        assert f"{name}, train" in text
        assert f"{name}, validation-held" in text
    assert "1 settings differ" in text
    assert page.sections == list(SECTIONS)
    assert "0.7100" in text
    # Every evaluation without a temperature says why; this one has no margin to tell it.
    assert "nan" not in text
    assert "The contracts differ" in text
    assert "Reward against length" in text


def test_page_of_a_run_that_was_killed_early(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "killed")
    shutil.rmtree(folder / "heldout")
    (folder / "run_facts.json").unlink()
    lines = '{"step": 1, "train/loss": 0.7}\n{"step": 2, "train/loss": 0.6}\n{"step": 3, "tra'
    (folder / "metrics.jsonl").write_text(lines)
    page = Page(written_page([folder], tmp_path / "p.html").read_text(encoding="utf-8"))
    assert page.sections == ["overview", "summary", "curves", "settings"]
    reasons = page.text[page.text.index("Not in this report: ") :]
    assert reasons.startswith("Not in this report: Accuracy by source (no pairs), Rewards")
    assert "Rewards and margins (no held-out rewards: nothing was validated, or" in reasons
    assert reasons.count("(") == len(SECTIONS) + 1 - len(page.sections)
    assert "The objective, which training minimizes" in page.text


def test_page_shows_robustness_where_it_was_checked(run: Path, tmp_path: Path) -> None:
    reply = [{"role": "assistant", "content": "Yes."}]
    pair = Prediction.of_pair("x:1", "", (reply, reply), np.array([2.0, 1.0]))
    pairs = Predictions([pair] * 3)
    robustness = check_robustness(pairs, source_of(lambda texts: np.full((len(texts), 1), 1.5)), 2)
    folder, evaluated = write_run(tmp_path / "robust"), tmp_path / "evaluated.json"
    content = {"metrics": {}, "data": "x.jsonl", "robustness": robustness_json(robustness)}
    for path in (folder / "robustness.json", evaluated):
        path.write_text(json.dumps(content))
    made = written_page([folder, evaluated], tmp_path / "p.html")
    text = Page(made.read_text(encoding="utf-8")).text
    shown = "2 of 3 pairs; the standard deviation (sd) of their margins is 0.0000"
    assert text.count(shown) == 2
    assert text.count("politeness") == 2 * 2
    assert "100.0% (34.2% to 100.0%)" in text
    assert "The objective, which training minimizes" in text
    (folder / "robustness.json").write_text(json.dumps({"robustness": [{"change": "x"}]}))
    with pytest.raises(DataError, match=r"robustness\.json: robustness: "):
        written_page([folder], tmp_path / "p.html")


def test_page_of_ratings_has_figures_and_mistakes_of_its_own(tmp_path: Path) -> None:
    rows = [
        {
            "record": f"r:{n}",
            "rewards": {"helpful": n / 10, "brief": 1.0},
            "labels": {"helpful": n % 5, "brief": None},
            "texts": {"response": f"{EVIL if n == 4 else ''} reply {n}"},
        }
        for n in range(30)
    ]
    path = write(tmp_path / "rated.jsonl", *rows)
    page = Page(written_page([path], tmp_path / "p.html").read_text(encoding="utf-8"))
    assert "helpful: rated" in page.text
    assert "helpful: reward 0.400, label 4.000" in page.text
    assert "the length of the reply alone, in characters" in page.text
    assert "script" not in page.tags
    figures = {"labels": 7, "label": 0.25, "probability": 0.375, "accuracy": 0.625}
    metrics = {f"step_position/2/{name}": value for name, value in figures.items()}
    metrics |= {"step_accuracy": 0.75, "first_error_accuracy": 0.5, "first_error_f1": None}
    metrics["length_only_pearson_mean"] = 0.25  # measured in tokens
    path.with_suffix(".json").write_text(json.dumps({"metrics": metrics, "counts": {"kept": 30}}))
    page = Page(written_page([path], tmp_path / "p.html").read_text(encoding="utf-8"))
    assert "Calibration by the position of a step: rated" in page.text
    assert "the length of the reply alone, in tokens" in page.text
    cells = [text for text in page.texts if text.strip()]
    assert cells[cells.index("all steps") :][:3] == ["all steps", "0.7500", "0.5000"]
    of_steps = cells[cells.index("Calibration by the position of a step: rated") :]
    assert of_steps[of_steps.index("2") :][:5] == ["2", "7", "0.2500", "0.3750", "0.6250"]


def test_page_shows_a_mistake_whose_prompt_has_parts_and_calls(tmp_path: Path) -> None:
    question = {"role": "user", "content": [{"type": "text", "text": "is it raining"}]}
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    prompt = [question, {"role": "assistant", "content": None, "tool_calls": [call]}]
    replies = {side: f"{side} " * 40 for side in ("good", "bad")}
    texts = {
        side: [*prompt, {"role": "assistant", "content": reply}] for side, reply in replies.items()
    }
    row = {
        "record": "r:1",
        "rewards": {"chosen": 0.0, "rejected": 1.0},
        "texts": {"chosen": texts["good"], "rejected": texts["bad"]},
    }
    path = write(tmp_path / "calls.jsonl", row)
    text = Page(written_page([path], tmp_path / "p.html").read_text(encoding="utf-8")).text
    overview = text[text.rindex("Overview") : text.rindex("Summary")]
    assert "is it raining" in overview
    in_full = text[text.rindex("The most confident mistakes") :]
    assert all(reply.strip() in in_full for reply in ('"name": "look"', *replies.values()))


def test_page_of_as_many_runs_as_colours_stays_below_the_limit(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / str(n), steps=1000, seed=n, words=20_000) for n in range(MAX_REPORTS)
    ]
    page = written_page(runs, tmp_path / "all.html")
    assert page.stat().st_size < LIMIT
    assert "The text is longer; the end is not shown." in page.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="runs: got 9"):
        render_page([RunReport("x", "evaluation")] * 9)


def test_page_of_what_is_no_run_is_refused(tmp_path: Path) -> None:
    wrong = {}
    for name, content, message in (
        ("none", None, "none: "),
        ("a.txt", "x", "a.txt: got a file .txt"),
        ("a.jsonl", "", "a.jsonl: the file is empty"),
        ("a.jsonl", '{"prompt": 1}', "'rewards'"),
        ("a.jsonl", "{", "a.jsonl:1"),
        ("a.json", '{"x": 1}', "a.json: got the keys x"),
        ("a.json", "[1]", "a.json: got list"),
        (".", None, "config.yaml"),
        ("config.yaml", "a: 1\n", "config.yaml: got a file .yaml"),
        (".", None, "metrics.jsonl"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        error = refusal(DataError, write_page, [tmp_path / name], tmp_path / "p.html")
        if message not in error:
            wrong[name, content] = error
    assert not wrong, wrong
    path = str(tmp_path / "a.jsonl")
    error = refusal(ConfigError, run_report, report_parser().parse([path, f"--output={path}"]))
    assert error == f"output: {path} is a file to draw. Name another"


def test_report_replaces_no_file_of_its_runs_and_says_that_it_replaces_another(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def report(path: Path, output: Path) -> int:
        return run_report(report_parser().parse([str(path), f"--output={output}"]))

    results = tmp_path / "e.json"
    results.write_text('{"metrics": {"accuracy": 0.5}}')
    for path, output, problem in (
        (results, tmp_path / "e.jsonl", "is a file to draw"),
        (run, run / "metrics.jsonl", f"is a file of the folder {run}, which is read"),
    ):
        assert refusal(ConfigError, report, path, output) == (
            f"output: {output} {problem}. Name another"
        )
    page = tmp_path / "page.html"
    for content, ending in ((None, ""), ("of before", " (in place of another)")):
        if content is not None:
            page.write_text(content)
        assert report(results, page) == 0
        assert capsys.readouterr().out == f"report: {page}{ending}\n"


def test_report_of_an_evaluation_ignores_the_data_file_of_its_name(tmp_path: Path) -> None:
    results, data = tmp_path / "a.json", {"prompt": "x", "chosen": "y", "rejected": "z"}
    results.write_text('{"metrics": {"accuracy": 0.5}}')
    rewards = write(tmp_path / "a.jsonl", data)
    assert read_report(results).predictions == {}
    results.write_text(json.dumps([data]))
    write(rewards, *pair_rows(3))
    report = read_report(rewards)
    assert (list(report.predictions), report.metrics) == (["a"], {})


def test_page_begins_with_the_result_against_length(tmp_path: Path) -> None:
    """The accuracy of the longer reply is the logged one, in tokens, if the run logged it."""
    rows = [
        {
            "record": f"r:{n}",
            "rewards": {"chosen": float(n % 10 > 0), "rejected": 0.5},
            "texts": {"chosen": "yes" * (1 + n % 2), "rejected": "no, no"},
        }
        for n in range(200)
    ]
    folder = write_run(tmp_path / "run")
    write(folder / "heldout" / "validation-held.jsonl", *rows)

    def overview() -> str:
        page = Page(written_page([folder], tmp_path / "p.html").read_text(encoding="utf-8")).text
        return " ".join(page[page.rindex("Overview") : page.rindex("Summary")].split())

    headline = overview()
    assert "90.0%accuracy on 200 held-out pairs (95%: 85.1% to 93.4%)" in headline
    assert "25.0%always the longer reply, in characters" in headline
    assert "beats the longer reply by 65.0 points" in headline
    assert headline.count("chosen “yes”, rejected “no, no” (margin -0.500") == 5
    for longer, verdict in ((0.88, "2.0 points above the longer reply"), (0.95, "better by 5.0")):
        line = json.dumps({"step": 50, "validation-held/longer_reply_accuracy": longer})
        (folder / "metrics.jsonl").open("a").write(f"{line}\n")
        headline = overview()
        assert f"{longer:.1%}always the longer reply, in tokens" in headline
        assert verdict in headline
    # The rewards are those of the exported model, and so are the metrics, not the last ones.
    facts = json.loads((folder / "run_facts.json").read_text())
    metrics = {"validation-held/longer_reply_accuracy": 0.5}
    facts["exported"] = {"weights": "step 10", "metrics": metrics}
    (folder / "run_facts.json").write_text(json.dumps(facts))
    assert "50.0%always the longer reply, in tokens" in overview()
    assert "on 200 pairs, step 10" in (tmp_path / "p.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("longer", [0.3, 0.7])
def test_page_tells_of_a_model_that_is_worse_than_chance(longer: float) -> None:
    rewards = np.array([[1.0, 0.0]] * 400 + [[0.0, 1.0]] * 600, dtype=np.float32)
    rows = [Prediction.of_pair("r", "", ("yes", "no"), row) for row in rewards]
    heldout = SimpleNamespace(
        predictions=Predictions(rows), longer_baseline=lambda: (longer, "tokens")
    )
    figures, verdict = _judge_pairs(heldout)  # type: ignore[arg-type]
    assert figures[0][0] == "40.0%"
    assert "worse than random guessing" in verdict


ABOUT = {"checkpoint": "m.nemo", "contract": "a hash", "data": "x.jsonl"}


def by_length(texts: Sequence[Any]) -> np.ndarray:
    return np.array([[len(reply_of(text))] for text in texts], dtype=np.float32)


def test_page_of_evaluations_of_pairs_ratings_and_benchmarks(
    contracts: Contracts, tmp_path: Path
) -> None:
    contract, origins = contracts(), [Origin("x.jsonl", n) for n in range(1, 20)]
    pairs = [Comparison.of_pair("x" * at.line, "y" * (20 - at.line), at) for at in origins]
    ratings = [Rating("x" * at.line, (float(at.line % 4),), at) for at in origins]
    tasks = []
    for name in ("llmbar", "best_of_n"):
        task, path = find_task(name), tmp_path / f"{name}.jsonl"
        path.write_text(3 * (json.dumps(task.sample) + "\n"))
        tasks.append(run_task(task, path, source_of(by_length)))
    results = {
        "pairs": measured(evaluate_comparisons, source_of(by_length), pairs),
        "r": measured(evaluate_ratings, source_of(by_length, attributes=("helpful",)), ratings),
        **{result.task: result for result in tasks},
    }
    pairs_report, rated, llmbar, best = (
        report_evaluation(name, result, ABOUT, contract) for name, result in results.items()
    )

    page = render_page([pairs_report, rated, llmbar])
    assert contract.hash in page
    assert "margin -18.000: chosen 1.000, rejected 19.000" in page
    assert "helpful: reward 19.000, label 3.000" in page
    assert re.search(r"<td[^>]*>checkpoint</td><td[^>]*>m.nemo</td>", page)
    assert "of 3 pairs" in page
    page += render_page([best])
    assert "Calibration (no pairs)" in page
    path = tmp_path / "best.jsonl"
    tasks[1].predictions.write(path)
    error = refusal(DataError, write_page, [path], tmp_path / "p.html")
    assert "best.jsonl: got only items without right and wrong replies" in error
    tasks[1].write(path.with_suffix(".json"), ABOUT)
    read = read_report(path)
    assert (read.predictions, read.rows) == ({}, best.rows)
    for report in tasks:
        assert f"benchmark {report.task}" in page
        assert re.search(rf'<td class="short"[^>]*>{report.rows[-1].value:#.4g}</td>', page)
