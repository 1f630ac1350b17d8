"""Helpers for tests of conversions and exports."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo as convert
from nemo_aligner.checkpoint.hf.export import export_to_hf
from nemo_aligner.checkpoint.hf.reward_archive import ExportOptions
from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model, save_reward_model
from tests.checkpoint.refusals import Damages, check_damages

NAMES = ("helpfulness", "correctness", "verbosity")
WEIGHTS, MEANS = (0.5, -2.0, 0.25), (1.5, 0.0, -0.5)
REWARD_CASES: dict[str, dict[str, Any]] = {
    "one_label": {},
    "three_labels": {"labels": 3, "id2label": dict(enumerate(NAMES))},
    "untied": {"tie_word_embeddings": False},
    # Three query groups, to which a fourth group of zeros is added.
    "zero_groups": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
}


def export(archive: Path, output: Path, layout: Any, **options: Any) -> Any:
    return export_to_hf(archive, output, layout, ExportOptions(**options))


def save_again(source: Path, target: Path, layout: Any, **contract: Any) -> None:
    """Save an archive like training does, with a padded vocabulary, and a changed contract."""
    loaded = load_reward_model(source, layout)
    changed = dataclasses.replace(loaded.contract, **contract)
    save_reward_model(target, loaded.model, loaded.config, loaded.tokenizer, changed)


def config_of(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def edit(folder: Path, name: str = "config.json", **changes: Any) -> None:
    (folder / name).write_text(json.dumps({**config_of(folder, name), **changes}))


def config_edits(*cases: tuple[dict[str, Any], str]) -> Damages:
    """Turn changes of ``config.json`` into damages."""
    return [(partial(edit, **changes), pattern) for changes, pattern in cases]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def edit_tensors(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Change tensors in the single file of weights; None removes one."""
    changed = {**load_file(folder / "model.safetensors"), **changes}
    remaining = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(remaining, folder / "model.safetensors", metadata={"format": "pt"})


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=0)


def check_refused(source: Path, damages: Damages, **options: Any) -> None:
    """Check that the conversion of ``source`` refuses each damage, and leaves no files."""
    output = source.with_name("out") / "model.nemo"
    check_damages(source, damages, lambda folder: convert(folder, output, **options))
    assert not list(output.parent.glob("*"))


class LiveBytes:
    """Counts the bytes of tensors in memory, from reading until they are freed."""

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


def lose(folder: Path, name: str) -> None:
    (folder / name).unlink()


INDEX = "model.safetensors.index.json"


def write_only_index(folder: Path, content: str) -> None:
    """Replace the single file of weights by an index, which is read only without that file."""
    lose(folder, "model.safetensors")
    (folder / INDEX).write_text(content)
