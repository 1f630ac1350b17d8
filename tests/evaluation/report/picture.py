"""Make the picture in docs/evaluation.md.

``python -m tests.evaluation.report.picture PAGE docs/report.png``

PAGE is a page that ``nemo-aligner report`` wrote. Chromium and chromedriver must be installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.evaluation.report import browser

WIDTH, HEIGHT, SCALE = 1360, 820, 0.6
MOST_BYTES = 200_000
_FROM = "overview"


def take(page: Path, target: Path) -> None:
    """Take a picture of the page, from its overview on."""
    with browser.started() as window:
        window.open(page, WIDTH)
        top = window.ask(f'document.getElementById("{_FROM}").offsetTop')
        picture = window.picture(top, HEIGHT, WIDTH, SCALE)
    if len(picture) > MOST_BYTES:
        sys.exit(f"{target}: got {len(picture)} bytes, wanted at most {MOST_BYTES}")
    target.write_bytes(picture)


if __name__ == "__main__":
    if browser.why_not() is not None:
        sys.exit(browser.why_not())
    take(Path(sys.argv[1]), Path(sys.argv[2]))
