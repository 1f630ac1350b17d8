"""A report in a real browser: on a phone, on a wide screen, and in print."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_aligner.evaluation.report.page import write_page
from tests.evaluation.report import browser
from tests.evaluation.report.folders import SECTIONS, write_run

pytestmark = pytest.mark.skipif(browser.why_not() is not None, reason=str(browser.why_not()))

# Elements that extend beyond the right edge, except those in a box that scrolls.
_TOO_WIDE = """[...document.querySelectorAll("body *")].filter(each =>
    !each.closest(".scroll") && each.getBoundingClientRect().right > innerWidth + 1
).map(each => each.outerHTML.slice(0, 80))"""
_SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll("figure svg text")].map(each =>
    parseFloat(getComputedStyle(each).fontSize) *
    Math.hypot(each.getScreenCTM().a, each.getScreenCTM().b)))"""
_BLACK_FIGURES = """[...document.querySelectorAll("figure > svg")].filter(each =>
    getComputedStyle(each.querySelector("path")).fill === "rgb(0, 0, 0)").length"""


@pytest.fixture(scope="module")
def window() -> Iterator[browser.Browser]:
    with browser.started() as browser_window:
        yield browser_window


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    runs = [write_run(folder / name, seed=n) for n, name in enumerate(("first", "second"))]
    write_page(runs, folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize("width", [400, 1600])
def test_a_page_opens_whole_and_asks_for_nothing(
    window: browser.Browser, page: Path, width: int
) -> None:
    window.requests()
    window.open(page, width)
    requested = [url for url in window.requests() if not url.startswith("data:")]
    assert requested == [page.resolve().as_uri()]
    assert window.complaints() == []
    browser_window = window.ask('[...document.querySelectorAll("section")].map(each => each.id)')
    assert browser_window == list(SECTIONS)
    empty = '[...document.querySelectorAll("section")].filter(e => e.offsetHeight < 60).length'
    assert window.ask(empty) == 0
    assert window.ask("document.scripts.length") == 0


@pytest.mark.parametrize("width", [400, 1600])
def test_a_page_is_readable(window: browser.Browser, page: Path, width: int) -> None:
    window.open(page, width)
    assert window.ask("document.documentElement.scrollWidth") <= width
    assert window.ask(_TOO_WIDE) == []
    assert window.ask(_SMALLEST_TEXT) >= 9
    assert window.ask(_BLACK_FIGURES) == 0
    # Figures are side by side if there is room.
    curves = 'getComputedStyle(document.querySelector("#curves .figures"))'
    columns = f'{curves}.gridTemplateColumns.split(" ").length'
    assert window.ask(columns) == (1 if width == 400 else 3)


def test_a_page_can_be_printed(window: browser.Browser, page: Path) -> None:
    window.open(page, 1600)
    printed = window.print()
    assert printed.startswith(b"%PDF")
    assert 3 <= printed.count(b"/Type /Page\n") <= 40
