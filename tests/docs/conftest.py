"""What the pages take for granted: the files of a folder, and a server with its gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.workplace import build_workplace
from tests.launching import free_port
from tests.once import Once
from tests.serving.servers import gateway, running


@pytest.fixture(scope="session")
def workplace(once: Once) -> Path:
    return once("workplace", build_workplace)


@pytest.fixture(scope="session")
def served(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of the pages -> those of a server, of its gateway, and of nobody."""
    pytest.importorskip("pytriton")
    pytest.importorskip("uvicorn")
    folder = tmp_path_factory.mktemp("served")
    asked = ("nemo_aligner/__main__.py", "serve", f"rm_model_file={workplace / 'first.nemo'}")
    with running(folder, *asked, "server.port=0") as server:
        (folder / "gateway").mkdir()
        with gateway(folder / "gateway", f"backends=[{server.url}]") as front:
            addresses = {"5555": server.url, "8000": front.url, "5000": front.url}
            found = {f"http://127.0.0.1:{port}": url for port, url in addresses.items()}
            yield {**found, "http://127.0.0.1:5556": f"http://127.0.0.1:{free_port()}"}
