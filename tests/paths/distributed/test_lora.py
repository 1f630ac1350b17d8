"""LoRA learns, and gives the same rewards wherever it is loaded.

test_layouts.py trains it at layouts, and training/test_interruptions.py resumes it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.shapes.lora import LoraShape, is_of_adapter, read_lora
from nemo_aligner.utils.errors import CheckpointError
from tests.distributed import layouts
from tests.harness import tiny
from tests.harness.environments import kept_environment, make_environment


@pytest.fixture(scope="module")
def archive(plain: Path) -> Path:
    return layouts.archive(plain / "lora")


@pytest.mark.smoke
def test_lora_learns_keeps_what_is_trained_alone_and_is_evaluated_to_the_bit(
    inputs: Path, archive: Path
) -> None:
    run = archive.parents[1]
    losses = layouts.curve(run, "train/loss")
    assert losses[-1] < 0.97 * losses[0]
    found, wanted = json.loads((run / "report.json").read_text()), layouts.validated(run)
    for name in ("loss", "reward_margin", "ece"):
        assert found["metrics"][name] == wanted[f"validation-pairs/{name}"]
    (state,) = archive.parent.glob("step_*")
    stored = sum(path.stat().st_size for path in (state / "state").glob("*.distcp"))
    with open_nemo(inputs / "base.nemo") as before, open_nemo(archive) as after:
        assert read_lora(after.config) == LoraShape(4, 8.0, read_lora(after.config).targets)
        trained = {name for name in after.tensors if is_of_adapter(name)}
        assert len(trained) == 8  # one tensor for all layers
        for name in before.tensors:
            wanted = before.store.read(before.prefix + name)
            found = after.store.read(after.prefix + name)  # the embedding has padding rows
            assert (found[: len(wanted)] == wanted).all(), name
        sizes = [np.prod(after.tensors[name][0]) for name in (*trained, "rm_head.weight")]
        frozen = sum(np.prod(size) for size, _ in before.tensors.values())
    # Trained weights and three fp32 values each of the optimizer, but not the base weights.
    assert 16 * sum(sizes) < stored < 4 * frozen


def test_lora_goes_on_with_the_adapter_or_with_all_weights(
    archive: Path, layout: ParallelLayout
) -> None:
    lora = LoraShape(4, 8.0, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
    how = {"num_attributes": 1, "precision": Precision.fp32}
    kept = load_pretrained(archive, layout, **how, lora=lora)
    assert any(map(is_of_adapter, kept.model.state_dict()))
    assert any(each.any() for n, each in kept.model.state_dict().items() if "linear_out" in n)
    whole = load_pretrained(archive, layout, **how)
    assert not any(map(is_of_adapter, whole.model.state_dict()))
    assert "lora" not in whole.config
    with pytest.raises(CheckpointError, match=r"rank 4, alpha 8.*model\.lora has rank 8"):
        load_pretrained(archive, layout, **how, lora=LoraShape(8, 8.0, ("linear_qkv",)))


def test_lora_is_folded_into_the_weights_of_merged_archives(
    archive: Path, inputs: Path, layout: ParallelLayout, tmp_path: Path
) -> None:
    from nemo_aligner.checkpoint.merge import merge_checkpoints

    merge_checkpoints([archive, archive], [0.5, 0.5], tmp_path / "merged.nemo")
    with open_nemo(tmp_path / "merged.nemo") as folder:
        assert "lora" not in folder.config
        assert not any(map(is_of_adapter, folder.tensors))
    got, wanted = (
        layouts.score(path, inputs, layout) for path in (tmp_path / "merged.nemo", archive)
    )
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.fixture(scope="module")
def peft_python() -> Path:
    """A Python with peft."""
    peft = "peft==0.21.2"
    folder = kept_environment("peft", (peft,), lambda folder: make_environment(folder, peft))
    return folder / "bin" / "python"


def test_lora_is_loaded_by_peft_with_the_same_rewards(
    peft_python: Path, inputs: Path, archive: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    adapter = tmp_path / "adapter"
    said = tiny.run_verb(
        "export",
        f"--input={archive}",
        f"--output={adapter}",
        f"--adapter-of={inputs / 'base.hf'}",
    ).stdout
    assert "checked: 7 samples, in batches of one and padded" in said
    done = subprocess.run(
        [
            str(peft_python),
            "tests/distributed/score_by_peft.py",
            str(adapter),
            str(inputs / "pairs.jsonl"),
        ],
        env=tiny.environment(),
        cwd=tiny.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    wanted = layouts.score(archive, inputs, layout)[:, 0]
    assert np.ptp(wanted) > 0.01
    np.testing.assert_allclose(got, wanted, atol=1e-4)
