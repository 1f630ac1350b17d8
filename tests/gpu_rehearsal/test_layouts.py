"""A step of every rank of a layout: what ranks exchange, and what is kept for the backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest

from tests.gpu_rehearsal.conftest import Rehearse, Task
from tests.gpu_rehearsal.test_commands import DECISIONS, unexpected

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "tp2+sp+dp2": {"tp": 2, "dp": 2, "sequence_parallel": True},
}
# Options of one rank alone, and what is else about its shape.
ALONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": ({}, {}),
    "prefix": ({"prefix": 64}, {}),
    "prefix, no groups": ({"prefix": 96}, {"num_query_groups": 4}),
    "selective": ({"recompute": "selective"}, {}),
    "selective, prefix": ({"recompute": "selective", "prefix": 64}, {}),
    "full": ({"recompute": "full"}, {}),
    "frozen": ({"freeze_layers": 1}, {}),
    "window": ({}, {"window_size": 32}),
    "norms": ({}, {"qk_layernorm": True, "qkv_bias": True}),
    "no groups": ({}, {"num_query_groups": 4}),
}
STUBS: dict[str, tuple[str, ...]] = {
    "torch": (),
    "engine": ("te",),
    "engine and apex": ("te", "apex"),
}


def tasks(names: Sequence[str]) -> dict[str, Task]:
    found = {}
    for name in names:
        options, shape = ALONE.get(name, ({}, {}))
        sizes = LAYOUTS.get(name, {})
        found[name] = {"run": "steps", "with": {"sizes": sizes, "shape": shape, **options}}
    return found


def differences(by_rank: Sequence[dict[str, list[Any]]]) -> list[str]:
    """Where ranks of a group do not make the same collectives, in order and size."""
    found = []
    for group in dict.fromkeys(name for rank in by_rank for name in rank):
        with_it = [rank[group] for rank in by_rank if group in rank]
        for number, calls in enumerate(zip_longest(*with_it)):
            if any(call != calls[0] for call in calls):
                found.append(f"{group}, {number}: {calls}")
                break
    return found


def test_other_orders_and_sizes_are_found() -> None:
    ranks = [{"world": [["all_reduce", "(4,)"], ["barrier"]]} for _ in range(2)]
    assert differences(ranks) == []
    ranks[1]["world"] = ranks[1]["world"][::-1]
    assert len(differences(ranks)) == 1
    ranks[1]["world"] = [["all_reduce", "(5,)"], ["barrier"]]
    assert len(differences(ranks)) == 1
    ranks[1]["world"] = [["all_reduce", "(4,)"]]
    assert len(differences(ranks)) == 1


@pytest.fixture(scope="module", params=STUBS)
def seen(request: pytest.FixtureRequest, rehearse: Rehearse) -> dict[str, dict[str, Any]]:
    """What was seen of each layout, with what is installed."""
    wanted = tasks([*LAYOUTS, *ALONE] if request.param == "torch" else [*LAYOUTS, "alone"])
    name = f"layouts_{request.param.replace(' ', '_')}"
    found = rehearse(name, list(wanted.values()), STUBS[request.param])
    return dict(zip(wanted, found, strict=True))


@pytest.mark.slow(seconds=40)
def test_all_ranks_of_a_layout_make_the_same_collectives(seen: dict[str, dict[str, Any]]) -> None:
    for name, of_layout in seen.items():
        assert "error" not in of_layout, f"{name}: {of_layout['error']}"
        assert differences(of_layout["collectives"]) == [], name
        sent = sum(len(calls) for rank in of_layout["collectives"] for calls in rank.values())
        assert sent > 0 or name in ALONE, name


@pytest.mark.slow(seconds=40)
def test_no_rank_waits_for_a_micro_batch(seen: dict[str, dict[str, Any]]) -> None:
    for name, of_layout in seen.items():
        for rank in of_layout["ranks"]:
            assert unexpected({"phases": {"step": rank}}, DECISIONS) == [], name


@pytest.mark.slow(seconds=40)
def test_what_is_kept_for_the_backward_is_what_planning_counts(
    seen: dict[str, dict[str, Any]],
) -> None:
    """Of torch's layers: what TransformerEngine's keep no stub can say."""
    for name, of_layout in seen.items():
        for rank in of_layout["ranks"]:
            if "kept" in rank and not rank["engine_modules"]:
                assert rank["kept"] == pytest.approx(rank["planned"], rel=0.03), name
