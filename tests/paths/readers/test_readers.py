"""Exports read by transformers and TRL: their scores are the archive's, for every sample."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.contract.scorer import score_all
from tests.harness import tiny
from tests.harness.once import Once

CHATS = [
    tiny.chat("what is the river", "thank you the river is blue"),
    tiny.chat("who sings", "the bird sings in the tree and the dog sleeps"),
    tiny.chat("why", "no"),
]


@pytest.fixture(scope="module")
def folder(once: Once) -> Path:
    """A folder with ``rm.nemo``, its export ``export/`` and a policy in ``policy/``."""
    return once("readers", write_models)


def write_models(folder: Path) -> None:
    tiny.write_hf_reward_model(folder / "trained")
    tiny.write_hf_checkpoint(folder / "policy")
    for verb, source, target in (
        ("convert", "trained", "rm.nemo"),
        ("export", "rm.nemo", "export"),
    ):
        paths = f"--input={folder / source}", f"--output={folder / target}"
        tiny.run_verb(verb, *paths)
    (folder / "chats.json").write_text(json.dumps(CHATS))


@pytest.fixture(scope="module")
def rewards(folder: Path) -> np.ndarray:
    """The rewards of CHATS by the archive."""
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import destroy_layout, initialize_layout
    from nemo_aligner.serving.engine.scorer import load_scorer

    with launch():
        scorer = load_scorer(folder / "rm.nemo", initialize_layout())
        scores = score_all(scorer, CHATS)[:, 0]
        destroy_layout()
    assert np.ptp(scores) > 0.1
    return scores


@pytest.mark.smoke
def test_export_in_a_pipeline_of_transformers(folder: Path, rewards: np.ndarray) -> None:
    from transformers import AutoTokenizer, pipeline

    tokenizer = AutoTokenizer.from_pretrained(folder / "export")
    score = pipeline("text-classification", model=str(folder / "export"), tokenizer=tokenizer)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in CHATS]
    for batch_size in (1, 3):
        outputs = score(
            texts, function_to_apply="none", batch_size=batch_size, add_special_tokens=False
        )
        assert [output["label"] for output in outputs] == ["reward"] * 3
        np.testing.assert_allclose([output["score"] for output in outputs], rewards, atol=1e-5)


def test_export_as_the_reward_function_of_trl_s_grpo_trainer(
    folder: Path, rewards: np.ndarray, trl_python: Path
) -> None:
    script = tiny.ROOT / "tests/paths/readers/trl_rewards.py"
    command = [trl_python, script, folder / "export", folder / "policy", folder / "chats.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rewards_by_trl = json.loads(done.stdout.strip().splitlines()[-1])
    np.testing.assert_allclose(rewards_by_trl, rewards, atol=1e-5)
