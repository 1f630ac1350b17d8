"""The main job with a tiny model: convert, train at TP=2, evaluate, serve, ask for rewards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.serving.client.reward import RewardClient
from tests import tiny
from tests.serving.servers import running

pytest.importorskip("pytriton", reason="needs the extra [serving]")

ATTRIBUTES = ("helpfulness", "verbosity")
KINDS = ("ranking", "regression")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_base_nemo(tmp_path_factory.mktemp("base") / "base.nemo")


@pytest.fixture(scope="module", params=KINDS)
def trained(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A reward model trained at TP=2, and a held-out file of its kind.

    Rankings are by torchrun and plain python, as a user starts them.
    """
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "ranking":
        train = tiny.write_pairs(folder / "train.jsonl", 48)
        heldout = tiny.write_pairs(folder / "heldout.jsonl", 9, seed=1)
        kind = []
    else:
        train = tiny.write_ratings(folder / "train.jsonl", 48, ATTRIBUTES)
        heldout = tiny.write_ratings(folder / "heldout.jsonl", 9, ATTRIBUTES, seed=1)
        kind = [
            "model.reward_model_type=regression",
            f"model.regression.attributes=[{','.join(ATTRIBUTES)}]",
        ]
    tiny.run_script(
        "examples/train_reward_model.py",
        f"pretrained_checkpoint.restore_from_path={base}",
        f"model.data.data_prefix.train=[{train}]",
        f"model.data.data_prefix.validation=[{heldout}]",
        f"exp_manager.explicit_log_dir={folder / 'run'}",
        "model.tensor_model_parallel_size=2",
        "model.sequence_parallel=true",
        "model.data.seq_length=128",
        "model.micro_batch_tokens=256",
        "model.global_batch_size=16",
        "model.optim.lr=1e-3",
        *kind,
        processes=2,
        fresh=request.param == "ranking",
    )
    return folder / "run/checkpoints/megatron_gpt.nemo", heldout


def conversations(heldout: Path) -> list[list[dict[str, str]]]:
    rows = [json.loads(line) for line in heldout.read_text().splitlines()]
    replies = [(row, row[key]) for row in rows for key in ("chosen", "response") if key in row]
    return [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": reply}]
        for row, reply in replies
    ]


def evaluated(archive: Path, heldout: Path, folder: Path) -> tuple[dict, np.ndarray]:
    """The evaluation example's report, and its rewards of those conversations."""
    report, rewards = folder / "report.json", folder / "rewards.jsonl"
    tiny.run_script(
        "examples/evaluate_reward_model.py",
        f"rm_model_file={archive}",
        f"data.path={heldout}",
        f"output={report}",
        f"output_rewards={rewards}",
        fresh=True,
    )
    rows = [json.loads(line)["rewards"] for line in rewards.read_text().splitlines()]
    values = [
        [row["chosen"]] if "chosen" in row else [row[name] for name in ATTRIBUTES] for row in rows
    ]
    return json.loads(report.read_text()), np.array(values)


def test_server_gives_the_rewards_of_the_evaluation(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    archive, heldout = trained
    report, wanted = evaluated(archive, heldout, tmp_path)
    assert report["counts"]["kept"] == len(wanted) == 9
    texts = conversations(heldout)
    served = [f"rm_model_file={archive}", "server.port=0"]
    with running(tmp_path, "examples/serve_reward_model.py", *served) as server:
        with RewardClient(server.url) as client:
            together = client.score(texts)
            alone = np.concatenate([client.score([text]) for text in texts])
        assert server.stop() == [0], server.output()[-3000:]
    assert np.ptp(wanted) > 0.01
    np.testing.assert_allclose(together, wanted, atol=1e-5)
    np.testing.assert_allclose(alone, wanted, atol=1e-5)
