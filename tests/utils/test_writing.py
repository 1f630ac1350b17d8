"""Files are written completely or not at all, and a full disk's error says how much is free."""

from __future__ import annotations

import errno
import json
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
from safetensors import SafetensorError

from nemo_aligner.checkpoint.nemo.write import scratch_beside, write_nemo
from nemo_aligner.checkpoint.run_lock import lock_run
from nemo_aligner.checkpoint.weights.save import _as_checkpoint_error
from nemo_aligner.cli.main import _describe_for_user
from nemo_aligner.data.records import write_records
from nemo_aligner.utils import writing
from nemo_aligner.utils.errors import CheckpointError, ConfigError
from nemo_aligner.utils.writing import (
    check_outputs,
    check_replaces_nothing_in,
    explaining_full_disk,
    replacing,
    write_lines,
    write_problem,
    write_whole,
)
from tests.checkpoint.refusals import refusals

FREE = r", with \d+\.\d [GM]B free .*\. Free some space, or choose another disk"
# Messages of torch, safetensors and the system.
CUT_OFF = "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"
RUST = "Error while serializing: I/O error: No space left on device (os error 28)"


def test_write_problem_of_a_full_disk_has_its_free_space(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "made"
    errors = {
        "the disk is full": OSError(errno.ENOSPC, "No space left on device"),
        "the disk quota is used up": OSError(errno.EDQUOT, "Disk quota exceeded"),
        "a write was cut off, as by a full disk": RuntimeError(CUT_OFF),
    }
    for problem, error in errors.items():
        free = write_problem(missing, error).removeprefix(f"{problem}, with ")
        assert free.endswith(f" free in {tmp_path}. Free some space, or choose another disk")
        assert write_problem(tmp_path, error).startswith(f"{problem}, with ")
        assert " free there. " in write_problem(tmp_path, error)
    assert write_problem(missing, SafetensorError(RUST)).startswith("the disk is full, with ")
    denied = PermissionError(errno.EACCES, "Permission denied", "/x")
    assert write_problem(missing, denied) == "[Errno 13] Permission denied: '/x'"


def full_disk(path: Path) -> Path:
    """Make every write to a path fail as on a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/full")
    return path


@pytest.fixture
def temporary_names(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the names of temporary files known, and return the part of them that is random."""
    monkeypatch.setattr(writing, "uuid4", lambda: UUID(int=0))
    return "0" * 12


def test_full_disk_is_named_by_whatever_writes(tmp_path: Path, temporary_names: str) -> None:
    """The previous content stays."""
    for name in ("lines.jsonl", "records.jsonl", "model.nemo"):
        full_disk(tmp_path / f".{name}.{temporary_names}.partial")
    full_disk(tmp_path / "run/run.lock.partial")
    (tmp_path / "lines.jsonl").write_text("old\n")
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "tensors").write_bytes(bytes(100_000))
    with refusals(ConfigError) as refused:
        with refused("lines", f"output: .*lines.jsonl cannot be written: the disk is full{FREE}"):
            write_lines(tmp_path / "lines.jsonl", ["new"] * 9000)
        with refused("records", f"records.jsonl: it cannot be written: the disk is full{FREE}"):
            write_records(tmp_path / "records.jsonl", [{"a": 1}] * 9000)
    assert (tmp_path / "lines.jsonl").read_text() == "old\n"
    with refusals() as refused:
        with (
            refused("scratch", f"new.nemo: cannot be written: the disk is full{FREE}"),
            scratch_beside(tmp_path / "new.nemo") as scratch,
        ):
            write_nemo(tmp_path / "model.nemo", {}, weights, weights)
        with (
            refused("run", f"run: cannot be written: the disk is full{FREE}"),
            lock_run(tmp_path / "run"),
        ):
            (tmp_path / "run/run.lock.partial").write_text("x" * 9000)
    assert not scratch.exists()
    assert not (tmp_path / "model.nemo").exists()
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))
    assert _describe_for_user(error).startswith(f"{tmp_path}/x: the disk is full, with ")


def test_file_that_cannot_be_written_is_as_it_was(tmp_path: Path, temporary_names: str) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", b"piped")
    assert os.read(reader, 9) == b"piped"
    os.close(reader)
    write_whole(tmp_path / "made" / "file", b"x")
    full_disk(tmp_path / f".file.{temporary_names}.partial")
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", b"newer")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "made", "pipe"]
    with (
        pytest.raises(CheckpointError, match="cannot be written"),
        scratch_beside(tmp_path / "file" / "x"),
    ):
        pass


def test_output_that_is_no_file_is_refused_before_the_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    for output, problem in (
        (tmp_path, f"{tmp_path} is a folder"),
        (file / "not" / "made", f"{file / 'not' / 'made'}: {file} is not a folder"),
    ):
        with pytest.raises(ConfigError, match=f"^report: {problem}\\. Name a file"):
            check_outputs({"report": output}, {})
    outputs = [file, tmp_path / "not" / "made", Path("new"), Path("/dev/null"), Path("/dev/null")]
    check_outputs({str(number): path for number, path in enumerate(outputs)}, {})


def test_output_with_the_name_or_content_of_another_format_is_refused(tmp_path: Path) -> None:
    """Above all, no model is replaced by a report."""
    archive = tmp_path / "model"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(tarfile.TarInfo("model_config.yaml"))
    for output, problem in (
        (archive, f"{archive} is a model or an archive. Name another"),
        (tmp_path / "base.nemo", f"{tmp_path / 'base.nemo'} is a model or an archive"),
        (tmp_path / "a.jsonl.gz", "will be text, not .gz. Name it, for example, a.jsonl"),
    ):
        with pytest.raises(ConfigError, match=f"^output: .*{re.escape(problem)}"):
            check_outputs({"output": output}, {})


def test_output_in_a_folder_without_permission_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere except on a read-only disk, so the answer is a stand-in."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"nothing can be written to {tmp_path}. Name another"):
        check_outputs({"output": tmp_path / "new" / "report.json"}, {})


def test_output_replaces_no_file_of_a_folder_that_is_read(tmp_path: Path) -> None:
    """Also through a link; a new file or a page may be written into the folder."""
    run, link = tmp_path / "run", tmp_path / "link"
    (run / "heldout").mkdir(parents=True)
    link.symlink_to(run)
    for name in ("metrics.jsonl", "heldout/test-a.jsonl", "report.html"):
        (run / name).write_text("old")
    for output in (run / "metrics.jsonl", link / "heldout" / "test-a.jsonl"):
        with pytest.raises(ConfigError) as caught:
            check_replaces_nothing_in(run, "output", output)
        problem = f"output: {output} is a file of the folder {run}, which is read. Name another"
        assert str(caught.value) == problem
    for output in (run / "new.jsonl", run / "report.html", tmp_path / "other"):
        check_replaces_nothing_in(run, "output", output)


def test_two_writers_of_a_file_leave_one_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    inner = [{"writer": "inner", "number": number} for number in range(9000)]

    def outer() -> Iterator[dict[str, Any]]:
        yield {"writer": "outer"}
        assert write_records(path, inner) == 9000
        assert path.read_text().splitlines() == [json.dumps(record) for record in inner]
        write_whole(path, b"other")
        assert path.read_bytes() == b"other"
        yield {"writer": "outer"}

    assert write_records(path, outer()) == 2
    assert path.read_text() == '{"writer": "outer"}\n' * 2
    with replacing(path, sync=True) as first, replacing(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # the last one that was finished
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_of_another_file_is_that_files(tmp_path: Path) -> None:
    other = tmp_path / "temporary" / "part"
    error = OSError(errno.ENOSPC, "No space left on device", str(other))
    problem = f"^{other}: cannot be written: the disk is full"
    with pytest.raises(CheckpointError, match=problem), explaining_full_disk(tmp_path / "run"):
        raise error


def test_failure_of_a_save_that_is_not_the_disks_stays(tmp_path: Path) -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RecursionError("too deep")):
        with pytest.raises(type(error)), _as_checkpoint_error(tmp_path):
            raise error
    with pytest.raises(CheckpointError, match="cut off"), _as_checkpoint_error(tmp_path):
        raise RuntimeError(CUT_OFF)
