"""``examples/evaluate_reward_model.py`` measures what the trainer measured, at another layout."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.load import load_config
from nemo_aligner.errors import ConfigError
from nemo_aligner.evaluation.run import evaluate
from tests import tiny

EVALUATE = "examples/evaluate_reward_model.py"


def last_validation(folder: Path) -> dict[str, float]:
    (path,) = folder.rglob("metrics.csv")
    with path.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("validation-held_out/accuracy")]
    return {
        name.removeprefix("validation-held_out/"): float(value)
        for name, value in rows[-1].items()
        if name.startswith("validation-held_out/") and value
    }


def assert_same_rows(kept: Path, evaluated: Path) -> None:
    both = [[json.loads(line) for line in path.open()] for path in (kept, evaluated)]
    assert len(both[0]) == len(both[1]) > 0
    for one, other in zip(*both, strict=True):
        assert one.pop("rewards") == pytest.approx(other.pop("rewards"), abs=1e-5)
        assert one == other


@pytest.mark.slow(seconds=25)
def test_evaluation_at_tp2_repeats_the_trainers_validation(tmp_path: Path) -> None:
    base = tiny.write_base_nemo(tmp_path / "base.nemo")
    held_out = tiny.write_pairs(tmp_path / "held_out.jsonl", 40, seed=1)
    run = tmp_path / "run"
    tiny.run_script(
        "examples/train_reward_model.py",
        f"pretrained_checkpoint.restore_from_path={base}",
        f"model.data.data_prefix.train=[{tiny.write_pairs(tmp_path / 'train.jsonl', 16)}]",
        f"model.data.data_prefix.validation=[{held_out}]",
        f"exp_manager.explicit_log_dir={run}",
        "exp_manager.report=true",
        "model.data.seq_length=64",
        "model.micro_batch_tokens=300",
        "model.global_batch_size=8",
        "model.optim.lr=1e-3",
        "trainer.rm.max_steps=2",
    )
    report, rewards, page = (tmp_path / f"report.{end}" for end in ("json", "jsonl", "html"))
    done = tiny.run_script(
        EVALUATE,
        f"rm_model_file={run / 'checkpoints' / 'megatron_gpt.nemo'}",
        f"data.path={held_out}",
        f"output={report}",
        f"output_rewards={rewards}",
        f"report={page}",
        "model.tensor_model_parallel_size=2",
        "model.micro_batch_tokens=128",
        processes=2,
    )
    content = json.loads(report.read_text())
    expect = f"expect_contract={content['contract']}"
    refused = tiny.run_script(
        EVALUATE,
        f"rm_model_file={run / 'checkpoints' / 'megatron_gpt.nemo'}",
        f"data.path={held_out}",
        expect,
        "precision=bf16",
        check=False,
    )
    assert refused.returncode == 1
    assert f"wanted {content['contract']}" in refused.stderr
    trained = last_validation(run)
    for name in ("accuracy", "loss", "reward_margin_p05", "ece", "brier", "length_correlation"):
        assert content["metrics"][name] == pytest.approx(trained[name], abs=1e-5), name
    counts = content["counts"]
    assert counts["overlong"] > 0, "some pairs should exceed seq_length, to test the drop"
    assert counts["kept"] + counts["overlong"] == counts["read"] == 40
    assert len(rewards.read_text().splitlines()) == counts["kept"]
    # Once, though two ranks ran.
    assert done.stdout.count(content["contract"]) == 1
    # The run kept what its last validation gave every record, in the same lines.
    assert_same_rows(run / "heldout" / "validation-held_out.jsonl", rewards)
    assert done.stdout.count(f"report: {page}") == 1
    for made in (page, run / "report.html"):
        assert content["contract"] in made.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("sources", "got"),
    [([], "none"), (["rm_model_file=a.nemo", "hf_model=b"], "rm_model_file and hf_model")],
)
def test_where_rewards_come_from_is_one_line(sources: list[str], got: str) -> None:
    done = tiny.run_script(EVALUATE, "data.path=x.jsonl", *sources, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"SettingsError: rm_model_file, hf_model, server: got {got}, wanted exactly one of them"
    )


def test_what_has_no_effect_on_a_benchmark_is_refused() -> None:
    settings = ["task=rewardbench", "data.path=x.jsonl", "data.chosen_key=good"]
    config = load_config(EvaluateConfig, [*settings, "rm_model_file=a.nemo"])
    with pytest.raises(ConfigError, match=r"data.chosen_key: got 'good', which has no effect"):
        evaluate(config)


@pytest.mark.slow(seconds=25)
def test_robustness_is_in_the_table_the_file_and_the_page(tmp_path: Path) -> None:
    model = tiny.write_reward_nemo(tmp_path / "rm.nemo", seq_length=165)
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 12)
    output, page = tmp_path / "report.json", tmp_path / "report.html"
    done = tiny.run_verb(
        "evaluate",
        f"rm_model_file={model}",
        f"data.path={pairs}",
        "robustness_pairs=10",
        f"output={output}",
        f"report={page}",
    )
    found = json.loads(output.read_text())["robustness"]
    assert (found["pairs"], found["pairs_read"]) == (10, 12)
    for row in found["rows"]:
        assert row["pairs"] + row["unchanged"] + row["too_long"] == 10
    polite = found["rows"][0]
    assert polite["pairs"] > 0
    assert any(row["too_long"] for row in found["rows"]), "some should exceed seq_length"
    assert f"{polite['share']:.3f} ({polite['low']:.3f} to {polite['high']:.3f})" in done.stdout
    assert "no verdict should turn" in page.read_text(encoding="utf-8")
    refused = tiny.run_verb(
        "evaluate",
        f"rm_model_file={model}",
        f"data.path={pairs}",
        "task=best_of_n",
        "robustness_pairs=10",
        check=False,
    )
    assert "robustness_pairs: got task=best_of_n" in refused.stderr
