"""The ready file is there as long as the server, and never half written."""

from __future__ import annotations

from pathlib import Path

from nemo_aligner.serving.transports.ready import ready_file


def test_the_ready_file_is_there_while_the_server_answers(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    with ready_file(str(path), "http://here"):
        assert path.read_text() == "http://here\n"
        assert list(tmp_path.iterdir()) == [path]
    assert not path.exists()
    with ready_file(None, "http://here"):
        assert list(tmp_path.iterdir()) == []
