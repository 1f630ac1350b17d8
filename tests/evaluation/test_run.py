"""Whole evaluations: the rewards are those of training, and all outputs are written."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from nemo_aligner.cli.train import run_train, train_parser
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.load import load_config
from nemo_aligner.contract.messages import Conversation, Text, read_text
from nemo_aligner.evaluation.compare import compare_files, render_compared, write_flips
from nemo_aligner.evaluation.report.page import write_page
from nemo_aligner.evaluation.run import evaluate, evaluate_source
from nemo_aligner.evaluation.tasks import find_task
from nemo_aligner.utils.errors import ConfigError, DataError, SettingsError
from tests.data.files import rows_of, write
from tests.evaluation.refusals import refusal
from tests.evaluation.tasks.scorers import by_length
from tests.harness import tiny
from tests.harness.scorers import source_of


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.smoke), "bf16"])
def test_evaluation_gives_the_bits_of_the_last_validation(
    precision: str, base: Path, tmp_path: Path
) -> None:
    """The evaluation reproduces bit by bit the rewards that the run's last validation kept.

    This covers training, saving and loading a model, and reading, packing and scoring its records
    in training and in an evaluation. At TP=2 the rewards are the same up to rounding.
    """
    held_out = tiny.write_pairs(tmp_path / "held_out.jsonl", 40, seed=1)
    run = tmp_path / "run"
    settings = [
        *tiny.training(base, run, tiny.write_pairs(tmp_path / "train.jsonl", 16), held_out),
        "exp_manager.report=true",
        f"trainer.precision={precision}",
        "model.data.seq_length=64",
        "model.micro_batch_tokens=300",
        "trainer.rm.max_steps=2",
    ]
    assert run_train(train_parser().parse_args(settings)) == 0
    report, rewards, page = (tmp_path / f"report.{end}" for end in ("json", "jsonl", "html"))
    settings = [
        f"rm_model_file={run / 'checkpoints' / 'megatron_gpt.nemo'}",
        f"data.path={held_out}",
        f"output={report}",
        f"output_rewards={rewards}",
        "model.micro_batch_tokens=128",
    ]
    evaluate(load_config(EvaluateConfig, settings))
    content, rows = json.loads(report.read_text()), rows_of(rewards)
    assert rows == rows_of(run / "heldout" / "validation-held_out.jsonl")
    assert len({str(row["rewards"]) for row in rows}) == len(rows) == content["counts"]["kept"]
    trained = tiny.logged(run)
    names = ("accuracy", "loss", "reward_margin_p05", "ece", "brier", "length_correlation")
    for name in names:
        assert content["metrics"][name] == trained[f"validation-held_out/{name}"][2], name
    counts = content["counts"]
    assert counts["overlong"] > 0, "some pairs should exceed seq_length, to test the drop"
    assert counts["kept"] + counts["overlong"] == counts["read"] == 40
    assert content["contract"] in (run / "report.html").read_text(encoding="utf-8")
    if precision == "bf16":
        return
    other = [f"expect_contract={content['contract']}", "precision=bf16"]
    with pytest.raises(ConfigError, match=f"wanted {content['contract']}"):
        evaluate(load_config(EvaluateConfig, [*settings, *other]))
    with pytest.raises(ConfigError, match=r"expect_fingerprint: got .*, wanted 0000"):
        evaluate(load_config(EvaluateConfig, [*settings, f"expect_fingerprint={'0' * 32}"]))
    more = (f"report={page}", "model.tensor_model_parallel_size=2")
    script = "examples/evaluate_reward_model.py"
    done = tiny.run_script(script, *settings, *more, processes=2)
    # Printed once, although two ranks ran.
    assert done.stdout.count(content["contract"]) == 1
    assert done.stdout.count(f"report: {page}") == 1
    assert content["contract"] in page.read_text(encoding="utf-8")
    assert json.loads(report.read_text())["metrics"] == pytest.approx(content["metrics"], abs=1e-5)
    for one, other_row in zip(rows, rows_of(rewards), strict=True):
        assert other_row.pop("rewards") == pytest.approx(one.pop("rewards"), abs=1e-5)
        assert one == other_row


def test_evaluation_of_pairs_with_tools_is_kept_reported_and_compared(
    base: Path, tmp_path: Path
) -> None:
    """Training writes the same file as an evaluation; ``compare`` and ``report`` read both."""
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    call = {"function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    calls = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    pairs = [
        {"prompt": f"{word}?", "chosen": calls, "rejected": word, "tools": tools}
        for word in tiny.WORDS[:8]
    ]
    held_out, run = write(tmp_path / "held_out.jsonl", *pairs), tmp_path / "run"
    more = ["model.data.seq_length=512", "model.data.template=chatml"]
    more += ["model.encoder_seq_length=512", "model.micro_batch_tokens=1024"]
    settings = [*tiny.training(base, run, held_out, held_out), *more, "trainer.rm.max_steps=2"]
    assert run_train(train_parser().parse_args(settings)) == 0
    rewards, page = tmp_path / "rewards.jsonl", tmp_path / "report.html"
    settings = [
        f"rm_model_file={run / 'checkpoints' / 'megatron_gpt.nemo'}",
        f"data.path={held_out}",
        f"output_rewards={rewards}",
    ]
    evaluate(load_config(EvaluateConfig, settings))
    rows = rows_of(rewards)
    assert rows == rows_of(run / "heldout" / "validation-held_out.jsonl")
    assert len(rows) == len(pairs)
    for row in rows:
        chosen = read_text(row["texts"]["chosen"])
        assert isinstance(chosen, Conversation)
        assert chosen.tools == tools
        assert chosen.messages[-1] == calls[0]
    # The file of another model, which orders every pair the other way round.
    for row in rows:
        row["rewards"] = dict(zip(("rejected", "chosen"), row["rewards"].values(), strict=True))
    other, flips = write(tmp_path / "other.jsonl", *rows), tmp_path / "flips.jsonl"
    compared = compare_files(rewards, other)
    assert len(compared.flips) == len(pairs)
    assert "clock" in render_compared(compared, ["a", "b"], show=1)
    write_page([run, rewards, other], page)
    assert "clock" in page.read_text(encoding="utf-8")
    write_flips(flips, compared)
    assert all(read_text(flip["chosen"]).tools == tools for flip in rows_of(flips))


def test_evaluation_settings_that_contradict_each_other_are_refused() -> None:
    def refused(*settings: str) -> str:
        all_settings = ["data.path=x.jsonl", *settings]
        errors = (ConfigError, SettingsError)
        return refusal(errors, lambda: evaluate(load_config(EvaluateConfig, all_settings)))

    one = "rm_model_file, hf_model, server: got {}, wanted exactly one of them"
    model = "rm_model_file=a.nemo"
    assert refused() == one.format("none")
    assert refused(model, "hf_model=b") == one.format("rm_model_file and hf_model")
    url = "http://127.0.0.1:1"
    assert refused(f"rm_model_file={url}").endswith(f"wanted a model. Set server={url}")
    error = refused(model, "task=rewardbench", "data.chosen_key=good")
    assert error.startswith("data.chosen_key: got 'good'")
    error = refused(model, "task=rewardbench", "swapped=true")
    assert error.startswith("swapped: got true with task=rewardbench")
    error = refused(model, "task=best_of_n", "robustness_pairs=10")
    assert error.startswith("robustness_pairs: ")
    assert "task=best_of_n" in error
    error = refused(model, "task=processbench", "threshold_from=./x.jsonl")
    assert error.startswith("threshold_from: got './x.jsonl', wanted null if threshold is set, or")
    error = refused(model, "aggregate=min", "task=prmbench")
    assert error.startswith("aggregate: got min, but task=prmbench"), error
    # An output would replace a file that is read, or another output.
    same = "{}: {} is the file of {}. Name another"
    error = refused(model, "output_rewards=./x.jsonl")
    assert error == same.format("output_rewards", "x.jsonl", "data.path")
    error = refused(model, "report=a.nemo")
    assert error == same.format("report", "a.nemo", "rm_model_file")
    error = refused(model, "output=r.json", "output_rewards=r.json")
    assert error == same.format("output_rewards", "r.json", "output")


def test_raw_texts_are_refused_before_they_are_scored_for_robustness(tmp_path: Path) -> None:
    path = write(tmp_path / "raw.jsonl", {"chosen": "a", "rejected": "b"})
    settings = [f"data.path={path}", "data.format=text_pairs", "robustness_pairs=5"]
    score = Mock()
    with pytest.raises(DataError, match="where the reply begins"):
        evaluate_source(load_config(EvaluateConfig, settings), source_of(score))
    score.assert_not_called()


def test_output_that_cannot_be_written_does_not_stop_the_others(tmp_path: Path) -> None:
    path, rewards = tiny.write_pairs(tmp_path / "pairs.jsonl", 4), tmp_path / "rewards.jsonl"
    too_long = tmp_path / ("x" * 300)  # for the file system
    settings = [f"data.path={path}", f"output={too_long}", f"output_rewards={rewards}"]
    config = load_config(EvaluateConfig, [*settings, f"report={too_long}.html"])
    error = refusal(ConfigError, evaluate_source, config, source_of(by_length))
    for line, problem in zip(
        error.splitlines(), (f"output: {too_long}", f"  report: {too_long}.html"), strict=True
    ):
        assert line.startswith(f"{problem} cannot be written: "), error
    assert len(rows_of(rewards)) == 4


def test_results_and_errors_have_the_name_that_a_program_gives_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python API writes records to a temporary file, which its caller does not know."""
    pairs = rows_of(tiny.write_pairs(tmp_path / "pairs.jsonl", 2))
    path = write(tmp_path / "temporary.jsonl", *pairs, {"prompt": "a"})
    output, rewards, page = (tmp_path / f"api.{end}" for end in ("json", "jsonl", "html"))
    settings = [f"data.path={path}", f"output={output}", f"output_rewards={rewards}"]
    settings += [f"report={page}", "data.malformed=drop", "data.max_malformed=0.5", "swapped=true"]
    config, source = load_config(EvaluateConfig, settings), source_of(by_length)
    found = evaluate_source(config, source, "records.jsonl")
    assert "records.jsonl:3: " in found.table
    assert json.loads(output.read_text())["data"] == "records.jsonl, chosen and rejected swapped"
    assert [row["record"] for row in rows_of(rewards)] == ["records.jsonl:1", "records.jsonl:2"]
    for text in (found.table, output.read_text(), page.read_text(encoding="utf-8")):
        assert "temporary" not in text
    config = load_config(EvaluateConfig, settings[:1])
    error = refusal(DataError, evaluate_source, config, source, "records.jsonl")
    assert "records.jsonl:3: " in error
    assert "temporary" not in error

    def encode(text: Text) -> None:
        if "refused" in str(text):
            raise DataError("a turn is refused")

    sample = find_task("hhh").sample
    write(path, sample, {**sample, "input": "refused"})
    config = load_config(EvaluateConfig, [*settings[:1], "task=hhh"])
    source = source_of(by_length, encoding=encode)
    (row,) = evaluate_source(config, source, "records.jsonl").rows
    assert row["record"] == "records.jsonl:1"
    printed = capsys.readouterr().out
    assert "records.jsonl:2: left out " in printed
    assert "temporary" not in printed


def test_threshold_may_come_from_a_data_set_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_file, choose = Mock(return_value="cached.jsonl"), Mock(side_effect=DataError("stop"))
    monkeypatch.setattr("nemo_aligner.evaluation.run.local_file", local_file)
    monkeypatch.setattr("nemo_aligner.evaluation.run.choose_threshold", choose)
    names = ["data.path=owner/steps:a", "threshold_from=owner/steps:b"]
    config = load_config(EvaluateConfig, [*names, "task=processbench"])
    with pytest.raises(DataError, match="stop"):
        evaluate_source(config, source_of(Mock()))
    assert local_file.call_args_list == [call("owner/steps:a"), call("owner/steps:b")]
    assert choose.call_args.args[1] == "cached.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_reward_nemo(tmp_path_factory.mktemp("model") / "rm.nemo", seq_length=165)


def test_evaluate_and_compare_verbs_show_and_write_what_they_find(
    model: Path, tmp_path: Path
) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 12)
    output, page, first = (tmp_path / f"report.{end}" for end in ("json", "html", "jsonl"))
    done = tiny.run_verb(
        "evaluate",
        f"rm_model_file={model}",
        f"data.path={pairs}",
        "robustness_pairs=10",
        "data.loss_mask_val=0",
        f"output={output}",
        f"output_rewards={first}",
        f"report={page}",
    )
    assert "note: data.loss_mask_val does nothing\n  with robustness_pairs=10" in done.stdout
    robustness = json.loads(output.read_text())["robustness"]
    assert (robustness["pairs"], robustness["pairs_read"]) == (10, 12)
    for row in robustness["rows"]:
        assert row["pairs"] + row["unchanged"] + row["too_long"] == 10
    polite = robustness["rows"][0]
    assert polite["pairs"] > 0
    assert any(row["too_long"] for row in robustness["rows"]), "some should exceed seq_length"
    assert f"{polite['share']:.3f} ({polite['low']:.3f} to {polite['high']:.3f})" in done.stdout
    assert "no verdict should flip" in page.read_text(encoding="utf-8")

    rows = rows_of(first)
    for row in rows[::3]:  # The file of another model, which orders these pairs the other way.
        row["rewards"] = dict(zip(("rejected", "chosen"), row["rewards"].values(), strict=True))
    second, table, flips = (tmp_path / name for name in ("b.jsonl", "table.json", "flips.jsonl"))
    write(second, *rows)
    files = (str(first), str(second), f"--output={table}", f"--flips={flips}")
    done = tiny.run_verb("compare", *files, "--show=1")
    (row,) = json.loads(table.read_text())["rows"]
    assert (row["pairs"], row["lost"] + row["gained"]) == (12, 4)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 220
    assert "4 verdicts differ; the first one:" in lines
    flipped = rows_of(flips)
    replies = {row["chosen"] for row in rows_of(pairs)}
    assert {flip["chosen"][-1]["content"] for flip in flipped} < replies
    assert len(flipped) == 4


def test_evaluation_of_a_benchmark_shows_and_writes_its_verdicts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample, path = find_task("rewardbench").sample, tmp_path / "b.jsonl"
    items = [{**sample, "chosen": "4" * count} for count in range(1, 6)]
    write(path, *items)
    output, lines = tmp_path / "report.json", tmp_path / "verdicts.jsonl"
    settings = [f"rm_model_file={model}", f"data.path={path}", "task=rewardbench"]
    more = [f"output={output}", f"output_rewards={lines}"]
    output.write_text("from before")
    evaluate(load_config(EvaluateConfig, [*settings, *more]))
    share = sum(verdict["right"] for verdict in rows_of(lines)) / 5
    rows = {row["name"]: row["value"] for row in json.loads(output.read_text())["rows"]}
    assert rows == {"alpacaeval-easy": share, "Chat": share}
    shown = capsys.readouterr().out
    assert f"alpacaeval-easy{share:>10.4f}" in shown
    written = f"output: {output} (in place of another)\noutput_rewards: {lines}\n"
    assert shown.endswith(written)
