"""megatron-core on the CPU: armed by what needs it, and refused when it comes too late."""

from __future__ import annotations

from tests.harness.launching import run_code


def test_package_imports_no_torch_and_sets_what_cuda_reads_at_its_start() -> None:
    code = (
        "import os, sys, nemo_aligner, nemo_aligner.distributed\n"
        "print('torch' in sys.modules, 'megatron' in sys.modules,\n"
        "      os.environ['CUDA_DEVICE_MAX_CONNECTIONS'], os.environ['PYTORCH_CUDA_ALLOC_CONF'])"
    )
    assert run_code(code).stdout.split() == ["False", "False", "1", "expandable_segments:True"]


def test_megatron_after_a_module_that_needs_it_runs_on_the_cpu() -> None:
    """That all packages with such modules begin alike is held by the test of the architecture."""
    done = run_code(
        "import nemo_aligner.models.shapes.decoder, torch\n"
        "from megatron.core import parallel_state\n"
        "print(torch.zeros(1).cuda().device, torch.cuda.current_device())"
    )
    assert done.stdout.split() == ["cpu", "cpu"], done.stderr


def test_megatron_before_the_package_is_refused() -> None:
    there = "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')"
    done = run_code(f"{there}\nimport nemo_aligner.models.shapes.decoder")
    assert done.returncode == 1
    assert "import nemo_aligner.distributed first" in done.stderr


def test_megatron_on_a_gpu_is_found_by_the_next_finder() -> None:
    done = run_code(
        "import nemo_aligner.distributed, importlib.util, sys, torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "class Next:\n"
        "    asked = []\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None): cls.asked.append(name)\n"
        "sys.meta_path.insert(1, Next)\n"
        "print(importlib.util.find_spec('megatron.core').name, *Next.asked)"
    )
    assert done.stdout.split() == ["megatron.core", "megatron", "megatron.core"], done.stderr
