"""An export that transformers reads otherwise fails, and leaves nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nemo_aligner.errors import CheckpointError
from tests.checkpoint.hf.exporting import (
    export,
    save_again,
)

pytestmark = pytest.mark.usefixtures("layout")


def damage_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_aligner.checkpoint.hf.folder import ShardWriter

    add = ShardWriter.add

    def damaged(self: Any, name: str, tensor: Tensor) -> None:
        add(self, name, tensor * 1.01 if name.endswith("2.mlp.up_proj.weight") else tensor)

    monkeypatch.setattr(ShardWriter, "add", damaged)


def lose_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_aligner.checkpoint.hf.folder import ShardWriter

    add = ShardWriter.add
    monkeypatch.setattr(
        ShardWriter, "add", lambda self, name, tensor: "norm" in name or add(self, name, tensor)
    )


def damage_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_aligner.checkpoint.hf import export as hf_export

    write = hf_export.write_tokenizer

    def damaged(folder: Path, *arguments: Any) -> None:
        write(folder, *arguments)
        content = json.loads((folder / "tokenizer.json").read_text())
        content["normalizer"] = {"type": "Lowercase"}
        (folder / "tokenizer.json").write_text(json.dumps(content))

    monkeypatch.setattr(hf_export, "write_tokenizer", damaged)


def damage_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_aligner.checkpoint.hf import export as hf_export

    monkeypatch.setattr(hf_export, "choose_pad", lambda *_: ("<|endoftext|>", 2))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_tensor, "transformers scores .* wanted .* within 0.0001"),
        (lose_tensor, "tensors do not match: .*norm"),
        (damage_tokenizer, "transformers tokenizes .* wanted the scoring contract's"),
        (damage_pad, "pad token: got id 0, wanted 2"),
    ],
)
def test_a_damaged_export_fails_and_leaves_nothing(
    damage: Callable[[pytest.MonkeyPatch], None],
    message: str,
    three: Path,
    layout: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage(monkeypatch)
    with pytest.raises(CheckpointError, match=message):
        export(three, tmp_path / "out" / "hf", layout)
    assert not list((tmp_path / "out").iterdir())


def test_bos_and_eos_of_bare_texts_are_in_the_check(
    three: Path, layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_again(three, tmp_path / "rm.nemo", layout, add_bos=True, add_eos=True, template="")
    export(tmp_path / "rm.nemo", tmp_path / "out", layout)
    card = (tmp_path / "out/README.md").read_text()
    assert 'texts = [tokenizer.bos_token + "a text" + tokenizer.eos_token]' in card
