"""The doctor runs on any machine, even if torch is missing or broken, and says what to do."""

from __future__ import annotations

import importlib.metadata
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nemo_aligner.tools import doctor
from nemo_aligner.tools.doctor import Finding, Verdict, examine, render
from tests.harness import tiny

Usage = namedtuple("Usage", ["total", "used", "free"])
BROKEN = """
from nemo_aligner.tools.doctor import examine, render
print(render(examine()))
assert "megatron" not in sys.modules
"""


def named(name: str, findings: Any) -> Finding:
    (finding,) = (finding for finding in findings if finding.name == name)
    return finding


def test_doctor_finds_this_machine_fit() -> None:
    findings = examine()
    assert [finding for finding in findings if finding.verdict is Verdict.missing] == []
    for name in ("python", "torch", "megatron-core", "numpy", "CPU", "memory", "C compiler"):
        assert named(name, findings).value


def test_doctor_report_fits_80_columns_and_counts() -> None:
    findings = [
        Finding("torch", "2.13"),
        Finding("numpy", "2.0", Verdict.missing, "pip install 'numpy<2' " + "and more " * 30),
        Finding("GPU", "none " * 40, Verdict.note),
        Finding("[x]", "no", Verdict.note, f"for a reason: pip install -e '{'folder ' * 6}[x]'"),
    ]
    lines = render(findings).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "          torch: 2.13"
    assert lines[1] == "MISSING   numpy: 2.0"
    command = f"pip install -e '{'folder ' * 6}[x]'"  # on one line, to copy it
    assert [line.strip() for line in lines[-3:-1]] == ["-> for a reason:", command]
    assert lines[2].startswith("          -> pip install 'numpy<2' and more")
    assert lines[-1] == "missing: 1, notes: 2"


def versions(changes: dict[str, str | None]) -> Callable[[str], str]:
    plain = importlib.metadata.version

    def version(name: str) -> str:
        changed = changes.get(name, "installed")
        if changed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return plain(name) if changed == "installed" else changed

    return version


def test_doctor_gives_the_command_that_fixes_a_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"numpy": "1.25.2", "jinja2": None, "uvicorn": "0.20.0", "gguf": None}
    monkeypatch.setattr(importlib.metadata, "version", versions(changes))
    findings = list(doctor.check_packages())
    assert named("numpy", findings).verdict is Verdict.missing
    assert named("numpy", findings).advice == "wanted >=1.26: pip install 'numpy>=1.26'"
    assert named("jinja2", findings).advice == "pip install 'jinja2'"
    assert named("[serving]", findings).verdict is Verdict.missing
    assert f"pip install -e '{tiny.ROOT}[serving]'" in named("[serving]", findings).advice
    assert named("[gguf]", findings).verdict is Verdict.note
    assert named("torch", findings).verdict is Verdict.ok
    assert "psutil" not in [finding.name for finding in findings]

    def raise_not_found(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    # The requirements of a package that is not installed are not known.
    for name in ("version", "requires", "metadata"):
        monkeypatch.setattr(importlib.metadata, name, raise_not_found)
    package = named("nemo_aligner", doctor.check_packages())
    assert (package.verdict, "pip install -e " in package.advice) == (Verdict.note, True)


@pytest.mark.parametrize(
    ("pytriton", "numpy", "verdict"),
    [
        ("0.7.0", "1.26.4", Verdict.ok),
        ("0.7.0", "2.1.0", Verdict.note),
        ("0.6.0", "1.26.4", Verdict.note),
        (None, "2.1.0", Verdict.note),
    ],
)
def test_doctor_notes_numpy_2_where_triton_is_installed(
    monkeypatch: pytest.MonkeyPatch, pytriton: str | None, numpy: str, verdict: Verdict
) -> None:
    changes = {"numpy": numpy, "nvidia-pytriton": pytriton}
    monkeypatch.setattr(importlib.metadata, "version", versions(changes))
    findings = list(doctor.check_packages())
    assert named("numpy", findings).verdict is Verdict.ok
    assert named("[serving]", findings).verdict is Verdict.ok
    assert named("[triton]", findings).verdict is verdict


def test_doctor_notes_a_triton_that_may_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # An imported module does not mean that Triton is installed.
    monkeypatch.setitem(sys.modules, "pytriton", ModuleType("pytriton"))
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [])
    assert "Triton" not in [finding.name for finding in doctor.check_packages()]

    binary = tmp_path / "pytriton/tritonserver/bin/tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text("")
    installed = tmp_path / "nvidia_pytriton-0.7.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: nvidia-pytriton\nVersion: 0.7.0\n")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(tmp_path))
    triton = named("Triton", doctor.check_packages())
    assert (triton.verdict, "server.triton_port" in triton.advice) == (Verdict.note, True)
    binary.chmod(0o755)
    assert named("Triton", doctor.check_packages()).verdict is Verdict.ok


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


def test_doctor_names_gpus_with_memory_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_find_nvidia_driver", lambda: "570.1")
    assert [finding.value for finding in doctor.check_gpus(cuda(9))] == [
        "A GPU, 80 GiB, bf16", "A GPU, 80 GiB, bf16", "torch's 12.6, driver 570.1"
    ]  # fmt: skip
    old = named("GPU 0", doctor.check_gpus(cuda(7)))
    assert (old.value, old.advice) == (
        "A GPU, 80 GiB, no bf16", "train with trainer.precision=fp16"
    )  # fmt: skip
    unseen = named("GPU", doctor.check_gpus(cuda(9, count=0)))
    assert (unseen.verdict, "build of torch for CUDA" in unseen.advice) == (Verdict.missing, True)
    monkeypatch.setattr(doctor, "_find_nvidia_driver", lambda: None)
    assert named("GPU", doctor.check_gpus(None)).verdict is Verdict.note


def test_doctor_says_what_a_cpu_without_bf16_means(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, verdict in (("avx2 fma", Verdict.note), ("avx512f amx_bf16", Verdict.ok)):
        cpuinfo = f"model name\t: Zen\nflags\t: {flags}\n"
        monkeypatch.setattr(doctor, "_read_text", lambda path, cpuinfo=cpuinfo: cpuinfo)
        findings = list(doctor.check_processor(has_gpu=False))
        assert named("CPU", findings).value.startswith("Zen: ")
        assert named("CPU instructions", findings).verdict is verdict, flags
        assert named("CPU instructions", doctor.check_processor(has_gpu=True)).verdict is Verdict.ok


def test_doctor_gives_the_memory_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**20  # in kB
    files = {"/proc/meminfo": f"MemTotal: {64 * gib} kB\nMemAvailable: {60 * gib} kB\n"}
    monkeypatch.setattr(doctor, "_read_text", lambda path: files.get(path, ""))
    assert named("memory", doctor.check_space()).value == "60.0 of 64.0 GiB free"
    files["/sys/fs/cgroup/memory.max"], files["/sys/fs/cgroup/memory.current"] = (
        str(8 * 2**30), str(6 * 2**30)
    )  # fmt: skip
    assert named("memory", doctor.check_space()).value == "2.0 of 8.0 GiB free"
    files.clear()
    assert named("memory", doctor.check_space()).value == "unknown"


def test_doctor_notes_little_room_a_taken_port_and_a_missing_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: Usage(2**36, 0, 2**26))
    notes = [finding for finding in doctor.check_space() if finding.verdict is Verdict.note]
    assert len(notes) == 3
    assert "--shm-size" in notes[0].advice
    assert "TMPDIR" in notes[1].advice
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        settings = SimpleNamespace(port=holder.getsockname()[1])
        monkeypatch.setattr(doctor, "ServerConfig", lambda: settings)
        assert doctor.check_port().verdict is Verdict.note
    assert doctor.check_port().value == "free on 127.0.0.1"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.check_compiler(has_gpu=True).verdict is Verdict.missing
    assert doctor.check_compiler(has_gpu=False).verdict is Verdict.note


def run_doctor(*options: str, exit_code: int = 0, **arguments: Any) -> str:
    """Run Python with some options in a new process; return what it prints."""
    command = [sys.executable, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tiny.ROOT, **arguments)
    assert done.returncode == exit_code, done.stderr
    return done.stdout


def test_doctor_of_a_broken_torch_says_that_it_is(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise OSError('libcudart.so.12: cannot open')")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{BROKEN}"
    output = run_doctor("-c", script, env=tiny.environment())
    assert "MISSING   torch: cannot be imported: OSError: libcudart.so.12: cannot open" in output
    assert "pip install --force-reinstall torch" in output


def test_doctor_of_a_python_without_anything_says_what_it_lacks() -> None:
    output = run_doctor("-S", "-E", "-m", "nemo_aligner", "doctor", exit_code=1)
    assert "MISSING   torch: not installed" in output
    assert "MISSING   omegaconf: not installed" in output
