"""``nemo-aligner data label``: the same labels from every teacher, and after every interruption."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import nemo_aligner as na
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.training_data import training_data_of
from nemo_aligner.cli.main import main
from nemo_aligner.config.common import Malformed
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.scorer import ScoredRows
from nemo_aligner.data import files
from nemo_aligner.data.clean import MalformedRule
from nemo_aligner.data.formats.base import PairKeys
from nemo_aligner.data.readers import ReaderConfig, RecordFile, read_records
from nemo_aligner.data.token_cache import content_digest
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import initialize_layout
from nemo_aligner.evaluation import label
from nemo_aligner.evaluation.label import confidence
from nemo_aligner.evaluation.pseudo_labels import order_by_teacher
from nemo_aligner.evaluation.sources import RewardSource, load_source
from nemo_aligner.serving.client import scorers
from nemo_aligner.serving.client.posting import JsonAnswer
from tests.checkpoint.hf.exporting import export
from tests.data.files import rows_of, write
from tests.harness import tiny
from tests.harness.scorers import source_of
from tests.serving.servers import SERVE, running

PAIRS = 24
STEPS = {"trainer.rm.max_steps": 2, "model.optim.lr": 1e-2, "model.global_batch_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher that was trained on ``seen.jsonl``, its export, and pairs for it to label."""
    folder = tmp_path_factory.mktemp("label")
    tiny.write_base_nemo(folder / "base.nemo")
    pairs = tiny.write_pairs(folder / "pairs.jsonl", PAIRS)
    write(pairs, *({**row, "id": n, "source": "s"} for n, row in enumerate(rows_of(pairs))))
    train(folder, "seen", tiny.write_pairs(folder / "seen.jsonl", 16, seed=1))
    with launch():
        export(folder / "seen.nemo", folder / "hf", initialize_layout())
    return folder


def train(folder: Path, name: str, data: Path) -> str:
    """Train a model for two steps; return the path of its archive."""
    settings = {**STEPS, "model.data.seq_length": 128, "model.micro_batch_tokens": 256}
    with na.train(folder / "base.nemo", data, output=folder / f"{name}.run", **settings):
        pass
    archive = folder / f"{name}.nemo"
    archive.symlink_to(folder / f"{name}.run/checkpoints/megatron_gpt.nemo")
    return str(archive)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    pytest.importorskip("fastapi")
    (folder / "server").mkdir()
    settings = (f"rm_model_file={folder / 'seen.nemo'}", "server.port=0")
    with running(folder / "server", SERVE, *settings) as served:
        yield served.url


def labelled(
    folder: Path, name: str, *teachers: object, data: str = "pairs", options: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Label a file by the command, and return the rows of the output."""
    models = [f"--model={teacher}" for teacher in teachers]
    output = folder / f"{name}.jsonl"
    verb = ["data", "label", str(folder / f"{data}.jsonl"), f"--output={output}"]
    assert main([*verb, *models, *options]) == 0
    assert not output.with_name(f".{output.name}.progress").exists()
    return rows_of(output)


def test_archive_folder_and_server_give_the_same_labels(folder: Path, server: str) -> None:
    """The rewards are those of the model bit for bit, and all fields of the records stay."""
    teachers = {"archive": folder / "seen.nemo", "hf": folder / "hf", "server": server}
    rows = {name: labelled(folder, name, teacher) for name, teacher in teachers.items()}
    records = read_records(folder / "pairs.jsonl", ReaderConfig()).records
    with launch():
        config = label._with_model(label.Labelling("", Path(), ()).config, str(teachers["archive"]))
        source = load_source(config, initialize_layout())
        texts = [text for record in records for text in record.texts]
        wanted = source.score_as_one(texts, [0] * len(texts))
    expected = wanted.reshape(-1, 2).astype(np.float32)
    for name, found in rows.items():
        rewards = np.array([row.pop("teacher_rewards") for row in found], dtype=np.float32)
        assert np.array_equal(rewards, expected), name
        (about,) = found[0].pop("teacher")
        assert about["contract_hash"] == source.contract.hash, name  # type: ignore[union-attr]
        assert about["name"] == str(teachers[name])
        assert about["trained_on_input"] is (False if name == "archive" else None)
        fingerprint = source.scorer.fingerprint  # type: ignore[attr-defined]
        assert about["model_fingerprint"] == fingerprint or name == "hf"
        assert [row.pop("teacher") for row in found[1:]] == [[about]] * (PAIRS - 1)
        assert found == rows_of(folder / "pairs.jsonl"), name
    assert np.ptp(expected) > 0.01


def test_stopped_labelling_continues_to_the_same_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in the second teacher, in the middle of writing a line."""
    monkeypatch.setattr(label, "_PART", 5)
    second = tiny.write_reward_nemo(folder / "two.nemo", seq_length=128)
    teachers = (folder / "seen.nemo", second)
    whole = labelled(folder, "whole", *teachers)
    append, parts = label._Progress.append, []

    def stop(progress: Any, about: Any, part: int, rewards: np.ndarray) -> None:
        append(progress, about, part, rewards)
        parts.append(part)
        if len(parts) == 7:
            with progress.path.open("a") as file:
                file.write('{"teacher": "half a li')
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(label._Progress, "append", stop)
        verb = ["data", "label", str(folder / "pairs.jsonl"), f"--output={folder / 'two.jsonl'}"]
        assert main([*verb, *(f"--model={teacher}" for teacher in teachers)]) == 130
    assert parts == [0, 1, 2, 3, 4, 0, 1]
    assert not (folder / "two.jsonl").exists()
    capsys.readouterr()
    assert labelled(folder, "two", *teachers) == whole
    said = capsys.readouterr().out
    assert "seen.nemo: 24 of 24 records were scored before" in said
    assert "two.nemo: 10 of 24 records were scored before" in said
    assert (folder / "two.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    # The labels are the mean over the teachers, and the spread that of their margins.
    alone = [labelled(folder, f"alone{n}", teacher) for n, teacher in enumerate(teachers)]
    rewards = np.array([[row["teacher_rewards"] for row in rows] for rows in alone])
    means = np.array([row["teacher_rewards"] for row in whole])
    np.testing.assert_allclose(means, rewards.mean(axis=0), rtol=1e-6)
    margins = rewards[..., 0] - rewards[..., 1]
    spreads = [row["teacher_spread"] for row in whole]
    np.testing.assert_allclose(spreads, margins.std(axis=0), atol=1e-6)
    assert "teacher_spread" not in alone[0][0]
    sure = 1 / (1 + np.exp(-np.maximum(0, np.abs(margins.mean(axis=0)) - spreads)))
    limit = float(np.median(sure))  # between two pairs, as their number is even
    kept = labelled(folder, "kept", *teachers, options=(f"--keep-confident={limit:.6f}",))
    assert 0 < len(kept) < PAIRS
    assert [row["id"] for row in kept] == np.flatnonzero(sure >= limit).tolist()


def test_damaged_progress_is_scored_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The parts up to the damaged line are not."""
    monkeypatch.setattr(label, "_PART", 5)
    undamaged = labelled(folder, "undamaged", folder / "seen.nemo")
    append, begun = label._Progress.append, []

    def note(progress: Any, about: Any, part: int, rewards: np.ndarray) -> None:
        append(progress, about, part, rewards)
        begun.append(part)
        if damage is not None and part == 3:
            lines = progress.path.read_bytes().splitlines(keepends=True)
            progress.path.write_bytes(b"".join([*lines[:3], damage(lines[3]), *lines[4:]]))
            raise KeyboardInterrupt

    monkeypatch.setattr(label._Progress, "append", note)
    verb = ["data", "label", str(folder / "pairs.jsonl"), f"--output={folder / 'damaged.jsonl'}"]
    for damage in (
        lambda line: bytes(len(line)), lambda line: line[:30], lambda line: b"{}\n",
        lambda line: b"\xff\n", lambda line: b"7\n",
    ):  # fmt: skip
        assert main([*verb, f"--model={folder / 'seen.nemo'}"]) == 130
        damage, begun[:] = None, []
        caplog.clear()
        assert labelled(folder, "damaged", folder / "seen.nemo") == undamaged
        assert begun == [2, 3, 4]
        assert ".damaged.jsonl.progress:4: the line is damaged" in caplog.text


def test_reward_that_is_not_finite_is_an_error_by_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def score(texts: Sequence[Text]) -> np.ndarray:
        return np.array([[math.inf if text in last.texts else 1.0] for text in texts])

    *_, last = read_records(folder / "pairs.jsonl", ReaderConfig()).records
    monkeypatch.setattr(label, "_PART", 5)
    monkeypatch.setattr(label, "load_source", lambda *_: source_of(score))
    verb = ["data", "label", str(folder / "pairs.jsonl"), f"--output={folder / 'infinite.jsonl'}"]
    assert main([*verb, f"--model={folder / 'seen.nemo'}"]) == 1
    error = capsys.readouterr().err
    assert f"pairs.jsonl:{PAIRS}: the model's reward is not finite (2 of 8 rewards" in error


def test_values_that_json_lacks_are_no_error_after_scoring(folder: Path) -> None:
    """Dates, decimals, NaN and bytes of a table; too large a number and half a pair in a line."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    pair = {"prompt": "who", "chosen": "a cat", "rejected": "a dog"}
    more = {
        "day": datetime.date(2026, 5, 4),
        "price": Decimal("1.50"),
        "rated": math.nan,
        "image": b"\x89PNG",
    }
    parquet.write_table(pyarrow.Table.from_pylist([{**pair, **more}]), folder / "table.jsonl")
    (row,) = labelled(folder, "of_table", folder / "seen.nemo", data="table")
    assert row.pop("teacher_rewards")
    del row["teacher"]
    assert row == {**pair, "day": "2026-05-04", "price": "1.50", "rated": None}
    line = json.dumps({**pair, "half": "\ud800"})
    (folder / "lines.jsonl").write_text(f'{line[:-1]}, "rated": 1e999}}\n')
    (row,) = labelled(folder, "of_lines", folder / "seen.nemo", data="lines")
    assert (row["half"], row["rated"]) == ("\ud800", None)


def test_ranks_that_share_the_work_write_the_same_file(folder: Path) -> None:
    labelled(folder, "one_rank", folder / "seen.nemo")
    tiny.run_verb(
        "data label",
        str(folder / "pairs.jsonl"),
        f"--model={folder / 'seen.nemo'}",
        f"--output={folder / 'two_ranks.jsonl'}",
        processes=2,
    )
    files = [folder / f"{name}.jsonl" for name in ("one_rank", "two_ranks")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_student_names_its_teacher_which_knows_what_it_learned(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = folder / "seen.nemo"
    rows = labelled(folder, "soft", teacher)
    learned = (folder / "soft.jsonl").read_bytes()

    def change_data(*_: object) -> str:
        """Change the file after the last step, before the archive is written."""
        (folder / "soft.jsonl").write_bytes(learned * 2)
        return ""

    with monkeypatch.context() as patched:
        patched.setattr("nemo_aligner.training.run.render_candidates", change_data)
        student = train(folder, "student", folder / "soft.jsonl")
    (folder / "soft.jsonl").write_bytes(learned)
    with open_nemo(student) as opened:
        (file,) = training_data_of(opened.config) or ()
    assert file["sha256"] == content_digest(str(folder / "soft.jsonl"))
    assert (file["name"], file["records"], file["teachers"]) == (
        "soft.jsonl",
        PAIRS,
        [rows[0]["teacher"]],
    )
    with launch():
        export(Path(student), folder / "student.hf", initialize_layout())
    card = (folder / "student.hf/README.md").read_text()
    about = rows[0]["teacher"][0]
    for shown in ("soft labels of `seen.nemo`", about["model_fingerprint"], about["contract_hash"]):
        assert shown in card
    capsys.readouterr()
    (again,) = {
        row["teacher"][0]["trained_on_input"]
        for row in labelled(folder, "again", student, data="soft")
    }
    assert again is True
    assert f"warning: {student} was trained on this very file" in capsys.readouterr().out


def test_responses_are_labelled_and_ranked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a ranking that is read in another order than it is written; the file is read once."""
    replies = ["thank you", "a cat", "no dog sings"]
    (folder / "samples.jsonl").write_text(json.dumps([{"prompt": "who", "responses": replies}]))
    teacher = folder / "seen.nemo"
    with monkeypatch.context() as patched:
        reading = Mock(side_effect=files._list_items)
        patched.setattr(files, "_list_items", reading)
        (row,) = labelled(folder, "unranked", teacher, data="samples")
    assert reading.call_count == 1
    rewards = row["teacher_rewards"]
    assert "ranks" not in row
    (ranked,) = labelled(folder, "ranked", teacher, data="samples", options=("--pseudo-labels",))
    assert [rewards[n] for n in np.argsort(ranked["ranks"])] == sorted(rewards, reverse=True)
    assert "1 records, 3 pairs" in capsys.readouterr().out
    completions = [(2, replies[0]), (0, replies[1]), (1, replies[2])]
    write(folder / "nemo_rl.jsonl", tiny.ranked("who", *completions))
    (row,) = labelled(folder, "nemo_rl_soft", teacher, data="nemo_rl")
    assert row["teacher_rewards"] == rewards
    (record,) = read_records(folder / "nemo_rl_soft.jsonl", ReaderConfig()).records
    assert record.teacher_rewards == (rewards[1], rewards[2], rewards[0])


def test_malformed_records_are_left_out_by_option(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[label.Labelling] = []
    monkeypatch.setattr(label, "label_file", taken.append)
    options = ["--model=m", "--output=o", "--malformed=drop", "--max-malformed=0.5"]
    assert main(["data", "label", "x.jsonl", *options]) == 0
    assert taken[0].reading.rule == MalformedRule(Malformed.drop, 0.5, section="")


PAIR = {"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": 2}


def test_pseudo_labels_exchange_the_replies() -> None:
    """A record with a margin, or with scores that would be read as one, gets a null margin."""
    row = {**PAIR, "teacher_rewards": [0.5, 1.5]}
    swapped = {
        "prompt": "p",
        "chosen": "b",
        "rejected": "a",
        "score_chosen": 2,
        "score_rejected": 1,
        "label_margin": None,
        "teacher_rewards": [1.5, 0.5],
    }
    scores = {"score_chosen": 1, "score_rejected": 2}
    for given, exchanged in (
        ({}, {}),
        (
            {"metadata": {**scores, "margin": -1, "id": 7}},
            {"metadata": {"score_chosen": 2, "score_rejected": 1, "id": 7}},
        ),
    ):
        for margin in ({"label_margin": 3}, {"margin": 3}, {}):
            ordered = order_by_teacher({**row, **margin, **given}, "chat_pairs", PairKeys())
            assert ordered == ({**swapped, **exchanged}, True)
    named = {"q": "p", "good": "a", "bad": "b", "teacher_rewards": [0, 1]}
    keys = PairKeys("q", "good", "bad")
    exchanged = {"q": "p", "good": "b", "bad": "a", "teacher_rewards": [1, 0]}
    assert order_by_teacher(named, "chat_pairs", keys) == (exchanged, True)
    for rewards in ([1.0, 1.0], [2.0, 1.0]):
        right = {**PAIR, "teacher_rewards": rewards}
        assert order_by_teacher(right, "chat_pairs", PairKeys()) == (right, False)


@pytest.mark.parametrize(
    ("ranks", "is_reordered"), [([0, 1], True), ([2, 1], False), ([1, 1], True), (None, True)]
)
def test_pseudo_labels_of_ranks_remove_the_margins_of_another_order(
    ranks: list[int] | None, is_reordered: bool
) -> None:
    """Ranks may begin with 1; replies without ranks are tied."""
    margins = {"label_margin": 3, "metadata": {"margin": 2, "id": 7}}
    kept = {"label_margin": None, "metadata": {"id": 7}} if is_reordered else margins
    rewarded = {"teacher_rewards": [0.5, 1.5]}
    row = {"prompt": "p", "responses": ["a", "b"], **rewarded}
    given = {} if ranks is None else {"ranks": ranks}
    ordered = order_by_teacher({**row, **given, **margins}, "responses", PairKeys())
    assert ordered == ({**row, "ranks": [1, 0], **kept}, is_reordered)
    if ranks is not None:
        of_nemo_rl = {**tiny.ranked("p", *zip(ranks, "ab", strict=True)), **rewarded, **margins}
        wanted = {**tiny.ranked("p", (1, "a"), (0, "b")), **rewarded, **kept}
        found = order_by_teacher(of_nemo_rl, "nemo_rl_preference", PairKeys())
        assert found == (wanted, is_reordered)


def answer_with(monkeypatch: pytest.MonkeyPatch, rewards: Sequence[float]) -> None:
    """Replace every server with one whose answer to each request has these rewards."""
    answer = JsonAnswer(200, {"data": [{"probs": rewards}], "rewards": rewards})
    monkeypatch.setattr(scorers, "post_all", lambda _, bodies, watch: [answer] * len(bodies))


def test_server_without_a_fingerprint_scores_all_records_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model may answer at its address when the same command runs again."""
    monkeypatch.setattr(label, "_PART", 2)
    tiny.write_pairs(tmp_path / "pairs.jsonl", 6)
    url, messages = "http://localhost:1/classify", list[str]()

    def say_and_stop(message: str) -> None:
        messages.append(message)
        if message.endswith("4 of 6 records"):
            raise KeyboardInterrupt

    answer_with(monkeypatch, [1.0])
    with monkeypatch.context() as patched:
        patched.setattr(label, "say", say_and_stop)
        verb = ["data", "label", str(tmp_path / "pairs.jsonl"), f"--model={url}"]
        assert main([*verb, f"--output={tmp_path / 'out.jsonl'}"]) == 130
    answer_with(monkeypatch, [2.0])
    rows = labelled(tmp_path, "out", url)
    assert [row["teacher_rewards"] for row in rows] == [[2.0, 2.0]] * 6
    assert "reports no model fingerprint, so if this run stops, the same command" in messages[0]


def open_as_scorers(
    monkeypatch: pytest.MonkeyPatch,
    fingerprints: dict[str, str | None],
    score: Callable[[str, Sequence[Text]], ScoredRows],
) -> None:
    """Replace the servers of these URLs by scorers with these fingerprints."""

    @contextmanager
    def open_scorer(url: str, *_: Any, **__: Any) -> Iterator[RewardSource]:
        fingerprint = fingerprints[url]
        scorer = Mock(contract=None, fingerprint=fingerprint, score_rows=partial(score, url))
        yield RewardSource(url, scorer, (1.0,))

    monkeypatch.setattr(label, "open_server", open_scorer)


def scored_as(rewards: Sequence[float], **more: Any) -> ScoredRows:
    array = np.array(rewards, dtype=np.float32)[:, None]
    return ScoredRows(array, more.pop("errors", {}), np.zeros(len(array), dtype=bool), **more)


def test_teachers_are_opened_before_one_scores_and_those_that_an_error_would_repeat_are_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stops before the first reward leaves no file."""
    fresh, kept = "http://a", "http://b"
    asked = []

    def score(url: str, samples: Sequence[Text]) -> ScoredRows:
        asked.append(url)
        return scored_as([1.0 if url == fresh else 4.0] * len(samples))

    open_as_scorers(monkeypatch, {fresh: None, kept: "f" * 16}, score)
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 2)
    verb = ["data", "label", str(pairs), f"--output={tmp_path / 'out.jsonl'}"]
    assert main([*verb, f"--model={kept}", f"--model={fresh}", "--model=no.nemo"]) == 1
    assert (asked, [*tmp_path.iterdir()]) == ([], [pairs])
    row, _ = labelled(tmp_path, "out", fresh, kept)
    assert asked == [kept, fresh]
    assert [about["name"] for about in row["teacher"]] == [fresh, kept]
    assert row["teacher_rewards"] == [2.5, 2.5]


def test_record_without_a_reward_for_now_is_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is scored as a whole, and at last left out."""
    asked = []

    def score(url: str, samples: Sequence[Text]) -> ScoredRows:
        asked.append(samples)
        if len(asked) not in (2, *slow_calls):
            return scored_as([float(len(asked))] * len(samples))
        row = len(samples) - 1
        slow, errors = frozenset({row}), {row: "judge: too slow"}
        rewards = [1.0] * row + [math.nan]
        return scored_as(rewards, errors=errors, unscored=slow, temporary=slow)

    monkeypatch.setattr(label, "_PART", 2)
    open_as_scorers(monkeypatch, {"http://a": "f" * 16}, score)
    tiny.write_pairs(tmp_path / "pairs.jsonl", 6)
    slow_calls: tuple[int, ...] = ()
    rows = labelled(tmp_path, "out", "http://a")
    assert [row["teacher_rewards"][0] for row in rows] == [1, 1, 1, 3, 4, 4]
    assert [*map(len, asked)] == [4, 4, 2, 4]
    assert asked[2] == asked[1][2:]
    asked, slow_calls = [], (3, 4)
    rows = labelled(tmp_path, "other", "http://a")
    assert [row["teacher_rewards"][0] for row in rows] == [1, 1, 1, 5, 5]
    assert [*map(len, asked)] == [4, 4, 2, 2, 4]


def test_servers_that_do_not_describe_themselves_are_described_by_options(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options do not matter to an archive beside them."""
    answer_with(monkeypatch, [1.0, 2.0])
    for path, message in (
        ("/classify", "set the names and weights of the numbers in --attribute-weights"),
        ("/get_reward", "--tokenizer: got none with a chat template"),
    ):
        verb = ["data", "label", str(folder / "pairs.jsonl"), f"--output={folder / 'served'}"]
        assert main([*verb, f"--model=http://localhost:1{path}"]) == 1
        assert message in capsys.readouterr().err
    weights = "--attribute-weights=helpfulness=1,verbosity=-0.25"
    server, archive = "http://localhost:1/classify", folder / "seen.nemo"
    rows = labelled(folder, "served", server, options=(weights,))
    assert [row["teacher_rewards"] for row in rows] == [[0.5, 0.5]] * PAIRS
    mean = labelled(folder, "both", server, archive, options=(weights, "--timeout=5"))[0]
    alone = labelled(folder, "archive_alone", archive)[0]
    expected = [(reward + 0.5) / 2 for reward in alone["teacher_rewards"]]
    assert mean["teacher_rewards"] == pytest.approx(expected)
    for weights in ("helpfulness", "=1", "a=1,a=2", "a=nan"):
        with pytest.raises(SystemExit):
            main([*verb, "--model=http://localhost:1/classify", f"--attribute-weights={weights}"])
        assert "wanted NAME=NUMBER" in capsys.readouterr().err


def test_confidence_is_the_probability_less_the_spread() -> None:
    assert confidence(np.array([[1.0, 3.0]])) == pytest.approx(1 / (1 + math.exp(-2)))
    two = np.array([[4.0, 1.0], [2.0, 1.0]])  # margins 3 and 1: mean 2, deviation 1
    assert confidence(two) == pytest.approx(1 / (1 + math.exp(-1)))
    assert confidence(np.array([[4.0, 1.0], [0.0, 3.0]])) == 0.5


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({**PAIR, "chosen_probability": 0.5}, (), "bad.jsonl:1: it has a 'chosen_probability'"),
        (
            tiny.ranked("who", (0, "a"), (1, "b"), (2, "c")),
            ("--keep-confident=0.8",),
            "bad.jsonl:1: it has 3 replies, and --keep-confident compares",
        ),
        (
            {"prompt": "p", "response_1": "a", "response_2": "b", "preference_strength": 1},
            ("--pseudo-labels",),
            "--pseudo-labels: not supported for the format helpsteer2_preference",
        ),
        (PAIR, ("--output=bad.jsonl",), "bad.jsonl is the file to label"),
        (PAIR, ("--output=no.nemo",), "--output: no.nemo is the file of --model=no.nemo"),
        (
            PAIR,
            ("--tokenizer=out.jsonl", "--model=http://localhost:1/get_reward"),
            "--output: out.jsonl is the file of --tokenizer",
        ),
        (
            PAIR,
            ("--model=http://localhost:1/classify", "--tokenizer=a"),
            "--tokenizer: got 'a', which has no effect on any --model",
        ),
        (
            PAIR,
            ("--model=http://localhost:1/score", "--timeout=2"),
            "--model: got http://localhost:1/score",
        ),
        (
            PAIR,
            ("--model=http://localhost:1", "--token-variable=NO_SUCH"),
            "--token-variable: environment variable NO_SUCH is not set",
        ),
        (PAIR, ("--model=http://localhost:1",), "correct the address in --model=http://localhost"),
    ],
)
def test_what_cannot_be_labelled_is_rejected(
    row: dict[str, Any],
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("bad.jsonl"), row)
    verb = ["data", "label", "bad.jsonl", "--output=out.jsonl"]
    models = () if any("--model" in option for option in options) else ("--model=no.nemo",)
    assert main([*verb, *models, *options]) == 1
    assert message in capsys.readouterr().err


def test_null_in_place_of_a_soft_label_is_none(tmp_path: Path) -> None:
    row = {**PAIR, "chosen_probability": None}
    file = read_records(write(tmp_path / "a.jsonl", row), ReaderConfig(), with_lines=True)
    assert label._read_rows(file, ReaderConfig()) == [[row]]


def test_file_that_changes_while_it_is_read_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its labels would not belong to the content whose digest is recorded."""
    source = tmp_path / "pairs.jsonl"
    write(source, PAIR)

    def read_and_append(*args: Any, **options: Any) -> RecordFile:
        file = read_records(*args, **options)
        source.write_text(source.read_text() * 2)
        return file

    monkeypatch.setattr(label, "read_records", read_and_append)
    output = tmp_path / "out.jsonl"
    assert main(["data", "label", str(source), "--model=no.nemo", f"--output={output}"]) == 1
    assert f"{source}: the file changed while it was read. Start again" in capsys.readouterr().err
    assert not output.exists()
