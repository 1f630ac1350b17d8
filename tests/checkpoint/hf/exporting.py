"""What tests of exports have in common."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

WEIGHTS, MEANS = (0.5, -2.0, 0.25), (1.5, 0.0, -0.5)


def save_again(source: Path, target: Path, layout: Any, **contract: Any) -> None:
    """The archive as training writes it (its vocabulary is padded), with a changed contract."""
    from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model, save_reward_model

    loaded = load_reward_model(source, layout)
    save_reward_model(
        target,
        loaded.model,
        loaded.config,
        loaded.tokenizer,
        dataclasses.replace(loaded.contract, **contract),
    )


def export(archive: Path, output: Path, layout: Any, **options: Any) -> Any:
    from nemo_aligner.checkpoint.hf.export import ExportOptions, export_to_hf

    return export_to_hf(archive, output, layout, ExportOptions(**options))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0)
