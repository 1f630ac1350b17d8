"""Which tests the quick tier has, and how workers share them out: by durations that were measured.

``tests/durations.json`` has what each test of two seconds and more took, as ``--store-durations``
measured it: its own time and that of all fixtures it shares with others, without waiting for turns.
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
QUICK_SECS = 3.0
KEPT_SECS = 2.0
_PROPERTY = "measured"


class Durations:
    """Seconds of each test, and those that start several ranks, as they were measured last."""

    def __init__(self) -> None:
        kept = json.loads(FILE.read_text()) if FILE.exists() else {}
        self.seconds: dict[str, float] = kept.get("seconds", {})
        self.several_ranks = frozenset(kept.get("several_ranks", []))

    def is_quick(self, item: pytest.Item) -> bool:
        is_smoke = item.get_closest_marker("smoke") is not None
        return is_smoke or self.seconds.get(item.nodeid, 0.0) <= QUICK_SECS

    def group(self, nodeid: str) -> str:
        """What one worker runs in a row: a file, or those that would wait for each other's turn."""
        file = nodeid.partition("::")[0]
        if nodeid in self.several_ranks:
            return f"several ranks {zlib.crc32(file.encode()) % TURNS.count}"
        return file

    def longest_first(self, items: list[pytest.Item]) -> None:
        """Sort by groups, so that the workers end together; a file's own order stays."""
        total: Counter[str] = Counter()
        for item in items:
            total[self.group(item.nodeid)] += self.seconds.get(item.nodeid, 0.0)
        items.sort(key=lambda item: -total[self.group(item.nodeid)])


class Clock:
    """Times the tests of a worker, and the fixtures that several of them share."""

    def __init__(self) -> None:
        self._shared: dict[int, float] = {}  # by fixture
        self._takes_turns: set[int] = set()  # fixtures, whose tests all belong to one worker
        self._began = 0.0
        self._apart = 0.0  # what this test spent on fixtures that others share

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        before, apart = TURNS.now(), self._apart
        was_taken, TURNS.was_taken = TURNS.was_taken, False
        try:
            return (yield)
        finally:
            if TURNS.was_taken:
                self._takes_turns.add(id(fixturedef))
            TURNS.was_taken |= was_taken
            if fixturedef.scope != "function":
                # What it asked for while it was made is counted there.
                took = TURNS.now() - before
                self._shared[id(fixturedef)] = took - (self._apart - apart)
                self._apart = apart + took

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        TURNS.was_taken = False
        self._apart, self._began = 0.0, TURNS.now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function, call: Any) -> Iterator[Any]:
        if call.when == "teardown":
            fixtures = {id(found[-1]) for found in item._fixtureinfo.name2fixturedefs.values()}
            shared = sum(self._shared.get(fixture, 0.0) for fixture in fixtures)
            seconds = TURNS.now() - self._began - self._apart + shared
            takes_turns = TURNS.was_taken or not self._takes_turns.isdisjoint(fixtures)
            item.user_properties.append((_PROPERTY, (seconds, takes_turns)))
        return (yield)


def store(reports: Iterable[pytest.TestReport], of_whole_files: bool) -> None:
    """Write what tests took over what is kept of them; of ``of_whole_files`` others are gone."""
    measured = {
        report.nodeid: value
        for report in reports
        for name, value in report.user_properties
        if name == _PROPERTY and report.when == "teardown"
    }
    files = {nodeid.partition("::")[0] for nodeid in measured} if of_whole_files else set()
    kept = Durations()

    def is_kept(nodeid: str) -> bool:
        file = nodeid.partition("::")[0]
        return nodeid not in measured and file not in files and (ROOT / file).exists()

    seconds = {nodeid: value for nodeid, value in kept.seconds.items() if is_kept(nodeid)}
    several = {nodeid for nodeid in kept.several_ranks if is_kept(nodeid)}
    for nodeid, (took, takes_turns) in measured.items():
        if took >= KEPT_SECS:
            seconds[nodeid] = round(took, 1)
        if takes_turns:
            several.add(nodeid)
    content = {"seconds": dict(sorted(seconds.items())), "several_ranks": sorted(several)}
    FILE.write_text(json.dumps(content, indent=0) + "\n")
