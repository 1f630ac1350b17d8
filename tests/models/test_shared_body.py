"""Models with the same body share its memory, and give the rewards that they give alone."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nemo_aligner.checkpoint.nemo import reward_model
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.checksums import CHECKSUMS_NAME
from nemo_aligner.checkpoint.nemo.fingerprint import body_fingerprint_of, read_fingerprint
from nemo_aligner.checkpoint.nemo.folder import FINGERPRINT_NAME
from nemo_aligner.checkpoint.nemo.write import write_nemo
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import BasePrecision
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.quantized_layers import quantized_layers
from nemo_aligner.models.shapes.lora import LoraShape
from nemo_aligner.serving.engine.scorer import RewardScorer
from nemo_aligner.utils.errors import CheckpointError
from tests.harness import families, tiny
from tests.harness.adapters import ALL, write_adapter_nemo, write_adapters
from tests.harness.once import Once
from tests.models.shared_bodies import LAYOUTS, compare, load

LORA = LoraShape(4, 8.0, ALL)


@pytest.fixture(scope="module")
def archives(once: Once) -> list[Path]:
    folder = once("adapters", write_adapters)
    return [folder / f"{name}.nemo" for name in ("reward_model", "harmless", "plain-1.5")]


@pytest.fixture(scope="module")
def base(archives: list[Path]) -> Path:
    return archives[0].with_name("base.nemo")


def tensors(scorer: RewardScorer) -> Iterator[tuple[str, Tensor]]:
    yield from scorer.model.named_parameters()
    yield from scorer.model.named_buffers()


def check(found: dict[str, Any], name: str = "") -> None:
    first, *others = found["shared"]
    assert first == 0, name
    assert min(others) > 150_000, name
    assert found["is_equal"] == [True] * len(found["shared"]), name
    assert found["cached"] == [True] * len(found["shared"]), name
    assert found["spread"] > 0.1, name


def test_adapters_of_one_base_share_its_memory_alone(
    archives: list[Path], layout: ParallelLayout
) -> None:
    """All three use the same tensors, except adapters and heads, which have memory of their own."""
    check(compare(archives, layout))
    first, *others = load(archives, layout)
    bodies = dict(tensors(first))
    for other in others:
        assert other.model is not first.model
        assert other.body is not None
        assert other.body.source is first.model
        own = {name for name, tensor in tensors(other) if bodies.get(name) is not tensor}
        assert all("adapter" in name or "rm_head" in name for name in own)
        sizes = [tensor.numel() for name, tensor in tensors(other) if name in own]
        assert sum(sizes) == other.body.num_parameters - other.body.num_shared
        assert not {bodies[name].data_ptr() for name in own & bodies.keys()} & {
            tensor.data_ptr() for name, tensor in tensors(other) if name in own
        }


def test_shared_body_is_neither_loaded_nor_allocated(
    archives: list[Path], layout: ParallelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The linear layers that are replaced have memory for one number."""
    sizes: list[int] = []

    def look(model: Any, source: Any) -> None:
        layers = [layer for name, layer in model.named_modules() if name.endswith("linear_fc1")]
        sizes.extend(layer.weight.untyped_storage().nbytes() for layer in layers)

    loads: list[Path] = []
    real = reward_model.load_backbone

    def load_backbone(model: Any, folder: Any) -> None:
        loads.append(folder.source)
        real(model, folder)

    monkeypatch.setattr(reward_model, "load_backbone", load_backbone)
    monkeypatch.setattr(reward_model, "share_body", look)
    monkeypatch.setattr("nemo_aligner.serving.engine.scorer.make_batch_invariant", lambda *_: None)
    load(archives, layout)
    assert loads == archives[:1]
    assert sizes == [4] * 8


@pytest.mark.parametrize(
    ("precision", "settings", "stays_quantized"),
    [
        (BasePrecision.nf4, {}, False),
        (BasePrecision.int8, {"invariant_rows": None, "precision": Precision.bf16}, True),
    ],
)
def test_quantized_body_is_shared(
    precision: BasePrecision,
    settings: dict[str, Any],
    stays_quantized: bool,
    base: Path,
    layout: ParallelLayout,
    tmp_path: Path,
) -> None:
    """It is shared as it is after the first model was prepared: dense, or still quantized."""
    shapes = [replace(LORA, base_precision=precision), LoraShape(2, 2.0, ALL, precision)]
    paths = [
        write_adapter_nemo(tmp_path / f"{seed}.nemo", base, layout, lora, seed=seed)
        for seed, lora in enumerate(shapes)
    ]
    check(compare(paths, layout, **settings))
    first, second = load(paths, layout, **settings)
    layers = [quantized_layers(scorer.model) for scorer in (first, second)]
    assert layers[0].keys() == layers[1].keys()
    assert bool(layers[0]) is stays_quantized
    assert all(layers[1][name].stored is layer.stored for name, layer in layers[0].items())


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_small"])
def test_experts_and_buffers_are_shared(
    family: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    base = families.write_base_nemo(tmp_path / "base.nemo", family)
    paths = [
        write_adapter_nemo(tmp_path / f"{seed}.nemo", base, layout, lora, seed=seed)
        for seed, lora in enumerate((LORA, LoraShape(2, 4.0, ("linear_fc1",))))
    ]
    found = compare(paths, layout)
    assert found["is_equal"] == [True, True]
    assert found["shared"][1] > 0


def test_other_bodies_are_not_shared(
    archives: list[Path], base: Path, layout: ParallelLayout, tmp_path: Path
) -> None:
    """A base of other weights or another quantization, and an archive of an earlier version."""
    other = tiny.write_base_nemo(tmp_path / "other.nemo", initializer_range=0.2)
    int8 = replace(LORA, base_precision=BasePrecision.int8)
    old = without_body(archives[1], tmp_path / "old.nemo")
    paths = [
        archives[0],
        write_adapter_nemo(tmp_path / "a.nemo", other, layout, LORA),
        write_adapter_nemo(tmp_path / "b.nemo", base, layout, int8),
        old,
        write_adapter_nemo(tmp_path / "head.nemo", base, layout, None),
    ]
    found = compare(paths, layout)
    assert found["shared"][:4] == [0] * 4
    assert found["is_equal"] == [True] * 5
    # A model without adapters has the same body as the adapters' base.
    assert found["shared"][4] > 150_000
    assert read_fingerprint(old) == read_fingerprint(archives[1])


def without_body(source: Path, path: Path) -> Path:
    """Write the archive again like an earlier version, without the fingerprint of its body."""
    fingerprint = read_fingerprint(source)
    assert fingerprint is not None
    with open_nemo(source) as folder:
        parts = folder.weights, folder.root / "tokenizer"
        contract = json.loads((folder.root / "scoring_contract.json").read_text())
        write_nemo(path, folder.config, *parts, contract, {"fingerprint": fingerprint})
    return path


def test_fingerprint_of_a_body_that_is_damaged_is_one_clear_error(
    archives: list[Path], tmp_path: Path
) -> None:
    with tarfile.open(archives[0]) as tar:
        tar.extractall(tmp_path / "folder", filter="data")
    (tmp_path / "folder" / CHECKSUMS_NAME).unlink()
    file = tmp_path / "folder" / FINGERPRINT_NAME
    file.write_text(json.dumps({"fingerprint": "a" * 32, "body": 7}))
    with (
        open_nemo(tmp_path / "folder", with_weights=False) as folder,
        pytest.raises(CheckpointError, match="got 7, wanted 32 hexadecimal characters"),
    ):
        body_fingerprint_of(folder)


def test_shared_body_at_any_layout(archives: list[Path]) -> None:
    done = tiny.run_script("tests/models/shared_bodies.py", *map(str, archives), processes=2)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(LAYOUTS)
    for name, result in found.items():
        check(result, name)
