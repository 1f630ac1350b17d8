"""A model that is trained with principles rewards a reply by the principle that it is given."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nemo_aligner
from nemo_aligner.api.reward_model import release_models
from nemo_aligner.contract.principles import add_principles
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from nemo_aligner.utils.errors import DataError
from tests.harness import tiny

PRINCIPLES = ("names red", "names blue")
SETTINGS = {
    "model.optim.lr": 3e-3,
    "model.optim.sched.warmup_steps": 2,
    "model.global_batch_size": 20,
    "model.micro_batch_tokens": 4096,
    "model.data.seq_length": 96,
    "exp_manager.create_tensorboard_logger": False,
}


def draw_pairs(count: int, seed: int, principle: bool = True) -> list[dict[str, Any]]:
    """Draw pairs, each with both principles: what one of them prefers, the other one rejects."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        prompt = tiny.sentence(rng, 2, 4)
        red, blue = (f"{color} {tiny.sentence(rng, 1, 3)}" for color in ("red", "blue"))
        for chosen, rejected, text in ((red, blue, PRINCIPLES[0]), (blue, red, PRINCIPLES[1])):
            row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            rows.append(row | ({"principle": text} if principle else {}))
    return rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Archives of a model with principles, and of one without."""
    folder = tmp_path_factory.mktemp("principles")
    base = tiny.write_base_nemo(folder / "base.nemo", num_hidden_layers=2)
    for principle in (True, False):
        settings: dict[str, Any] = {**SETTINGS, "trainer.rm.max_epochs": 4 if principle else 1}
        if principle:
            settings["model.data.principle_template"] = "It {principle}?"
        records, output = draw_pairs(120, 0, principle), folder / str(principle)
        nemo_aligner.train(base, records, output=output, **settings)
    release_models()
    name = "checkpoints/megatron_gpt.nemo"
    return {principle: folder / str(principle) / name for principle in (True, False)}


def test_conditioned_model_learns_what_another_cannot(trained: dict[bool, Path]) -> None:
    with nemo_aligner.RewardModel.from_pretrained(trained[True]) as model:
        found = model.evaluate(draw_pairs(100, 1))
        assert found.metrics["accuracy"] > 0.9
        for text in PRINCIPLES:
            assert found.metrics[f"by_principle/{text}/accuracy"] > 0.9
        assert "accuracy by principle\n  names blue" in found.table
        assert [*found.rows[0]["texts"]["chosen"]] == ["messages", "principle"]
        reds = model.score([tiny.chat("why", "red cat")], principle=[PRINCIPLES])
        blues = model.score([tiny.chat("why", "blue cat")] * 2, principle=PRINCIPLES)
        assert (reds > blues).ravel().tolist() == [True, False]
    with nemo_aligner.RewardModel.from_pretrained(trained[False]) as model:
        held_out = draw_pairs(100, 1, principle=False)
        assert model.evaluate(held_out).metrics["accuracy"] == pytest.approx(0.5, abs=0.02)
        with pytest.raises(DataError, match=r"text 0: principle: got 'names red', but the model"):
            model.score([tiny.chat("why", "red cat")], principle=PRINCIPLES[0])
        with pytest.raises(DataError, match=r"jsonl:1: .*principle: got 'names red', but"):
            model.evaluate(draw_pairs(2, 1))


def test_rewards_of_principles_are_bit_identical_and_share_their_prefix(
    trained: dict[bool, Path], layout: Any
) -> None:
    """Alone, with other principles for the same reply, and from the prefix cache."""
    reply = tiny.chat("what is the cold river", "red house " * 6)
    samples = add_principles([reply], [[f"names {word}" for word in tiny.WORDS[:8]]])

    def open_scorer(cached: int) -> RewardScorer:
        path = trained[True]
        return load_scorer(path, layout, micro_batch_tokens=512, prefix_cache_tokens=cached)

    plain, caching = open_scorer(0), open_scorer(4096)
    alone = [plain.score_rows([sample], on_error="raise").rewards for sample in samples]
    assert len(np.unique(np.concatenate(alone))) == len(samples)
    before = plain.counts
    together = plain.score_rows(samples, on_error="raise").rewards
    assert together.tobytes() == np.concatenate(alone).tobytes()
    lengths = [len(plain.encode(sample).token_ids) for sample in samples]
    shared = lengths[0] - 12
    computed = plain.counts.computed - before.computed
    assert computed < sum(lengths) - (len(lengths) - 1) * shared
    rows = [Row.of(plain.encode(sample).token_ids) for sample in samples]
    for row, reward in zip(rows, alone, strict=True):
        assert np.concatenate(caching.compute([row])).tobytes() == reward.tobytes()
    assert caching.counts.cached >= (len(rows) - 1) * (shared // 16 * 16)
