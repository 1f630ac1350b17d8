"""``rehearse.py TASKS RESULTS``: run scenes on a GPU without data, one after the other.

TASKS is a JSON list of objects: "run" is a function of scenes.py, "with" its arguments, "given"
values to set on the GPU, "environment" variables of this task only, and "modules", if any, names
under which other modules are imported. RESULTS gets for each task the result of its scene and the
records of the last call of each phase, or the error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError
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
    """Replace modules by name with other modules, or with None."""
    from nemo_aligner.models.attention import flash_packages, varlen

    packages = flash_packages._PACKAGES.values()
    distributions = {package.distribution for package in packages if package.module in modules}

    def version(distribution: str) -> str:
        if distribution not in distributions:
            raise PackageNotFoundError(distribution)
        return "0"

    def forget() -> None:
        varlen._varlen_parameters.cache_clear()
        flash_packages._flash_attn.cache_clear()
        flash_packages.load_function.cache_clear()
        flash_packages.why_unavailable.cache_clear()

    previous = {name: sys.modules.pop(name, None) for name in modules}
    for name, other in modules.items():
        sys.modules[name] = other and import_module(other)  # type: ignore[assignment]
    forget()
    try:
        with mock.patch.object(flash_packages, "version", version):
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
    watch.settings["fp32 matmuls"] = torch.get_float32_matmul_precision()
    phases = {name: vars(seen) for name, seen in watch.phases.items()}
    return {"phases": phases, "settings": dict(watch.settings), **result}


def main(tasks: str, results: str) -> None:
    with fake_gpu() as watch:
        # Imported only now: importing prepares megatron-core for the available devices.
        from nemo_aligner.models import delta_choice, quantized
        from nemo_aligner.models.attention import choice as attention_choice
        from nemo_aligner.models.pointwise import choice
        from tests.paths.gpu_rehearsal.scenes import mark_phases

        mark_phases(watch)
        # Installed only now: torch and megatron-core would take it for the real package.
        sys.modules |= {"triton": fake_triton, "triton.language": fake_triton.language}
        # Fake tensors have no values that could be compared.
        choice.try_kernels = delta_choice.try_kernel = lambda *unused: None
        attention_choice.try_kernels = quantized.try_triton = lambda *unused: None
        # Tasks collect garbage to count the bytes that are kept; imported modules never become any.
        gc.freeze()
        task_results = [run(watch, task) for task in json.loads(tasks)]
    Path(results).write_text(json.dumps(task_results))


if __name__ == "__main__":
    main(*sys.argv[1:])
