"""The first hour on a GPU as a tiny rehearsal: every part has rows, or a reason for having none."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.harness import tiny

SCRIPT = ["bash", str(tiny.ROOT / "scripts/gpu_first_hour.sh"), "--device", "cpu"]


@pytest.fixture
def hour(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark's module; benchmarks import each other by their bare names."""
    monkeypatch.syspath_prepend(str(tiny.ROOT / "benchmarks"))
    return importlib.import_module("gpu_first_hour")


def read_parts(folder: Path) -> dict[str, dict[str, Any]]:
    """The result of each part, by its name."""
    content = json.loads((folder / "first_hour.json").read_text())
    return {part["part"]: part for part in content["parts"]}


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture
def prepared(hour: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, whose parts are forked from prepared processes instead of started."""

    def run_command(command: list[str], log: Path, limit: float, *_: object) -> tuple[str, str]:
        words, processes = command[1:], 1
        if words[: len(TORCHRUN)] == TORCHRUN:
            words, processes = words[len(TORCHRUN) :], 2
        done = tiny.run_script(*words, processes=processes, check=False, timeout=limit)
        log.write_text(done.stdout + done.stderr)
        return ("failed", done.stderr) if done.returncode else ("done", "")

    monkeypatch.setattr(hour, "_run_command", run_command)
    monkeypatch.setattr(hour.signal, "signal", lambda *_: None)
    return hour


def test_the_whole_hour_is_rehearsed_without_a_gpu(
    prepared: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (
        *("--device", "cpu", "--output", str(tmp_path), "--work", str(tmp_path / "work")),
        *("--threads", "1", "--trl-python", "nowhere/trl", "--vllm-python", "nowhere/vllm"),
    )
    monkeypatch.setattr("sys.argv", ["gpu_first_hour.py", *options])
    assert prepared.main() == 0
    parts = read_parts(tmp_path)
    states = {name: part["state"] for name, part in parts.items()}
    assert states == {
        **dict.fromkeys(("machine", "model", "scoring", "mfu", "memory", "offload"), "done"),
        **dict.fromkeys(("save", "overlap", "context", "invariance", "profile"), "done"),
        "width-1024": "done",
        **dict.fromkeys(("tests", "training", "vllm", "width-2048", "width-4096"), "not run"),
    }
    assert parts["tests"]["why"].startswith("it needs a GPU")
    assert parts["training"]["why"] == "nowhere/trl: cannot be run: No such file or directory"
    rows = {name: part["rows"] for name, part in parts.items()}
    ours = ["defaults", "model.batch_invariant=false"]
    assert [row["settings"] for row in rows["scoring"]] == [*ours, "batch 4"] * 3
    assert all(row["largest |difference|"] < 1e-4 for row in rows["scoring"][2::3])
    assert [row["micro_batch_tokens"] for row in rows["width-1024"]] == [256, 512, 512]
    assert all(row["tokens/s"] > 0 for row in rows["width-1024"])
    assert rows["profile"][1]["what"] == "the step, not profiled"
    changed = [row["other bits"] for row in rows["invariance"] if row["rows of a product"] == 256]
    assert changed == [0] * 6
    assert [row["sequence"] for row in rows["mfu"]] == [64, 32, 64]
    *measured, rejected = rows["mfu"]
    assert all(row["s/step"] > 0 and row["planned s/step"] > 0 for row in measured)
    assert rejected["s/step"] is None
    assert "flash_linear_attention" in rejected["note"]
    on_device, in_host = rows["offload"]
    assert on_device["last loss"] != on_device["first loss"]
    assert in_host["largest |difference|"] == 0
    assert all(row["seconds"] > 0 for row in rows["save"] if row["seconds"] is not None)
    assert rows["save"][1]["planned"] > 0
    assert [row["over"] for row in rows["overlap"]] == ["gloo", "gloo"]
    cp2 = ["TP=1 CP=2 PP=1 DP=1", "TP=1 CP=2+ring PP=1 DP=1"]
    shared = [*cp2, "TP=1 PP=1 DP=2", "TP=1 PP=1 DP=2 EP=2"]
    assert [row["layout"] for row in rows["context"]] == ["TP=1 PP=1 DP=2", *shared]
    for row in (*rows["memory"], *rows["context"]):
        assert row["measured/planned"] == pytest.approx(1, rel=0.1)
    page = (tmp_path / "first_hour.md").read_text()
    assert [line.partition(":")[0] for line in page.splitlines() if line.startswith("## ")] == [
        *("## Goals, for one H100", "## The fastest settings"),
        *(f"## {name}" for name in parts),
    ]
    assert "| measured/planned |" in page
    assert "model.micro_batch_tokens=" in page
    assert "==== scoring" in (tmp_path / "first_hour.log").read_text()


def test_the_script_starts_a_part_of_one_process_and_of_two(tmp_path: Path) -> None:
    options = ("--parts", "memory", "overlap", "--threads", "1", "--output", str(tmp_path))
    done = subprocess.run(
        [*SCRIPT, *options], capture_output=True, text=True, env=tiny.environment(), timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = read_parts(tmp_path)
    assert {name: part["state"] for name, part in parts.items()} == {
        "memory": "done",
        "overlap": "done",
    }
    assert all(part["rows"] for part in parts.values())


STOPPED = """
import sys
import gpu_first_hour
from first_hour_parts import Part, read_rows

write = "open(sys.argv[1], 'w').write('[{}]')"
gpu_first_hour.PARTS = [
    Part(
        name,
        "a part",
        60,
        lambda hour, seconds, name=name, ends=ends: [
            *(sys.executable, "-c", f"import sys, time; {write}; time.sleep({ends})"),
            str(hour.output(name)),
        ],
        read_rows,
    )
    for name, ends in (("quick", 0), ("long", 60), ("never", 0))
]
sys.exit(gpu_first_hour.main())
"""


@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGINT])
def test_who_stops_it_keeps_what_was_found(tmp_path: Path, order: signal.Signals) -> None:
    path = os.pathsep.join([str(tiny.ROOT / "benchmarks"), tiny.environment()["PYTHONPATH"]])
    process = subprocess.Popen(
        [sys.executable, "-uc", STOPPED, "--device=cpu", "--output", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=tiny.environment(PYTHONPATH=path),
    )
    assert process.stdout is not None
    while not (tmp_path / "first_hour.json").is_file() or "long" not in process.stdout.readline():
        assert process.poll() is None
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(order)
    assert process.wait(30) == 130
    assert str(tmp_path / "first_hour.md") in process.stdout.read()
    process.stdout.close()
    states = {name: part["state"] for name, part in read_parts(tmp_path).items()}
    assert states == {"quick": "done", "long": "interrupted", "never": "not run"}
    assert not psutil.wait_procs(family, timeout=5)[1]


WRITES = "open(out, 'w').write('[{\"a\": 1}]')"


@pytest.fixture
def run(hour: ModuleType, tmp_path: Path) -> Callable[..., dict[str, dict[str, Any]]]:
    """A function that runs parts and returns their results; programs write rows to ``out``."""

    read_rows = importlib.import_module("first_hour_parts").read_rows

    def run_parts(
        seconds: float = 60.0, limit: float = 20, **parts: str | tuple[str, dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        context = hour.Hour("cpu", 0, "fp32", tmp_path, None, None, 0.1, "", "")
        results: list[dict[str, Any]] = []
        for name, description in parts.items():
            program, more = (description, {}) if isinstance(description, str) else description
            words = [sys.executable, "-c", f"out = {str(context.output(name))!r}\n{program}"]
            command = lambda _, seconds, words=words: words  # noqa: E731
            part = hour.Part(name, "a part", limit, command, read_rows, **more)
            results.append(hour._run(part, context, results, min(limit, seconds), 1))
        return {result["part"]: result for result in results}

    return run_parts


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_part_that_fails_or_cannot_run_says_why_and_hides_no_other(
    run: Callable[..., dict[str, dict[str, Any]]],
) -> None:
    parts = run(
        fails=f"{WRITES}; print('a word'); raise SystemExit(3)",
        silent="pass",
        lacks=(WRITES, {"lacks": lambda context: "no such thing here"}),
        needs=(WRITES, {"needs": ("lacks",)}),
        good=WRITES,
    ) | run(late=WRITES, seconds=0)
    assert {name: (part["state"], part["why"]) for name, part in parts.items()} == {
        "fails": ("failed", "it ended with exit status 3"),
        "silent": ("failed", "it ended without a result"),
        "lacks": ("not run", "no such thing here"),
        "needs": ("not run", "it needs the part lacks, which is not run"),
        "good": ("done", ""),
        "late": ("not run", "no time is left"),
    }
    assert parts["good"]["rows"] == parts["fails"]["rows"] == [{"a": 1}]
    assert parts["fails"]["remarks"] == ["a word"]


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(
    run: Callable[..., dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    child = "import subprocess, time; p = subprocess.Popen(['sleep', '60'], start_new_session=True)"
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))"
    late = run(late=f"{WRITES}\n{child}\n{note}\ntime.sleep(60)", limit=2)["late"]
    assert (late["state"], late["why"]) == ("out of time", "it was stopped after 2 s")
    assert late["rows"] == [{"a": 1}]
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20  # a killed process may need a moment
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def test_files_that_are_not_there_are_an_error_at_once(
    hour: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("model", "data"):
        monkeypatch.setattr(sys, "argv", ["gpu_first_hour.py", f"--{name}", "no/file"])
        with pytest.raises(SystemExit):
            hour.main()
        assert f"--{name}: there is no no/file" in capsys.readouterr().err


def test_parts_fit_into_half_an_hour_and_80_gib_and_have_what_they_need_before(
    hour: ModuleType,
) -> None:
    from first_hour_work import points_of
    from synthetic import plan_of

    from nemo_aligner.models.shapes.decoder import ModelShape
    from nemo_aligner.planning.memory import fullest_stage

    assert [part.name for part in hour._with_needs(["scoring"])] == ["model", "scoring"]
    assert sum(part.limit for part in hour.PARTS) <= 30 * 60
    points = points_of("cuda", "bf16")
    assert {part.name for part in hour.PARTS} >= {*points}
    for point in (point for part in points.values() for point in part):
        total_bytes = fullest_stage(ModelShape.from_config(point["model"]), plan_of(point)).total
        assert total_bytes < 76 * 2**30, point


def test_a_gpu_without_bf16_is_measured_in_fp16(
    hour: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for has_bf16, precision in ((True, "bf16"), (False, "fp16")):
        is_supported = lambda has_bf16=has_bf16, **_: has_bf16  # noqa: E731
        monkeypatch.setattr("torch.cuda.is_bf16_supported", is_supported)
        assert hour._count_gpus() == (2, precision)


def test_plans_are_for_the_kernels_that_the_learner_takes(
    hour: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from first_hour_work import points_of
    from synthetic import plan_of

    point = points_of("cuda", "bf16")["mfu"][0]
    assert not plan_of(point).fused_kernels
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert plan_of(point).fused_kernels
    assert not plan_of({**point, "pointwise_kernels": "eager"}).fused_kernels


def test_the_model_replaces_that_of_an_earlier_hour(
    hour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_hour_machine = importlib.import_module("first_hour_machine")
    work, earlier, source = tmp_path / "work", tmp_path / "earlier", tmp_path / "model.nemo"
    for path in (work, earlier, source):
        path.mkdir()
    (work / "hf").symlink_to(earlier)
    for name in ("base.nemo", "reward.nemo"):
        (work / name).write_text("earlier")

    def export(reward_model: Path, folder: Path) -> Path:
        folder.mkdir()
        return folder

    write = lambda base, output: output.write_text(base.resolve().name)  # noqa: E731
    monkeypatch.setattr(first_hour_machine, "write_reward_model", write)
    monkeypatch.setattr(first_hour_machine, "export", export)
    for _ in range(2):  # the second time "hf" is a folder
        hf = first_hour_machine._prepare_model_files(source, work, {})
    assert not hf.is_symlink()
    assert earlier.is_dir()
    assert (work / "base.nemo").resolve() == source
    assert (work / "reward.nemo").read_text() == "model.nemo"
    with pytest.raises(SystemExit, match=r"--model: .*reward\.nemo is in the folder of --work"):
        first_hour_machine._prepare_model_files(work / "reward.nemo", work, {})
    assert (work / "reward.nemo").is_file()


def test_training_is_compared_by_the_fastest_settings(hour: ModuleType, tmp_path: Path) -> None:
    (part,) = (part for part in hour.PARTS if part.name == "training")
    context = hour.Hour("cuda", 1, "bf16", tmp_path, None, None, 989.0, "python", "python")
    assert "--ours" not in part.command(context, 60.0)
    row = {"texts": "up to 2,048 tokens", "tokens/s": 1.0, "pointwise_kernels": "triton"}
    row["attention_kernels"] = "torch"
    rows = [{**row, "cuda_graphs": True, "micro_batch_tokens": 32768}]
    context.output("width-2048").write_text(json.dumps(rows))
    words = part.command(context, 60.0)
    assert words[words.index("--ours") + 1 :][:4] == [
        'model.pointwise_kernels="triton"',
        'model.attention_kernels="torch"',
        "model.cuda_graphs=true",
        "model.micro_batch_tokens=32768",
    ]


def test_wheels_come_before_the_packages_of_the_machine(tmp_path: Path) -> None:
    """A wheel's .pth file is read, too."""
    with zipfile.ZipFile(tmp_path / "psutil-9.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("psutil/__init__.py", "import elsewhere")
        wheel.writestr("folders.pth", "inner\n")
        wheel.writestr("inner/elsewhere.py", "raise SystemExit('from the wheel')")
    command = [*SCRIPT[:2], "--wheels", str(tmp_path), *SCRIPT[2:]]
    env = tiny.environment(TMPDIR=str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (1, "from the wheel\n")


def test_outcomes_of_tests_are_read(hour: ModuleType, tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2, 'no'\n")
    output = tmp_path / "tests.out"
    script = str(tiny.ROOT / "benchmarks/first_hour_tests.py")
    subprocess.run([sys.executable, script, str(tests), str(output)], cwd=tmp_path)
    rows = json.loads(output.read_text())
    assert [(row["test"], row["outcome"]) for row in rows] == [
        ("test_good", "passed"),
        ("test_bad", "failed"),
    ]
    assert "no" in rows[1]["message"]


def test_a_column_without_content_is_no_column(hour: ModuleType) -> None:
    rows = [{"a|b": "x|y", "n": 1.23456, "none": None}, {"a|b": "", "n": None, "none": ""}]
    assert importlib.import_module("first_hour_page").table(rows).splitlines() == [
        "| a\\|b | n |",
        "| --- | ---: |",
        "| x\\|y | 1.23 |",
        "|  | - |",
    ]
