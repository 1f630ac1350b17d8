"""Rewards are the same with and without a prefix cache, in any traffic and at any layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.models.attention.pool import pool_bytes
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.parallel.layout import LayoutSizes, ParallelLayout
from tests import families, tiny
from tests.once import Once
from tests.scoring import cached_layouts
from tests.scoring.cached_layouts import CACHES, scorers

# All keys at once, windows, and windows in every other layer with capped scores.
CASES = ("llama3", "mistral_untied_window", "gemma2")
SIZES = {
    "one": LayoutSizes(),
    "TP=2": LayoutSizes(tp=2),
    "TP=2+SP": LayoutSizes(tp=2, sequence_parallel=True),
    "PP=2": LayoutSizes(pp=2),
    "DP=2": LayoutSizes(dp=2),
}


@pytest.fixture(scope="module")
def archives(once: Once) -> dict[str, Path]:
    def write(folder: Path) -> None:
        for case in CASES:
            families.write_base_nemo(folder / f"{case}.nemo", case)

    folder = once("cached_models", write)
    return {case: folder / f"{case}.nemo" for case in CASES}


def shape_of(archive: Path) -> ModelShape:
    from nemo_aligner.checkpoint.nemo.open import open_nemo

    with open_nemo(archive, with_weights=False) as folder:
        return ModelShape.from_config(folder.config)


def check(found: dict[str, Any], archive: Path, sizes: LayoutSizes) -> None:
    assert found["range"] > 0.3
    assert max(found["worst"].values()) < 1e-5
    assert found["after_failure"] < 1e-5
    counts = [found["counts"][key] for key in found["counts"]]
    assert {each["asked"] for each in counts} == {found["without"]["asked"]}
    # The smallest has one block, and the largest saves a good part.
    assert [each["cached"] > 0 for each in counts] == [True] * 3
    assert counts[0]["cached"] < counts[1]["cached"] < counts[2]["cached"]
    # Replicas share out a group, and then each computes its beginning.
    share = 0.75 if sizes.dp == 1 else 0.95
    assert counts[2]["computed"] < share * found["without"]["computed"]
    shape = shape_of(archive)
    assert found["bytes"] == [pool_bytes(shape, sizes, 4, tokens) for tokens in CACHES]


@pytest.mark.parametrize("case", CASES)
def test_a_cache_changes_no_reward(
    case: str, archives: dict[str, Path], layout: ParallelLayout
) -> None:
    check(cached_layouts.compare(archives[case], layout), archives[case], SIZES["one"])


@pytest.mark.slow(seconds=30)
def test_a_cache_changes_no_reward_at_any_layout(archives: dict[str, Path]) -> None:
    script = "tests/scoring/cached_layouts.py"
    done = tiny.run_script(script, *map(str, archives.values()), processes=2)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(cached_layouts.LAYOUTS)
    for name, by_case in found.items():
        for case, of_case in by_case.items():
            check(of_case, archives[case], SIZES[name])


@pytest.fixture(scope="module")
def both(archives: dict[str, Path], layout: ParallelLayout) -> Any:
    return scorers(archives["llama3"], layout, (1024,))


def test_whatever_the_length(both: Any) -> None:
    """One token, a block and its neighbours, and the longest, each after all shorter ones."""
    plain, cached = both
    cached.forget()
    text = np.random.RandomState(0).randint(3, 300, 256).tolist()
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 255, 256]
    for length in [*lengths, *lengths[::-1]]:
        rewards = cached.score_token_lists([text[:length]])
        np.testing.assert_allclose(rewards, plain.score_token_lists([text[:length]]), atol=1e-5)


def test_a_text_that_came_before_computes_its_last_block(both: Any) -> None:
    _, cached = both
    cached.forget()
    text = [[7, 8, 9, 10] * 20]
    cached.score_token_lists(text)
    before = cached.counts
    cached.score_token_lists(text)
    after = cached.counts
    assert (after.asked - before.asked, after.cached - before.cached) == (80, 64)
    assert after.computed - before.computed == 16
    assert after == replace(before).after(80, 16, 64)


def test_a_call_that_fails_leaves_nothing_to_be_found(both: Any) -> None:
    plain, cached = both
    assert cached_layouts.after_failure(plain, cached, cached._layout) < 1e-5


def test_fewer_tokens_than_a_block_are_no_cache(
    archives: dict[str, Path], layout: ParallelLayout
) -> None:
    plain, small = scorers(archives["llama3"], layout, (15,))
    assert (plain.prefix_cache_bytes, small.prefix_cache_bytes) == (0, 0)
    for _ in range(2):
        small.score_token_lists([[5] * 40])
    assert (small.counts.cached, small.counts.computed) == (0, 80)
