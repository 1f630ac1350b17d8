"""The quick tier and the distribution of tests over workers, by measured durations.

``tests/durations.json`` has the duration of each test of two seconds or more, as measured by
``--store-durations``: its own time plus that of all shared fixtures, without waiting for turns. If
one parameter of a test takes as long, it has the durations of all, so that a new parameter, which
has none yet, counts like the quickest of the others.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.harness.launching import ROOT
from tests.harness.once import TURNS

FILE = ROOT / "tests" / "durations.json"
QUICK_SECS = 2.0
KEPT_SECS = 2.0
_PROPERTY = "measured"


class Durations:
    """The stored seconds of each test, and the names of tests that start several ranks."""

    def __init__(self) -> None:
        stored = json.loads(FILE.read_text()) if FILE.exists() else {}
        self.seconds: dict[str, float] = stored.get("seconds", {})
        self.several_ranks = frozenset(stored.get("several_ranks", []))
        self._least_of_test: dict[str, float] = {}
        for nodeid, seconds in self.seconds.items():
            test = _without_parameters(nodeid)
            self._least_of_test[test] = min(seconds, self._least_of_test.get(test, seconds))
        of_one_rank = map(_without_parameters, self.seconds.keys() - self.several_ranks)
        self._tests_of_several_ranks = frozenset(
            map(_without_parameters, self.several_ranks)
        ).difference(of_one_rank)

    def duration(self, nodeid: str) -> float:
        """The test's seconds; if it is not stored, those of its quickest stored parameter."""
        least = self._least_of_test.get(_without_parameters(nodeid), 0.0)
        return self.seconds.get(nodeid, least)

    def is_quick(self, item: pytest.Item) -> bool:
        is_smoke = item.get_closest_marker("smoke") is not None
        return is_smoke or self.duration(item.nodeid) <= QUICK_SECS

    def group(self, nodeid: str) -> str:
        """The group of a test, which one worker runs: its file, or a share of multi-rank tests.

        Tests of several ranks would otherwise wait for each other's turns in different workers.
        A new parameter joins the others, because another worker would build the fixtures again.
        """
        file = nodeid.partition("::")[0]
        is_new = nodeid not in self.seconds
        joins = is_new and _without_parameters(nodeid) in self._tests_of_several_ranks
        if joins or nodeid in self.several_ranks:
            return f"several ranks {zlib.crc32(file.encode()) % TURNS.count}"
        return file

    def longest_first(self, items: list[pytest.Item]) -> None:
        """Sort by the groups' total time, longest first; the order within a group stays."""
        total: Counter[str] = Counter()
        for item in items:
            total[self.group(item.nodeid)] += self.duration(item.nodeid)
        items.sort(key=lambda item: -total[self.group(item.nodeid)])


def _without_parameters(nodeid: str) -> str:
    return nodeid.partition("[")[0]


class Clock:
    """A pytest plugin that times the tests of a worker and their shared fixtures."""

    def __init__(self) -> None:
        self._shared: dict[int, float] = {}  # seconds by the id of a fixture
        self._takes_turns: set[int] = set()  # ids of fixtures that took a turn
        self._began = 0.0
        self._apart = 0.0  # seconds of this test in shared fixtures

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        started, apart = TURNS.now(), self._apart
        was_taken, TURNS.was_taken = TURNS.was_taken, False
        try:
            return (yield)
        finally:
            if TURNS.was_taken:
                self._takes_turns.add(id(fixturedef))
            TURNS.was_taken |= was_taken
            if fixturedef.scope != "function":
                # Fixtures requested while this one was made are counted separately.
                took = TURNS.now() - started
                self._shared[id(fixturedef)] = took - (self._apart - apart)
                self._apart = apart + took

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        TURNS.was_taken = False
        self._apart, self._began = 0.0, TURNS.now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function, call: Any) -> Iterator[Any]:
        if call.when == "teardown":
            fixtures = {
                id(definitions[-1]) for definitions in item._fixtureinfo.name2fixturedefs.values()
            }
            shared = sum(self._shared.get(fixture, 0.0) for fixture in fixtures)
            seconds = TURNS.now() - self._began - self._apart + shared
            takes_turns = TURNS.was_taken or not self._takes_turns.isdisjoint(fixtures)
            item.user_properties.append((_PROPERTY, (seconds, takes_turns)))
        return (yield)


def store(reports: Iterable[pytest.TestReport], of_whole_files: bool) -> None:
    """Update ``tests/durations.json``; ``of_whole_files`` also drops tests that no longer exist."""
    measured = {
        report.nodeid: value
        for report in reports
        for name, value in report.user_properties
        if name == _PROPERTY and report.when == "teardown"
    }
    files = {nodeid.partition("::")[0] for nodeid in measured} if of_whole_files else set()
    stored = Durations()

    def is_kept(nodeid: str) -> bool:
        file = nodeid.partition("::")[0]
        return nodeid not in measured and file not in files and (ROOT / file).exists()

    seconds = {nodeid: value for nodeid, value in stored.seconds.items() if is_kept(nodeid)}
    several = {nodeid for nodeid in stored.several_ranks if is_kept(nodeid)}
    of_test: dict[str, float] = {}  # most seconds of a parameter
    for nodeid, (took, _) in measured.items():
        test = _without_parameters(nodeid)
        of_test[test] = max(took, of_test.get(test, 0.0))
    for nodeid, (took, takes_turns) in measured.items():
        if of_test[_without_parameters(nodeid)] >= KEPT_SECS:
            seconds[nodeid] = round(took, 1)
        if takes_turns:
            several.add(nodeid)
    content = {"seconds": dict(sorted(seconds.items())), "several_ranks": sorted(several)}
    FILE.write_text(json.dumps(content, indent=0) + "\n")
