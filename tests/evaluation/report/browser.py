"""A headless Chromium, if one is installed: opens pages, takes pictures, reads the console."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
    "--disable-dev-shm-usage",
)  # fmt: skip


def why_not() -> str | None:
    """Return the reason why no browser can be started; None if one can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "the package selenium is not installed"
    if not any(map(shutil.which, _NAMES)) or shutil.which("chromedriver") is None:
        return "there is no chromium with chromedriver (Debian: chromium, chromium-driver)"
    return None


class Browser:
    """A window of the browser."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(self, page: Path, width: int) -> None:
        """Load a page from this disk in a window that is ``width`` pixels wide."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self._driver.get(page.resolve().as_uri())

    def ask(self, script: str) -> Any:
        """Evaluate an expression of JavaScript."""
        return self._driver.execute_script(f"return {script}")

    def complaints(self) -> list[str]:
        """Return all messages of the console."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the addresses that were requested since the last call."""
        entries = [json.loads(e["message"])["message"] for e in self._driver.get_log("performance")]
        return [
            entry["params"]["request"]["url"]
            for entry in entries
            if entry["method"] == "Network.requestWillBeSent"
        ]

    def picture(self, top: int, height: int, width: int, scale: float = 1.0) -> bytes:
        """Take a picture of a part of the page, as PNG."""
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": scale}
        options = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        screenshot = self._driver.execute_cdp_cmd("Page.captureScreenshot", options)
        return base64.b64decode(screenshot["data"])

    def print(self) -> bytes:
        """Print the page as PDF, on A4."""
        paper = {"paperWidth": 8.27, "paperHeight": 11.69}
        return base64.b64decode(self._driver.execute_cdp_cmd("Page.printToPDF", paper)["data"])


@contextmanager
def started() -> Iterator[Browser]:
    """Start a browser, and end it with the block."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = next(filter(None, map(shutil.which, _NAMES)))
    for option in _OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
