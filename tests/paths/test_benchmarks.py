"""The benchmarks run on a tiny model, and their sides compute the same rewards and losses."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Hugging Face checkpoint in ``hf/`` and ``pairs.jsonl``."""
    folder = tmp_path_factory.mktemp("benchmark")
    tiny.write_hf_checkpoint(folder / "hf", max_position_embeddings=2048)
    tiny.write_pairs(folder / "pairs.jsonl", 12)
    return folder


@pytest.fixture
def dying_python(tmp_path: Path) -> Path:
    """A Python that seems to have every module, and kills itself when it runs a worker."""
    path = tmp_path / "python"
    path.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\necho out of memory >&2\nkill -KILL $$\n')
    path.chmod(0o755)
    return path


def run_benchmark(script: str, folder: Path, *arguments: str) -> tuple[str, dict]:
    """Run a benchmark; return what it prints and what it writes."""
    output = folder / "rows.json"
    done = tiny.run_script(
        script,
        f"--model={folder / 'hf'}",
        f"--data={folder / 'pairs.jsonl'}",
        f"--work={folder / 'work'}",
        f"--output={output}",
        *arguments,
    )
    assert "machine: " in done.stdout
    return done.stdout, json.loads(output.read_text())


def test_scoring_gives_the_rewards_of_transformers(folder: Path) -> None:
    few = ("--pairs=6", "--turns=1", "--threads=1")
    rows = run_benchmark("benchmarks/scoring.py", folder, *few)[1]["rows"]
    assert [row["scorer"] for row in rows] == ["nemo_aligner", "transformers"] * 3
    assert all(row["rewards/s"] > 0 for row in rows)
    assert all(row["largest |difference|"] < 1e-5 for row in rows[1::2])


def test_precision_tells_roundings_apart(folder: Path) -> None:
    """Each variant rounds differently."""
    model, output = folder / "rated.nemo", folder / "precision.json"
    tiny.write_reward_nemo(model)
    options = (f"--model={model}", f"--data={folder / 'pairs.jsonl'}", f"--output={output}")
    tiny.run_script("benchmarks/precision.py", *options, "--pairs=6", "--draws=2")
    rows = {row["in fp32"]: row for row in json.loads(output.read_text())["rows"]}
    computed = {name: row["mean, same weights"] for name, row in rows.items()}
    assert computed.pop("weights alone") == 0 < rows["weights alone"]["mean"]
    assert len(set(computed.values())) == len(computed) == 5
    assert all(0 < difference < 0.05 for difference in computed.values())
    assert all(row["rewards/s"] > 0 for row in rows.values())


def test_training_has_the_loss_of_trl(folder: Path, trl_python: Path) -> None:
    trl, few = f"--trl-python={trl_python}", ("--trl-batch=2", "--global-batch=4", "--threads=1")
    rows = run_benchmark("benchmarks/training.py", folder, trl, *few, "--turns=1")[1]["rows"]
    assert [row["trainer"] for row in rows] == ["nemo_aligner", "TRL, batch 2"]


SERVED = ("--rest=0", "--clients=2", "--requests=6", "--turns=1", "--threads=1")
KILLED = "it was ended by SIGKILL, as the kernel does where memory is short\nout of memory"


@pytest.mark.parametrize(
    ("script", "peer", "arguments"),
    [
        ("training", "trl", ("--trl-batch=2", "--global-batch=4", "--threads=1", "--turns=2")),
        ("scoring", "transformers", ("--pairs=4", "--turns=1", "--threads=1")),
        ("serving", "vllm", ("--kinds=pairs", *SERVED)),
    ],
)
def test_benchmark_is_measured_where_its_peer_dies(
    folder: Path, dying_python: Path, script: str, peer: str, arguments: tuple[str, ...]
) -> None:
    python = f"--{peer}-python={dying_python}"
    shown, content = run_benchmark(f"benchmarks/{script}.py", folder, python, *arguments)
    speeds: dict[bool, list[float | None]] = {True: [], False: []}
    for row in content["rows"]:
        is_ours = "nemo_aligner" in row.values()
        speeds[is_ours].append(row.get("pairs/s", row.get("rewards/s")))
    assert speeds[True]
    assert all(speed is not None and speed > 0 for speed in speeds[True])
    assert {*speeds[False]} == {None}
    failures = content.get("failures") or [content["failure"]]
    assert all(
        failure.endswith(KILLED) for failure in (failures.values() if peer == "vllm" else failures)
    )
    assert f"{KILLED}\n" in shown
    if script == "training":  # ours is measured in every turn, and TRL is not run again
        assert shown.splitlines()[:2] == ["turn 1 of 2: ours, TRL", "turn 2 of 2: ours"]


def test_scaling_measures_what_the_cost_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its runs are forked from prepared processes instead of started by torchrun."""

    def run_worker(
        script: str, role: str, job: dict[str, Any], threads: int, *, ranks: int
    ) -> dict[str, Any]:
        done = tiny.run_script(f"benchmarks/{script}", role, json.dumps(job), processes=ranks)
        return json.loads(done.stdout.splitlines()[-1])

    monkeypatch.syspath_prepend(str(tiny.ROOT / "benchmarks"))
    scaling = importlib.import_module("scaling")
    monkeypatch.setattr(scaling, "run_worker", run_worker)
    output = tmp_path / "scaling.json"
    sizes = ("--layers=2", "--hidden=128", "--seq-length=64", "--pairs=4", "--steps=1")
    options = ("--tables", "ranks", "--ranks=2", *sizes, f"--output={output}")
    monkeypatch.setattr("sys.argv", ["scaling.py", *options])
    scaling.main()
    assert "measured/planned" in capsys.readouterr().out
    rows = json.loads(output.read_text())["tables"]["ranks"]
    layouts = ["one rank", "DP=2", "TP=2", "TP=2+SP", "PP=2", "CP=2", "CP=2+ring"]
    assert [row["ranks"] for row in rows] == layouts
    for row in rows:
        seconds = row["seconds"]
        parts = ("data", "forward", "backward", "reduce", "optimizer", "other")
        assert sum(seconds[part] for part in parts) == pytest.approx(seconds["step"])
        assert all(seconds[part] > 0 for part in (*parts, "save", "written"))
        assert row["tokens"] == 4 * 2 * 64
        assert row["expected"]["total"] == pytest.approx(row["measured"]["total"], rel=0.1)


def test_memory_of_a_run_is_told_step_by_step(folder: Path) -> None:
    few = ("--steps=4", "--save-interval=2", "--skip-matmuls")
    rows = run_benchmark("benchmarks/memory.py", folder, *few)[1]["rows"]
    starts = ["libraries", "model and optimizer", "the save's copy"]
    assert [row["when"] for row in rows] == [*starts, *(f"step {step}" for step in range(1, 5))]
    assert all(row["peak"] >= row["resident"] > row["in use"] > 0 for row in rows)
    assert all(row["at most"] >= row["in use"] for row in rows)


def test_serving_gives_the_rewards_of_its_peer(folder: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    fake = tiny.ROOT / "tests/paths/fake_vllm.py"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {fake} "$@"\n')
    python.chmod(0o755)
    peer = (f"--vllm-python={python}", "--kinds=shared")
    _, content = run_benchmark("benchmarks/serving.py", folder, *peer, *SERVED)
    rows = content["rows"]
    assert [row["server"] for row in rows] == ["nemo_aligner", "vLLM with prefix cache"]
    assert [row["clients"] for row in rows] == [1, 1]
    assert all(row[key] > 0 for row in rows for key in ("rewards/s", "tokens/s", "p50 s", "p99 s"))
    assert rows[1]["ours is faster by"] > 0
    assert 0 < rows[0]["itself ms"] < 1000 * rows[0]["p99 s"]
    assert len(content["differences"]) == 2
    assert max(content["differences"].values()) < 1e-5
    assert content["failures"] == {}


def test_what_the_server_itself_costs(folder: Path) -> None:
    # A separate model, because the other tests' folder must not have it.
    few = (f"--work={folder / 'tiny'}", "--tiny-requests=40", "--soak=40")
    _, content = run_benchmark("benchmarks/serving.py", folder, "--tiny", *few)
    (latency,) = content["latency"]
    assert latency["forward ms"] > 0
    assert 0 < latency["p50 ms"] <= latency["p99 ms"] <= latency["max ms"]
    assert [row["traffic"] for row in content["traffic"]] == ["uniform", "mixed"]
    assert all(row["rows/s"] > 0 for row in content["traffic"])
    assert [row["soak"] for row in content["soak"]] == ["after 4 requests", "after 40 requests"]
    assert all(row["resident MiB"] > 100 for row in content["soak"])


def test_quality_is_a_table_of_models_on_the_same_pairs(folder: Path) -> None:
    model, output = folder / "ranked.nemo", folder / "quality.json"
    tiny.write_reward_nemo(model)
    options = (f"{model}=first", str(model), f"--data={folder / 'pairs.jsonl'}")
    done = tiny.run_script("benchmarks/quality.py", *options, f"--output={output}")
    first, second = json.loads(output.read_text())
    table = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert f"| always the longer reply | {first['longer_reply_accuracy']:.1%} |" in table[1]
    assert table[2].startswith(f"| first | {first['accuracy']:.1%} ({first['interval'][0]:.1%} to")
    assert table[3].startswith(f"| {model} |")
    assert first["length_correlation"] == second["length_correlation"]
