"""Older GPUs, older torch, heads that no kernel takes, and how a process takes its GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_rehearsal.conftest import Rehearse, Task

FLASH = ("torch_attn._varlen_attn.default", "aten._flash_attention_forward.default")
LAYERS_AND_PACKS = 2 * 2
GEMMA = {"attn_logit_softcapping": 50.0, "window_size": 32, "window_pattern": "alternate"}


def steps(shape: dict[str, Any] | None = None, given: Any = None, **options: Any) -> Task:
    more = {"sizes": {}, "shape": shape or {}, **options}
    return {"run": "steps", "with": more, "given": given or {}}


def flash_calls(seen: dict[str, Any]) -> int:
    """In one step, by torch's public function or by the operator behind it."""
    assert "error" not in seen, seen["error"]
    (rank,) = seen["ranks"]
    return sum(rank["operations"].get(name, 0) for name in FLASH)


@pytest.mark.slow(seconds=15)
def test_kernels_that_refuse_are_not_called(rehearse: Rehearse) -> None:
    """On Turing, for heads of 12 or 320 channels, in fp32, and for a cap: by SDPA."""
    turing = {"major": 7, "minor": 5}
    tasks = [steps(given=turing, precision="fp16")]
    tasks += [steps({"kv_channels": width}) for width in (12, 320)]
    tasks += [steps(precision="fp32"), steps(GEMMA)]
    for seen in rehearse("refused", tasks):
        assert flash_calls(seen) == 0


@pytest.mark.slow(seconds=15)
def test_torch_without_its_module_has_the_kernel_all_the_same(rehearse: Rehearse) -> None:
    """torch 2.8 and 2.9: one call a layer and pack, also where beginnings are shared."""
    for seen in rehearse("old_torch", [steps(), steps(prefix=64)], ("torch29",)):
        assert flash_calls(seen) == LAYERS_AND_PACKS


@pytest.mark.slow(seconds=15)
def test_flash_attn_has_gemma_2_s_cap(rehearse: Rehearse) -> None:
    (seen,) = rehearse("flash_attn", [steps(GEMMA)], ("flash",))
    assert flash_calls(seen) == LAYERS_AND_PACKS


@pytest.mark.slow(seconds=10)
def test_a_process_that_sees_one_gpu_takes_it(rehearse: Rehearse) -> None:
    """As under ``srun --gpus-per-task=1``."""
    slurm = {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    task = {"run": "start", "with": {}, "given": {"visible_devices": 1}}
    (seen,) = rehearse("srun", [task], **slurm)
    assert "error" not in seen, seen["error"]
    assert seen["device"] == seen["settings"]["device_id"] == "cuda:0"


@pytest.mark.slow(seconds=20)
def test_transformer_engine_s_layers_are_for_16_bits(rehearse: Rehearse) -> None:
    """Its fp32 products are rounded to TF32; without Apex a model is built all the same."""
    narrow, wide = rehearse("engine_dtypes", [steps(), steps(precision="fp32")], ("te",))
    assert flash_calls(narrow) == LAYERS_AND_PACKS
    assert narrow["ranks"][0]["engine_modules"] > 0
    assert flash_calls(wide) == 0
    assert wide["ranks"][0]["engine_modules"] == 0
