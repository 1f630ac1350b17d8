"""Rewards are equal with and without a prefix cache, for any traffic and at any layout."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.distributed.layout import LayoutSizes, ParallelLayout
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.serving.engine.rows import Row
from tests.harness import families, tiny
from tests.harness.once import Once
from tests.serving.engine import cached_layouts
from tests.serving.engine.batch_invariance import traffic
from tests.serving.engine.cached_layouts import CACHES, score_ahead, scorers

# Full attention, windows, windows in every other layer with softcaps, and norms after RoPE.
CASES = (
    "llama3", "mistral_untied_window", "gemma2", "smollm3_untied_window", "gemma3", "hunyuan",
    "gemma4_small",
)  # fmt: skip
SIZES = {
    "one": LayoutSizes(),
    "TP=2": LayoutSizes(tp=2),
    "TP=2+SP": LayoutSizes(tp=2, sequence_parallel=True),
    "PP=2": LayoutSizes(pp=2),
    "DP=2": LayoutSizes(dp=2),
    "CP=2": LayoutSizes(cp=2),
}


@pytest.fixture(scope="module")
def archives(once: Once) -> dict[str, Path]:
    def write(folder: Path) -> None:
        for case in CASES:
            families.write_base_nemo(folder / f"{case}.nemo", case)

    folder = once("cached_models", write)
    return {case: folder / f"{case}.nemo" for case in CASES}


def shape_of(archive: Path) -> ModelShape:
    from nemo_aligner.checkpoint.nemo.archive import open_nemo

    with open_nemo(archive, with_weights=False) as folder:
        return ModelShape.from_config(folder.config)


def check(found: dict[str, Any], archive: Path, sizes: LayoutSizes, name: str) -> None:
    assert found["range"] > 0.3, name
    assert max(found["worst"].values()) < 1e-5, name
    assert found["after_failure"] < 1e-5, name
    counts = [found["counts"][key] for key in found["counts"]]
    assert {each["requested"] for each in counts} == {found["without"]["requested"]}
    # The smallest cache has one block, and the largest one saves much.
    assert [each["cached"] > 0 for each in counts] == [True] * 3
    assert counts[0]["cached"] < counts[1]["cached"] < counts[2]["cached"]
    # Replicas split a group, and each of them computes its prefix.
    share = 0.75 if sizes.dp == 1 else 0.95
    assert counts[2]["computed"] < share * found["without"]["computed"]
    # Keys and values in fp32, of the layers and groups of a rank.
    per_token = shape_of(archive).cached_token_bytes(4) // (sizes.pp * sizes.tp)
    assert found["bytes"] == [per_token * tokens for tokens in CACHES]


def test_cached_rewards_are_those_without_a_cache(
    archives: dict[str, Path], layout: ParallelLayout
) -> None:
    for case, archive in archives.items():
        check(cached_layouts.compare(archive, layout), archive, SIZES["one"], case)


def test_cached_rewards_are_those_without_a_cache_at_any_layout(archives: dict[str, Path]) -> None:
    """With full attention, and with windows in every other layer."""
    script = "tests/serving/engine/cached_layouts.py"
    chosen = (str(archives[case]) for case in ("llama3", "gemma2"))
    done = tiny.run_script(script, *chosen, processes=2)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(cached_layouts.LAYOUTS)
    for name, by_case in found.items():
        for case, of_case in by_case.items():
            check(of_case, archives[case], SIZES[name], f"{case} at {name}")


def test_calls_that_are_begun_ahead_have_the_rewards_of_those_one_by_one(
    archives: dict[str, Path], layout: ParallelLayout
) -> None:
    plain, cached = scorers(archives["llama3"], layout, (1024,))
    calls = traffic(random.Random(1), 12)
    for ahead, call in zip(score_ahead(cached, calls), calls, strict=True):
        wanted = np.concatenate(plain.compute([Row.of(ids) for ids in call]))
        np.testing.assert_allclose(ahead, wanted, atol=1e-5)
    assert cached.counts.cached > 0
    assert cached.counts.requested == plain.counts.requested


def test_cached_texts_of_any_length(archives: dict[str, Path], layout: ParallelLayout) -> None:
    """One token, a block and lengths around it, and the longest, each after all shorter ones."""
    plain, cached, small = scorers(archives["llama3"], layout, (1024, 15))
    text = np.random.RandomState(0).randint(3, 300, 256).tolist()
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 255, 256]
    for length in [*lengths, *lengths[::-1]]:
        rewards = cached.score_token_lists([text[:length]])
        np.testing.assert_allclose(rewards, plain.score_token_lists([text[:length]]), atol=1e-5)
    # A repeated sample computes only its last block.
    cached.reset_cache()
    texts = [[7, 8, 9, 10] * 20]
    cached.score_token_lists(texts)
    before = cached.counts
    cached.score_token_lists(texts)
    assert cached.counts == before.after(80, 16, 64)
    # A cache smaller than a block is no cache.
    assert (plain.prefix_cache_bytes, small.prefix_cache_bytes) == (0, 0)
    for _ in range(2):
        small.score_token_lists([[5] * 40])
    assert (small.counts.cached, small.counts.computed) == (0, 80)
