"""One model as an archive, as an export, and behind three protocols: the same rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.load import load_config
from nemo_aligner.evaluation.run import evaluate
from nemo_aligner.utils.errors import AlignerError, ConfigError, ServingError
from tests.checkpoint.hf.exporting import export
from tests.evaluation.refusals import refusal
from tests.harness import tiny
from tests.serving.servers import SERVE, gateway, running

ATTRIBUTES = ("helpfulness", "verbosity")
NO_MODEL = f"expect_fingerprint={'0' * 32}"
WEIGHTS = "source.attribute_weights={helpfulness: 1, verbosity: 1}"


def run(folder: Path, name: str, *settings: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lines of ``output_rewards``, and ``output``."""
    rows, report = folder / f"{name}.jsonl", folder / f"{name}.json"
    outputs = (f"output_rewards={rows}", f"output={report}")
    evaluate(load_config(EvaluateConfig, [*settings, *outputs]))
    return [json.loads(line) for line in rows.open()], json.loads(report.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive, its export, and files to measure them on."""
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import initialize_layout

    folder = tmp_path_factory.mktemp("sources")
    tiny.write_reward_nemo(folder / "rm.nemo", seq_length=64, add_bos=False, add_eos=False)
    with launch():
        export(folder / "rm.nemo", folder / "hf", initialize_layout())
    tiny.write_pairs(folder / "pairs.jsonl", 24)
    tiny.write_ratings(folder / "rated.jsonl", 16, ATTRIBUTES)
    return folder


@pytest.fixture(scope="module")
def sources(folder: Path) -> Iterator[dict[str, list[str]]]:
    """Settings of every source but the archive."""
    pytest.importorskip("fastapi")
    for name in ("server", "gateway"):
        (folder / name).mkdir()
    serve = (SERVE, f"rm_model_file={folder / 'rm.nemo'}")
    with (
        running(folder / "server", *serve, "server.port=0", "model.micro_batch_tokens=256") as ours,
        gateway(folder / "gateway", f"backends=[{ours.url}]") as others,
    ):
        yield {
            "export": [f"hf_model={folder / 'hf'}"],
            "ours": [f"server={ours.url}"],
            "vllm": [f"server={others.url}/classify", WEIGHTS],
            "openrlhf": [f"server={others.url}/get_reward", f"source.tokenizer={folder / 'hf'}"],
        }


def pair_rewards(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([[row["rewards"][side] for side in ("chosen", "rejected")] for row in rows])


def test_every_source_has_the_same_rewards_and_verdicts(
    folder: Path, sources: dict[str, list[str]]
) -> None:
    """Of pairs, of ratings, and of a benchmark whose replies are changed."""
    sample = {"input": "a red dog", "output_1": "thank you", "output_2": "a cat", "label": 1}
    long = {**sample, "output_2": "a cat " * 100}
    (folder / "llmbar.json").write_text(json.dumps([sample, long]))
    pairs, rated = (f"data.path={folder / name}.jsonl" for name in ("pairs", "rated"))
    task = (f"data.path={folder / 'llmbar.json'}", "task=llmbar", "robustness_pairs=1")
    model = f"rm_model_file={folder / 'rm.nemo'}"

    archive, report = run(folder, "archive", model, pairs)
    assert report["counts"]["overlong"] > 0, "some should exceed seq_length"
    wanted = pair_rewards(archive)
    for name, settings in sources.items():
        rows, found = run(folder, name, *settings, pairs)
        assert [row["record"] for row in rows] == [row["record"] for row in archive], name
        rewards = pair_rewards(rows)
        np.testing.assert_allclose(rewards, wanted, atol=1e-4, err_msg=name)
        verdicts = [np.sign(both[:, 0] - both[:, 1]).tolist() for both in (rewards, wanted)]
        assert verdicts[0] == verdicts[1], name
        key = "overlong" if name == "export" else "refused"
        assert found["counts"][key] == report["counts"]["overlong"], name
        # Of an export it is the one in its folder.
        assert (found["contract"] == report["contract"]) == (name in ("ours", "export"))

    archive, report = run(folder, "archive", model, rated)
    for name in ("export", "ours", "vllm"):
        rows, found = run(folder, name, *sources[name], rated)
        for row, other in zip(rows, archive, strict=True):
            assert row["rewards"] == pytest.approx(other["rewards"], abs=1e-4)
            assert row["labels"] == other["labels"]
        assert found["metrics"]["loss"] == pytest.approx(report["metrics"]["loss"], abs=1e-4)

    _, report = run(folder, "archive", model, *task)
    assert report["left_out"] == {"too long": 1}
    for name in ("ours", "vllm"):
        _, found = run(folder, name, *sources[name], *task)
        assert found["left_out"] == {"without a reward": 1}
        changes = zip(found["robustness"]["rows"], report["robustness"]["rows"], strict=True)
        for row, other in changes:
            assert row == pytest.approx(other, abs=1e-4)


def test_source_that_settings_do_not_fit_is_refused(
    folder: Path, sources: dict[str, list[str]]
) -> None:
    wrong = {}
    for name, setting, kind, message in (
        ("vllm", "source.attribute_weights={a: 1}", ServingError, "got 2 numbers for a text"),
        ("openrlhf", "source.tokenizer=null", ConfigError, "source.tokenizer: got none"),
        ("openrlhf", WEIGHTS, ConfigError, "/get_reward answers one number"),
        ("export", "source.attribute_weights={a: 1}", ConfigError, "wanted the model's: helpf"),
        ("vllm", "expect_contract=ab", ConfigError, "says no scoring contract"),
        ("ours", "expect_contract=ab", ConfigError, "wanted ab"),
        ("vllm", NO_MODEL, ConfigError, "tells no model fingerprint"),
        ("export", NO_MODEL, ConfigError, "tells no model fingerprint"),
        ("ours", NO_MODEL, ServingError, "wanted 0000"),
        ("ours", "precision=bf16", AlignerError, "precision: got 'bf16', wanted null"),
        ("ours", WEIGHTS, ConfigError, "no use for it"),
        ("export", "source.timeout_s=1", ConfigError, "no use for it"),
        ("vllm", "source.token_variable=NO_SUCH", ConfigError, "NO_SUCH: it is not set"),
    ):
        data = f"data.path={folder / 'pairs.jsonl'}"
        said = refusal(kind, run, folder, "wrong", *sources[name], data, setting)
        names = setting.partition("=")[0] if message == "no use for it" else ""
        if message not in said or names not in said:
            wrong[name, setting] = said
    assert not wrong, wrong
