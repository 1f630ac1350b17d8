"""Layouts that fit a model, and new processes that score at each of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.checkpoint.nemo.reward_model import CheckpointDescription, load_reward_model
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.contract.messages import Conversation
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import LayoutSizes, destroy_layout, initialize_layout
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.gemma4 import Gemma4Shape
from nemo_aligner.models.shapes.linear_attention import LinearAttentionShape
from nemo_aligner.serving.engine.scorer import RewardScorer
from nemo_aligner.tools import layouts_worker
from nemo_aligner.tools.invariance import Scored
from nemo_aligner.tools.layouts_worker import fitting_layouts, most_recomputation, run_world
from nemo_aligner.utils.errors import PeerError
from tests.harness import tiny

SHAPE = ModelShape.from_config(
    {
        "num_layers": 6,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 320,
        "encoder_seq_length": 256,
    }
)


def test_fitting_layouts_and_why_others_do_not_fit() -> None:
    assert fitting_layouts(1, SHAPE) == ([LayoutSizes(tp=1, pp=1, dp=1)], [])
    fitting, reasons = fitting_layouts(4, SHAPE)
    assert list(map(str, fitting)) == [
        "TP=2 PP=2 DP=1",
        "TP=2+SP PP=2 DP=1",
        "TP=1 PP=2 DP=2",
        "TP=2 PP=1 DP=2",
        "TP=2+SP PP=1 DP=2",
        "TP=1 PP=1 DP=4",
        "TP=1 CP=4 PP=1 DP=1",
    ]
    assert [reason.partition(":")[0] for reason in reasons] == ["TP=1 PP=4 DP=1", "TP=4 PP=1 DP=1"]
    assert "got 4, wanted a divisor of the model's 6 layers" in reasons[0]
    assert "got 4, wanted a divisor of the model's 2 query groups" in reasons[1]


def test_layouts_and_recomputation_that_a_decoder_does_not_support_are_left_out() -> None:
    linear = replace(SHAPE, linear_attention=LinearAttentionShape(2, 2, 16, 16, 4))
    fitting, reasons = fitting_layouts(2, linear)
    assert fitting
    assert all(sizes.cp == 1 for sizes in fitting)
    assert reasons[-1] == (
        "TP=1 CP=2 PP=1 DP=1: model.context_parallel_size: got 2, which is not supported for a "
        "model with linear attention or Mamba-2. Set it to 1"
    )
    gemma4 = Gemma4Shape(16, 2, keys_as_values=False, global_rotary=0.5)
    for layers, wanted in ((0, Recompute.full), (2, Recompute.selective)):
        shape = replace(SHAPE, gemma4=replace(gemma4, shared_layers=layers))
        assert most_recomputation(shape) is wanted


def test_check_in_a_world_that_fails_says_why_once(capfd: pytest.CaptureFixture[str]) -> None:
    job = {"checkpoint": "nowhere.nemo", "texts": ["a"], "precision": "fp32"}
    with pytest.raises(PeerError, match="the run of 2 processes failed"):
        run_world(job, 2)
    assert capfd.readouterr().err == (
        "CheckpointError: nowhere.nemo: there is no checkpoint. Pass a .nemo file, the folder that "
        "it unpacks to, a Hugging Face folder, or a .gguf file\n"
    )


def test_new_processes_get_every_kind_of_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = tiny.chat("why", "so")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    texts = ["raw", chat, Conversation(chat, [tool]), Conversation(chat, principle="be brief")]
    received = []

    def score(checkpoint: str, samples: list[Any], precision: Precision) -> Scored:
        received.extend(samples)
        return Scored({}, np.zeros((4, 1)), [])

    def run(arguments: list[str], size: int, variables: dict[str, str]) -> int:
        return layouts_worker.main(*arguments[2:])

    monkeypatch.setattr(layouts_worker, "score_everywhere", score)
    monkeypatch.setattr(layouts_worker, "run_ranks", run)
    monkeypatch.setattr(layouts_worker.gc, "freeze", lambda: None)
    run_world({"checkpoint": "rm.nemo", "texts": texts, "precision": "fp32"}, 1)
    assert received == texts


def test_rewards_in_training_combine_turns_as_a_scorer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.write_reward_nemo(tmp_path / "rm.nemo", reads="turns", seq_length=64)
    description = CheckpointDescription.read(path)
    assert description.contract is not None
    contract = replace(description.contract, aggregate="mean")
    averaged = replace(description, contract=contract)
    monkeypatch.setattr(layouts_worker.CheckpointDescription, "read", lambda _: averaged)
    two_turns = [*tiny.chat("what is the river", "thank you"), *tiny.chat("why", "so")]
    texts = [two_turns, tiny.chat("who sings", "the bird in the tree")]
    with launch():
        layout = initialize_layout()
        loaded = load_reward_model(path, layout, Precision.fp32)
        scorer = RewardScorer(loaded.model, contract, loaded.tokenizer, layout, 64)
        wanted = score_all(scorer, texts)
        rewards = layouts_worker._score_in_training(
            path, texts, Precision.fp32, layout, Recompute.none
        )
        destroy_layout()
    assert rewards == pytest.approx(wanted, abs=1e-5)
