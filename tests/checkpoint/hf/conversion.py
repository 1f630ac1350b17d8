"""What tests of conversion have in common."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_aligner.errors import CheckpointError

NAMES = ("helpfulness", "correctness", "verbosity")


HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}


REWARD_CASES: dict[str, dict[str, Any]] = {
    "one_label": {},
    "three_labels": {"labels": 3, "id2label": dict(enumerate(NAMES))},
    "untied": {"tie_word_embeddings": False},
    "zero_groups": HEADS,
}


def convert(source: Path | str, output: Path, *arguments: Any, **options: Any) -> Any:
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo

    return convert_hf_to_nemo(source, output, *arguments, **options)


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(source: Path | str, folder: Path, message: str, **options: Any) -> None:
    """The conversion fails with ``message``, and leaves nothing."""
    with pytest.raises(CheckpointError, match=message):
        convert(source, folder / "out" / "reward.nemo", **options)
    assert not list((folder / "out").glob("*"))


class LiveBytes:
    """Counts the bytes of tensors that are in memory, from when they were read until let go."""

    def __init__(self) -> None:
        self.now = self.peak = self.total = 0

    def watch(self, read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(*arguments: Any) -> Tensor:
            tensor = read(*arguments)
            size = tensor.numel() * tensor.element_size()
            self.now += size
            self.total += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(tensor.untyped_storage(), self._release, size)
            return tensor

        return watched

    def _release(self, size: int) -> None:
        self.now -= size
