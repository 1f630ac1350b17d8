"""A reward has the same bits alone and in any company: in process, over HTTP, at any layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from nemo_aligner.config.common import Precision
from nemo_aligner.models.attention import blocks, packed
from nemo_aligner.parallel.cpu import products
from nemo_aligner.parallel.layout import ParallelLayout
from tests import tiny
from tests.once import Once
from tests.scoring.company import (
    BUDGET,
    LONGEST,
    ORDERS,
    VERY_LONG,
    Case,
    calls,
    compare,
    count_changed,
    draw_texts,
    scorers_of,
    write_cases,
)
from tests.serving.servers import running

NOTHING = {"fp32": 0, "bf16": 0}


@pytest.fixture(scope="module")
def folder(once: Once) -> Path:
    """Of one tiny reward model, for short texts and for long ones."""

    def write(folder: Path) -> None:
        for longest in (LONGEST, VERY_LONG):
            tiny.write_reward_nemo(folder / f"{longest}.nemo", seq_length=longest)

    return once("company", write)


@pytest.fixture(scope="module")
def short(folder: Path) -> Case:
    return Case(str(folder / f"{LONGEST}.nemo"), draw_texts(200, LONGEST, 90))


@pytest.fixture(scope="module")
def very_long(folder: Path) -> Case:
    texts = draw_texts(5, VERY_LONG, 90)
    return Case(str(folder / f"{VERY_LONG}.nemo"), texts, orders=2, budget=VERY_LONG)


def fewer(case: Case, texts: int) -> Case:
    return replace(case, texts=case.texts[:texts], orders=4)


def assert_nothing_changes(
    path: Path, cases: dict[str, Case], processes: int, *layouts: str
) -> None:
    arguments = (str(write_cases(path, cases)), *layouts)
    done = tiny.run_script("tests/scoring/company.py", *arguments, processes=processes, timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {layout: dict.fromkeys(cases, NOTHING) for layout in layouts}


@pytest.mark.slow(seconds=30)
def test_two_hundred_texts_with_three_threads(short: Case, very_long: Case, tmp_path: Path) -> None:
    cases = {"short": short, "very long": very_long}
    assert_nothing_changes(tmp_path / "cases.json", cases, 1, "one")


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("name", ["TP=2", "PP=2"])
def test_two_hundred_texts_on_two_ranks(
    name: str, short: Case, very_long: Case, tmp_path: Path
) -> None:
    cases = {"short": short, "very long": very_long}
    assert_nothing_changes(tmp_path / "cases.json", cases, 2, name)


@pytest.mark.slow(seconds=15)
def test_forty_texts_under_sequence_parallelism(
    short: Case, very_long: Case, tmp_path: Path
) -> None:
    cases = {"short": fewer(short, 40), "very long": very_long}
    assert_nothing_changes(tmp_path / "cases.json", cases, 2, "TP=2+SP")


@pytest.mark.slow(seconds=25)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_over_http(precision: str, short: Case, layout: ParallelLayout, tmp_path: Path) -> None:
    pytest.importorskip("pytriton")
    from nemo_aligner.serving.client.reward import RewardClient

    texts = draw_texts(200, LONGEST, 90, seed=1)
    scorer = scorers_of(short, layout, Precision(precision), rows=256)[0]
    alone = np.concatenate([scorer.score_tokens([text]) for text in texts])
    settings = (f"rm_model_file={short.archive}", f"precision={precision}", "server.port=0")
    more = (f"model.micro_batch_tokens={BUDGET}", "server.prefix_cache_tokens=512")
    with (
        running(tmp_path, "examples/serve_reward_model.py", *settings, *more) as server,
        RewardClient(server.url, timeout_s=60, wait_s=60) as client,
    ):
        for seed in range(ORDERS):
            for chosen in calls(len(texts), seed):
                got = client.score_tokens([texts[index] for index in chosen])
                np.testing.assert_array_equal(got, alone[chosen])


def few_changed(short: Case, layout: ParallelLayout, rows: int | None = 256) -> int:
    scorers = scorers_of(short, layout, Precision.fp32, rows)
    return count_changed(scorers, short.texts[:30], 4)


def test_thirty_texts(short: Case, layout: ParallelLayout) -> None:
    assert compare(fewer(short, 30), layout) == NOTHING


def test_very_long_texts(very_long: Case, layout: ParallelLayout) -> None:
    assert compare(very_long, layout) == NOTHING


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose rows depend on how many there are, as on processors not at hand."""
    product = products._any_product

    def by_company(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return product(rows, weight, bias) * (1 + 2**-20 * (rows.size(0) % 96))

    monkeypatch.setattr(products, "_any_product", by_company)
    monkeypatch.setattr(products, "_TRIED", {})


@pytest.mark.usefixtures("moody")
def test_products_that_depend_on_their_rows_are_of_a_fixed_number(
    short: Case, layout: ParallelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert few_changed(short, layout) == 0
    monkeypatch.setattr(products, "_has_same_bits", lambda *unused: True)
    assert few_changed(short, layout) > 10


def test_attention_that_is_cut_where_segments_are_changes_rewards(
    short: Case, layout: ParallelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "attend", packed._attend_on_cpu)
    assert few_changed(short, layout) > 10
