"""``rehearse.py TASKS RESULTS``: scenes on a GPU that has no data, one after the other.

TASKS is a JSON list of ``{"run": a function of scenes.py, "with": its arguments, "given": what to
set of the GPU, "environment": of this task alone, "modules": what it imports by a name, if
anything}``. RESULTS gets of each what it found, and by phase what was seen in its last call; or the
error that it ended with.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.paths.gpu_rehearsal import fake_triton
from tests.paths.gpu_rehearsal.fake_gpu import fake_gpu
from tests.paths.gpu_rehearsal.watch import Watch

HOPPER = {"major": 9, "minor": 0, "visible_devices": 8}


@contextmanager
def installed(modules: dict[str, str | None]) -> Iterator[None]:
    """Other modules than what is there by their names; None for none."""
    from nemo_aligner.models.attention import varlen

    def forget() -> None:
        varlen._varlen_parameters.cache_clear()
        varlen._flash_attn.cache_clear()

    previous = {name: sys.modules.pop(name, None) for name in modules}
    for name, other in modules.items():
        sys.modules[name] = other and import_module(other)  # type: ignore[assignment]
    forget()
    try:
        yield
    finally:
        forget()
        for name in modules:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in previous.items() if module})


def run(watch: Watch, task: dict[str, Any]) -> dict[str, Any]:
    from nemo_aligner.distributed.layout import destroy_layout
    from tests.paths.gpu_rehearsal import scenes

    watch.phases.clear()
    vars(watch).update(HOPPER | task.get("given", {}))
    try:
        environment = mock.patch.dict(os.environ, task.get("environment", {}))
        with environment, installed(task.get("modules", {})):
            result = getattr(scenes, task["run"])(watch, **task["with"])
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        destroy_layout()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    watch.settings["fp32 products"] = torch.get_float32_matmul_precision()
    phases = {name: vars(seen) for name, seen in watch.phases.items()}
    return {"phases": phases, "settings": dict(watch.settings), **result}


def main(tasks: str, results: str) -> None:
    with fake_gpu() as watch:
        # Only now: megatron-core is made ready for what there is.
        from nemo_aligner.models.pointwise import choice
        from tests.paths.gpu_rehearsal.scenes import mark_phases

        mark_phases(watch)
        # Nor before: torch and megatron-core take it for a whole package.
        sys.modules |= {"triton": fake_triton, "triton.language": fake_triton.language}
        # Fake tensors have no bits to compare.
        choice.try_kernels = lambda *unused: None
        task_results = [run(watch, task) for task in json.loads(tasks)]
    Path(results).write_text(json.dumps(task_results))


if __name__ == "__main__":
    main(*sys.argv[1:])
