"""The examination of a machine runs on any, also where torch does not, and says what to do."""

from __future__ import annotations

import importlib.metadata
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_aligner.diagnostics import installed, machine
from nemo_aligner.diagnostics.doctor import examine, render
from nemo_aligner.diagnostics.finding import Finding, Verdict
from tests import tiny

Usage = namedtuple("Usage", ["total", "used", "free"])


def named(name: str, findings: Any) -> Finding:
    (found,) = (each for each in findings if each.name == name)
    return found


def test_this_machine_is_fit_for_the_tests() -> None:
    findings = examine()
    assert [each for each in findings if each.verdict is Verdict.missing] == []
    for name in ("python", "torch", "megatron-core", "numpy", "CPU", "memory", "C compiler"):
        assert named(name, findings).value


def test_the_report_fits_80_columns_and_counts() -> None:
    findings = [
        Finding("torch", "2.13"),
        Finding("numpy", "2.0", Verdict.missing, "pip install 'numpy<2' " + "and more " * 30),
        Finding("GPU", "none " * 40, Verdict.note),
    ]
    lines = render(findings).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "          torch: 2.13"
    assert lines[1] == "MISSING   numpy: 2.0"
    assert lines[2].startswith("          -> pip install 'numpy<2' and more")
    assert lines[-1] == "missing: 1, notes: 1"


BROKEN = """
import sys
from nemo_aligner.diagnostics.doctor import examine, render
print(render(examine()))
assert "megatron" not in sys.modules
"""


def run_with(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{BROKEN}"],
        capture_output=True,
        text=True,
        env=tiny.environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_broken_torch_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise OSError('libcudart.so.12: cannot open')")
    said = run_with(tmp_path)
    assert "MISSING   torch: cannot be imported: OSError: libcudart.so.12: cannot open" in said
    assert "pip install --force-reinstall torch" in said


def versions(changes: dict[str, str | None]) -> Callable[[str], str]:
    plain = importlib.metadata.version

    def version(name: str) -> str:
        found = changes.get(name, "as it is")
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return plain(name) if found == "as it is" else found

    return version


def test_versions_that_do_not_fit_have_the_command_that_mends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"numpy": "2.1.0", "jinja2": None, "nvidia-pytriton": "0.6.0", "gguf": None}
    monkeypatch.setattr(importlib.metadata, "version", versions(changes))
    found = list(installed.packages())
    assert named("numpy", found).verdict is Verdict.missing
    assert named("numpy", found).advice == "wanted <2: pip install 'numpy<2'"
    assert named("jinja2", found).advice == "pip install 'jinja2'"
    assert named("[serving]", found).verdict is Verdict.missing
    assert "pip install 'nemo_aligner[serving]'" in named("[serving]", found).advice
    assert named("[gguf]", found).verdict is Verdict.note
    assert named("torch", found).verdict is Verdict.ok
    assert "psutil" not in [each.name for each in found]


def test_a_package_that_is_not_installed_cannot_say_what_it_requires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    for name in ("version", "requires", "metadata"):
        monkeypatch.setattr(importlib.metadata, name, nothing)
    ours = named("nemo_aligner", installed.packages())
    assert (ours.verdict, "pip install -e ." in ours.advice) == (Verdict.note, True)


def test_a_triton_that_may_not_run_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    binary = tmp_path / "tritonserver" / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text("")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: spec)
    assert installed._triton_binary().verdict is Verdict.missing
    binary.chmod(0o755)
    assert installed._triton_binary().verdict is Verdict.ok


def cuda(major: int, count: int = 2) -> Any:
    device = SimpleNamespace(name="A GPU", total_memory=80 * 2**30, major=major)
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: count > 0,
            device_count=lambda: count,
            get_device_properties=lambda index: device,
        ),
        version=SimpleNamespace(cuda="12.6"),
    )


def test_gpus_are_named_with_memory_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_nvidia_driver", lambda: "570.1")
    assert [each.value for each in machine.gpus(cuda(9))] == [
        "A GPU, 80 GiB, bf16", "A GPU, 80 GiB, bf16", "torch's 12.6, driver 570.1"
    ]  # fmt: skip
    old = named("GPU 0", machine.gpus(cuda(7)))
    assert (old.value, old.advice) == (
        "A GPU, 80 GiB, no bf16", "train with trainer.precision=fp16"
    )  # fmt: skip
    unseen = named("GPU", machine.gpus(cuda(9, count=0)))
    assert (unseen.verdict, "build of torch for CUDA" in unseen.advice) == (Verdict.missing, True)
    monkeypatch.setattr(machine, "_nvidia_driver", lambda: None)
    assert named("GPU", machine.gpus(None)).verdict is Verdict.note


@pytest.mark.parametrize(
    ("flags", "verdict"), [("avx2 fma", Verdict.note), ("avx512f amx_bf16", Verdict.ok)]
)
def test_a_cpu_without_bf16_says_what_that_means(
    flags: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: f"model name\t: Zen\nflags\t: {flags}\n")
    found = list(machine.processor(has_gpu=False))
    assert named("CPU", found).value.startswith("Zen: ")
    assert named("CPU instructions", found).verdict is verdict
    assert named("CPU instructions", machine.processor(has_gpu=True)).verdict is Verdict.ok


def test_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**20  # in kB
    files = {"/proc/meminfo": f"MemTotal: {64 * gib} kB\nMemAvailable: {60 * gib} kB\n"}
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    assert named("memory", machine.space()).value == "60.0 of 64.0 GiB free"
    files["/sys/fs/cgroup/memory.max"], files["/sys/fs/cgroup/memory.current"] = (
        str(8 * 2**30), str(6 * 2**30)
    )  # fmt: skip
    assert named("memory", machine.space()).value == "2.0 of 8.0 GiB free"
    files.clear()
    assert named("memory", machine.space()).value == "unknown"


def test_little_room_is_noted_where_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: Usage(2**36, 0, 2**26))
    notes = [each for each in machine.space() if each.verdict is Verdict.note]
    assert len(notes) == 3
    assert "--shm-size" in notes[0].advice
    assert "TMPDIR" in notes[1].advice


def test_a_taken_port_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = holder.getsockname()[1]
        settings = SimpleNamespace(port=number)
        monkeypatch.setattr(machine, "ServerConfig", lambda: settings)
        assert machine.port().verdict is Verdict.note
    assert machine.port().value == "free on 127.0.0.1"


def test_a_compiler_is_needed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.compiler(has_gpu=True).verdict is Verdict.missing
    assert machine.compiler(has_gpu=False).verdict is Verdict.note


def test_a_python_without_anything_is_told_what_it_lacks() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-m", "nemo_aligner", "doctor"],
        capture_output=True,
        text=True,
        cwd=tiny.ROOT,
    )
    assert done.returncode == 1, done.stderr
    assert "MISSING   torch: not installed" in done.stdout
    assert "MISSING   omegaconf: not installed" in done.stdout
