"""The prefix cache of models with linear attention: bit-identical rewards, and what it saves.

Dialogues through the prefix cache are also those of latent attention and of attention sinks.
"""

from __future__ import annotations

import json
import random
import urllib.request
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_aligner.batch.cache_use import CachedPrefix
from nemo_aligner.batch.packed import Group, PackedBatch
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.families.qwen import QWEN3_5
from nemo_aligner.config.common import Precision
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.linear_attention import LinearAttentionShape
from nemo_aligner.models.step import infer
from nemo_aligner.planning.planner import PlanRequest
from nemo_aligner.planning.render import render_heading
from nemo_aligner.serving.client.reward import RewardClient
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.scorer import load_scorer
from tests.harness import families, tiny
from tests.harness.once import Once
from tests.serving.engine.batch_invariance import PRECISIONS, draw
from tests.serving.engine.cached_states import (
    BUDGET,
    CACHES,
    compare,
    grow,
    requests,
    score_alone,
    scorer_of,
)
from tests.serving.servers import SERVE, running


@pytest.fixture(scope="module", autouse=True)
def archive(once: Once) -> Path:
    """A reward model; the fixture runs before ``layout``, as converting has its own layout."""

    def write(folder: Path) -> None:
        for case, name in (("nemotron_h_moe", "mamba"), ("qwen3_5", "rm")):
            families.write_reward_model(folder / f"{name}.hf", case, torch.float32)
            convert_hf_to_nemo(folder / f"{name}.hf", folder / f"{name}.nemo", seq_length=BUDGET)

    return once("cached_states", write) / "rm.nemo"


def check(found: dict[str, Any], name: str) -> None:
    assert found["changed"] == dict.fromkeys(found["changed"], 0), name
    assert len(found["changed"]) == len(CACHES) * len(PRECISIONS)
    assert found["spread"] > 0.1, name
    cached = {key: counts["cached"] for key, counts in found["counts"].items()}
    assert cached["large fp32"] == cached["large bf16"]
    assert cached["large fp32"] > cached["two states fp32"] > 0, name
    assert cached["large fp32"] > cached["small fp32"] > 0, name


@pytest.mark.parametrize("name", ["rm", "mamba"])
def test_rewards_from_cached_states_are_those_alone(
    name: str, archive: Path, layout: ParallelLayout
) -> None:
    """Dialogues, branches and repeats, with enough room and with too little."""
    found = compare(archive.with_stem(name), layout)
    check(found, "one rank")
    requested = sum(len(text) for call in requests(random.Random(0)) for text in call)
    counts = found["counts"]["large fp32"]
    assert counts["requested"] == requested
    assert counts["computed"] < 0.3 * requested


def test_rewards_from_cached_states_are_those_alone_at_any_layout(archive: Path) -> None:
    """Each rank has the states of its heads, or of the layers of its stage."""
    layouts = ("TP=2", "PP=2", "DP=2")
    script = "tests/serving/engine/cached_states.py"
    done = tiny.run_script(script, str(archive), *layouts, processes=2)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(layouts)
    for name, of_layout in found.items():
        check(of_layout, name)


@pytest.mark.parametrize(
    ("case", "unit"),
    [(case, 64) for case in ("qwen3_5", "qwen3_next", "nemotron_h")]
    + [(case, 16) for case in ("gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gemma4")],
)
def test_turn_of_a_dialogue_costs_its_own_tokens_and_less_than_a_unit(
    case: str, unit: int, layout: ParallelLayout, tmp_path: Path
) -> None:
    """A unit is a chunk of linear attention, or a block of other decoders' prefix caches."""
    families.write_reward_model(tmp_path / "hf", case, torch.float32)
    convert_hf_to_nemo(tmp_path / "hf", tmp_path / "rm.nemo", seq_length=BUDGET)
    texts = grow(random.Random(3), 12)
    texts.append(texts[-1] + draw(random.Random(4), -len(texts[-1]) % 64))  # ends with a unit
    texts.append([*texts[-1], 5])
    for precision in PRECISIONS:
        plain = scorer_of(tmp_path / "rm.nemo", layout, precision)
        cached = scorer_of(tmp_path / "rm.nemo", layout, precision, plain, CACHES["large"])
        before = 0
        for text in texts:
            computed = cached.counts.computed
            reward = cached.score_token_lists([text])
            assert reward.tobytes() == plain.score_token_lists([text]).tobytes(), precision
            assert cached.counts.computed - computed == len(text) - before // unit * unit
            before = len(text)
        # The same sample again: its last token is always computed.
        computed = cached.counts.computed
        cached.score_token_lists([texts[-2]])
        assert cached.counts.computed - computed == unit


def test_rewards_of_turns_come_from_cached_states(archive: Path, layout: ParallelLayout) -> None:
    """The turns of a dialogue, each with a reward, of which the earlier ones are cached."""
    plain = scorer_of(archive, layout)
    plain.contract = replace(plain.contract, scored_position="turns")
    cached = scorer_of(archive, layout, Precision.fp32, plain, CACHES["large"])
    texts = grow(random.Random(5), 6)
    ends = [len(text) - 1 for text in texts]
    for number, text in enumerate(texts, 1):
        computed = cached.counts.computed
        (rewards,) = cached.compute([Row.of(text, ends[:number])])
        assert rewards.tobytes() == plain.compute([Row.of(text, ends[:number])])[0].tobytes()
        before = len(texts[number - 2]) if number > 1 else 0
        assert cached.counts.computed - computed == len(text) - before // 64 * 64


def test_prompt_is_computed_once_where_replies_branch(
    archive: Path, layout: ParallelLayout
) -> None:
    plain = scorer_of(archive, layout)
    rng = random.Random(6)
    prompt = draw(rng, 200)
    replies = [prompt + draw(rng, 100) for _ in range(8)]
    alone = score_alone(plain, replies)
    cached = scorer_of(archive, layout, Precision.fp32, plain, CACHES["large"])
    costs = []
    for calls in (replies[:1], replies[1:2], replies[2:3], replies[3:]):
        computed = cached.counts.computed
        rewards = cached.score_token_lists(calls)
        assert rewards.tobytes() == alone[[replies.index(text) for text in calls]].tobytes()
        costs.append(cached.counts.computed - computed)
    # The branch is known with the second reply. Its snapshot is behind 192 tokens of the prompt;
    # replies of one call also share the rest.
    assert costs == [300, 300, 108, 5 * 100 + 8]
    # Replies that come together are known to branch, and the next call begins at the prompt.
    cached.reset_cache()
    cached.score_token_lists(replies[:4])
    computed = cached.counts.computed
    assert cached.score_token_lists(replies[4:5]).tobytes() == alone[4:5].tobytes()
    assert cached.counts.computed - computed == 108


def test_reward_depends_on_the_cached_state(archive: Path, layout: ParallelLayout) -> None:
    """Otherwise the tests above would show nothing; and a call that failed leaves no snapshot."""
    plain = scorer_of(archive, layout)
    cached = scorer_of(archive, layout, Precision.fp32, plain, CACHES["large"])
    first, second = grow(random.Random(7), 2, most=200)[:2]
    alone = plain.score_token_lists([second])
    cached.score_token_lists([first])
    assert cached._pool is not None
    assert cached._pool.states is not None
    cached._pool.states.touch()
    assert not np.array_equal(cached.score_token_lists([second]), alone)
    cached.reset_cache()
    assert np.array_equal(cached.score_token_lists([second]), alone)


def test_model_without_room_for_states_has_no_prefix_cache(
    archive: Path, layout: ParallelLayout, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"micro_batch_tokens": BUDGET, "prefix_cache_tokens": 4096}
    scorer = load_scorer(archive, layout, **kinds, prefix_cache_states=0)
    assert (scorer.prefix_cache_bytes, scorer.num_cached_states) == (0, 0)
    assert "prefix_cache_states=0 leaves no room" in caplog.text
    samples = [[*range(3, 103), last] for last in (5, 6)]
    first, again = scorer.score_token_lists(samples), scorer.score_token_lists(samples)
    assert (first == again).all()
    assert scorer.counts.cached == 0


def test_cached_prefix_without_a_state_is_rejected(archive: Path, layout: ParallelLayout) -> None:
    model = scorer_of(archive, layout).model
    cached = CachedPrefix(torch.arange(64))
    pack = PackedBatch.pack([list(range(70))], groups=[Group(1, 64, cached)])
    with pytest.raises(ValueError, match="1 cached prefixes and 0 cached states"):
        infer(model, [pack], layout, model.new_key_value_pool(64, 1))


def test_memory_of_snapshots_is_told(archive: Path, layout: ParallelLayout) -> None:
    shape = ModelShape.from_config(QWEN3_5.to_nemo(families.hf_config("qwen3_5").to_dict()))
    plain = scorer_of(archive, layout)
    small, large = (
        scorer_of(archive, layout, Precision.fp32, plain, (64, states)) for states in (1, 5)
    )
    assert large.prefix_cache_bytes - small.prefix_cache_bytes == 4 * shape.snapshot_bytes(4)
    request = PlanRequest()
    heading = render_heading("tiny", request.planner(shape), request)
    expected = shape.snapshot_bytes(2) / 1e6
    assert f"{expected:.1f} MB for each of server.prefix_cache_states" in heading
    # docs/serving.md: Qwen3.5 9B has 24 layers of 16 key heads and 32 value heads of 128 channels.
    assert round(24 * LinearAttentionShape(16, 32, 128, 128, 4).snapshot_bytes(2) / 1e6, 1) == 51.5


def test_server_has_the_bits_of_a_batch_of_one_from_cached_states(
    archive: Path, layout: ParallelLayout, tmp_path: Path
) -> None:
    pytest.importorskip("fastapi")
    texts = grow(random.Random(8), 12)
    alone = score_alone(scorer_of(archive, layout), texts)
    settings = [
        f"rm_model_file={archive}",
        "server.port=0",
        f"model.micro_batch_tokens={BUDGET}",
        "server.prefix_cache_tokens=2048",
        "server.prefix_cache_states=3",
    ]
    with running(tmp_path, SERVE, *settings) as server, RewardClient(server.url) as client:

        def computed() -> float:
            with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
                lines = answer.read().decode().splitlines()
            name = "nemo_aligner_server_computed_tokens_total"
            (line,) = [line for line in lines if line.startswith(name)]
            return float(line.split()[-1])

        start = computed()
        rewards = [client.score_tokens([text]) for text in texts]
        assert np.concatenate(rewards).tobytes() == alone.tobytes()
        ends = [0, *(len(text) for text in texts)]
        assert computed() - start == sum(end - begin // 64 * 64 for begin, end in pairwise(ends))
        assert "Prefix cache: 2,048 tokens and 3 states of linear attention" in server.output()
